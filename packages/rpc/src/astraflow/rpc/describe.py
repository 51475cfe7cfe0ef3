"""From a Protocol to its method table: which methods there are, what they take and give, and the fingerprint of it all.

A Protocol that cannot be served is refused here, when a server or client is made, with the reason.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Union

import msgspec

from .declare import declared_errors, is_idempotent
from .schema import MethodShape, ShapeBuilder, Table


@dataclass(frozen=True, slots=True)
class Method:
    """One method: the types of its argument (None: it takes none) and of its result, or of its stream's items."""

    name: str
    stream: bool
    idempotent: bool
    request: Any
    response: Any
    request_types: tuple[type[Any], ...]
    response_types: tuple[type[Any], ...]
    request_decoder: msgspec.msgpack.Decoder[Any]
    response_decoder: msgspec.msgpack.Decoder[Any]


@dataclass(frozen=True, eq=False)
class Description:
    """An interface as both sides see it. `fingerprint` is equal for equal method tables."""

    interface: type[Any]
    methods: Mapping[str, Method]
    errors: tuple[type[Exception], ...]
    table: Table
    fingerprint: str

    @property
    def name(self) -> str:
        return self.interface.__name__

    def check(self, impl: object) -> None:
        """Raises TypeError if an object lacks a method, or has it as another kind."""
        for method in self.methods.values():
            function = getattr(impl, method.name, None)
            if not callable(function):
                raise TypeError(f"{type(impl).__name__} cannot be served as {self.name}: it has no {method.name}()")
            if method.stream and inspect.iscoroutinefunction(function):
                raise TypeError(
                    f"{type(impl).__name__}.{method.name}() is a coroutine, {self.name} wants a stream: "
                    "an async generator (`async def` with `yield`)"
                )


@functools.cache
def describe(interface: Callable[..., Any]) -> Description:
    """The method table of a Protocol class, bases included.

    Raises:
        TypeError: a member that cannot be served, naming it and the reason.
    """
    if not isinstance(interface, type) or not getattr(interface, "_is_protocol", False):
        raise TypeError(f"{interface!r} is not a typing.Protocol class")
    methods = {name: _method(interface, name, member) for name, member in sorted(_members(interface).items())}
    if not methods:
        raise TypeError(f"{interface.__name__} has no methods")
    builder = ShapeBuilder()
    shapes = {name: _shapes(interface, builder, method) for name, method in methods.items()}
    table = Table(interface.__name__, shapes, builder.layouts)
    return Description(interface, methods, declared_errors(interface), table, table.fingerprint())


def _members(interface: type[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(interface.__mro__):
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol:
            found.update((name, value) for name, value in vars(base).items() if not name.startswith("_"))
    return found


def _method(interface: type[Any], name: str, function: Any) -> Method:
    where = f"{interface.__name__}.{name}"
    if not inspect.isfunction(function):
        raise TypeError(f"{where} is not a method: an interface has only methods")
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if len(parameters) > 1 or any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise TypeError(f"{where} must take one structure or nothing: `(self, request: Struct, /)`")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"the annotations of {where} do not resolve ({error}): define them at module level") from error
    request = _message(where, hints.get(parameters[0].name)) if parameters else None
    result = hints.get("return")
    stream = typing.get_origin(result) in (AsyncIterator, AsyncGenerator)
    if stream and inspect.iscoroutinefunction(function):
        raise TypeError(f"{where} returns a stream: declare it `def`, not `async def`")
    if not stream and not inspect.iscoroutinefunction(function):
        raise TypeError(f"{where} must be `async def`, or `def` returning AsyncIterator[Struct]")
    response = _message(where, typing.get_args(result)[0] if stream else result)
    return Method(
        name,
        stream,
        is_idempotent(function),
        request,
        response,
        (types.NoneType,) if request is None else _classes(request),
        _classes(response),
        msgspec.msgpack.Decoder(types.NoneType if request is None else request),
        msgspec.msgpack.Decoder(response),
    )


def _message(where: str, annotation: Any) -> Any:
    if not all(isinstance(option, type) and issubclass(option, msgspec.Struct) for option in _classes(annotation)):
        raise TypeError(f"{where}: messages are msgspec.Struct classes, not {annotation!r}")
    return annotation


def _classes(annotation: Any) -> tuple[Any, ...]:
    """The classes of a message type: one, or those of a union; without their type arguments."""
    union = typing.get_origin(annotation) in (Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    return tuple(typing.get_origin(option) or option for option in options)


def _shapes(interface: type[Any], builder: ShapeBuilder, method: Method) -> MethodShape:
    try:
        request = None if method.request is None else builder.shape(method.request)
        return MethodShape(method.stream, request, builder.shape(method.response))
    except TypeError as error:
        raise TypeError(f"{interface.__name__}.{method.name}: {error}") from error
