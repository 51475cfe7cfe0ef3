"""Calling a method of an object with a message, and its messages to and from bytes, each checked against its type."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from .buffers import Buffers
from .describe import Method
from .frames import DECODE_ERRORS, Payload, encode, encode_into
from .interface import RemoteError

LARGE = 1 << 16


def invoke(impl: object, method: Method, request: object) -> Any:
    """What the object's method returns: an awaitable, or an async iterator."""
    function = getattr(impl, method.name)
    return function() if method.request is None else function(request)


@asynccontextmanager
async def closing(items: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """Close a stream's iterator at the end, if it is one that can be closed (a generator)."""
    try:
        yield items
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


def encode_request(method: Method, request: object) -> bytes:
    """Raises TypeError if the argument is not of the declared type."""
    if not isinstance(request, method.request_types):
        raise _wrong(method.name, "argument", method.request_types, request)
    return encode(request)


def encode_response(method: Method, response: object) -> bytes:
    """Raises TypeError if the handler gave something else than it declares."""
    check_response(method, response)
    return encode(response)


def check_response(method: Method, response: object) -> None:
    if not isinstance(response, method.response_types):
        raise _wrong(method.name, "item" if method.stream else "result", method.response_types, response)


class ItemEncoder:
    """As encode_response(), for the items of one stream. Large ones share memory: a view is good while it is held."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._buffers = Buffers(bytearray)
        self._last_size = 0

    def encode(self, item: object) -> Payload:
        body: Payload
        if self._last_size < LARGE:
            body = encode_response(self._method, item)
        else:
            check_response(self._method, item)
            buffer = self._buffers.take(self._last_size)
            encode_into(item, buffer)
            body = memoryview(buffer)
        self._last_size = len(body)
        return body


def decode_request(method: Method, payload: Payload) -> object:
    """Raises msgspec.ValidationError naming the field that is not what the interface says."""
    try:
        return method.request_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise msgspec.ValidationError(f"the argument of {method.name}: {error}") from error


def decode_response(method: Method, payload: Payload) -> Any:
    """Raises RemoteError naming the field that is not what the interface says."""
    try:
        return method.response_decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise RemoteError("ValidationError", f"the result of {method.name}: {error}") from error


def _wrong(name: str, role: str, wanted: tuple[type[Any], ...], value: object) -> TypeError:
    names = " or ".join(kind.__name__ for kind in wanted)
    return TypeError(f"the {role} of {name} must be {names}, not {type(value).__name__}")
