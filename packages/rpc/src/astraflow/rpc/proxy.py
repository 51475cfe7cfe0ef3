"""A proxy: an object of the Protocol whose methods are messages, whoever carries them.

`strict` is the carrier without a wire: the object in this process, with every message through msgspec and back, so
that nothing can lean on shared mutable state.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import msgspec

from .describe import Description, Method, describe
from .failures import FailureBody, error_of, failure_of
from .invoke import closing, decode_request, decode_response, encode_request, encode_response, invoke

T = TypeVar("T")


class Carrier(Protocol):
    """What takes a proxy's calls."""

    async def call(self, method: Method, request: object) -> Any: ...

    def stream(self, method: Method, request: object) -> AsyncIterator[Any]: ...


def make_proxy(description: Description, carrier: Carrier) -> Any:
    """An instance of the interface whose methods go to `carrier`."""
    proxy = _proxy_class(description)()
    proxy.__dict__["_carrier"] = carrier
    return proxy


def carrier_of(proxy: object) -> Any:
    """The carrier of a proxy; None if the object is not one."""
    return getattr(proxy, "__dict__", {}).get("_carrier")


@functools.cache
def _proxy_class(description: Description) -> type[Any]:
    methods = {name: _forward(method) for name, method in description.methods.items()}
    return type(f"{description.name}Proxy", (description.interface,), methods)


def _forward(method: Method) -> Callable[..., Any]:
    begin = "stream" if method.stream else "call"
    if method.request is None:
        return lambda self: getattr(self._carrier, begin)(method, None)
    return lambda self, request, /: getattr(self._carrier, begin)(method, request)


class StrictCarrier:
    """Calls an object of this process as a server would, errors included."""

    def __init__(self, impl: object, description: Description) -> None:
        self._impl = impl
        self._description = description

    async def call(self, method: Method, request: object) -> Any:
        body = encode_request(method, request)
        try:
            result = encode_response(method, await invoke(self._impl, method, decode_request(method, body)))
        except Exception as error:
            raise self._as_seen(error, method) from error
        return decode_response(method, result)

    async def stream(self, method: Method, request: object) -> AsyncIterator[Any]:
        body = encode_request(method, request)
        items = self._items(method, body)
        async with aclosing(items):
            async for item in items:
                yield decode_response(method, item)

    async def _items(self, method: Method, body: bytes) -> AsyncGenerator[bytes]:
        try:
            async with closing(invoke(self._impl, method, decode_request(method, body))) as items:
                async for item in items:
                    yield encode_response(method, item)
        except Exception as error:
            raise self._as_seen(error, method) from error

    def _as_seen(self, error: Exception, method: Method) -> Exception:
        failure = msgspec.msgpack.encode(failure_of(error, self._description))
        return error_of(msgspec.msgpack.decode(failure, type=FailureBody), self._description, method.name)


def strict(impl: object, interface: Callable[..., T]) -> T:
    """An object of `interface` that hands every message to `impl` through msgspec and back, for tests.

    Raises:
        TypeError: `interface` cannot be served, or `impl` is not one.
    """
    description = describe(interface)
    description.check(impl)
    return cast("T", make_proxy(description, StrictCarrier(impl, description)))
