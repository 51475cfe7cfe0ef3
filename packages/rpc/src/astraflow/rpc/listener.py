"""The accept loop: sockets in, whatever they will turn out to be. It outlives a lack of descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable

import anyio
import structlog

OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
GONE = (errno.ECONNABORTED, errno.EPERM, errno.EPROTO)
PAUSE = 0.5

log = structlog.get_logger(__name__)


async def accept_all(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Give every accepted socket to `take`, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, _ = await loop.sock_accept(listener)
        except OSError as error:
            if error.errno in OUT_OF:
                log.error("cannot accept connections", reason=str(error))
                await anyio.sleep(PAUSE)
            elif error.errno not in GONE:
                raise
            continue
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        take(accepted)


def name_of(peer: socket.socket) -> str:
    """Where a connection comes from, for the log."""
    if peer.family == socket.AF_UNIX:
        return "unix"
    try:
        host, port, *_ = peer.getpeername()
    except OSError:
        return "a peer that has gone"
    return f"{host}:{port}"


def hang_up(accepted: socket.socket) -> None:
    """End a connection whoever holds its socket."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
