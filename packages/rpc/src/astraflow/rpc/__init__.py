"""Typed services over msgspec: a Protocol served and called in process, over a Unix socket, TCP or TLS."""

from .client import connect, statistics
from .declare import method, service
from .describe import Description, Method, describe
from .frames import MAX_FRAME
from .interface import (
    DeadlineExceeded,
    FrameTooLarge,
    InterfaceMismatch,
    ProtocolError,
    RemoteError,
    RpcError,
    Unauthorized,
    Unavailable,
)
from .proxy import strict
from .server import Server, serve
from .stats import BUCKETS, Histogram, MethodStats, prometheus
from .tls import Tls
from .token import Token, TokenFile, TokenVariable
from .trace import trace_id

__all__ = [
    "BUCKETS",
    "MAX_FRAME",
    "DeadlineExceeded",
    "Description",
    "FrameTooLarge",
    "Histogram",
    "InterfaceMismatch",
    "Method",
    "MethodStats",
    "ProtocolError",
    "RemoteError",
    "RpcError",
    "Server",
    "Tls",
    "Token",
    "TokenFile",
    "TokenVariable",
    "Unauthorized",
    "Unavailable",
    "connect",
    "describe",
    "method",
    "prometheus",
    "serve",
    "service",
    "statistics",
    "strict",
    "trace_id",
]
