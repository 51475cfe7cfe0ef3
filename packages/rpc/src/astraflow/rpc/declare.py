"""How an interface says what its Protocol cannot: which methods may be repeated, and which errors are part of it.

Metadata only: a decorated Protocol behaves as before, and the package that declares it needs nothing else from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[object])

# Beside the classes, not on them: an attribute would become a member of a runtime-checkable Protocol.
_errors: WeakKeyDictionary[type[Any], tuple[type[Exception], ...]] = WeakKeyDictionary()


def method(*, idempotent: bool) -> Callable[[Function], Function]:
    """Mark a Protocol method. An idempotent one is sent again after a lost connection, within its deadline.

    Without the mark a method is never sent twice: a lost connection surfaces as `Unavailable`.
    """

    def mark(function: Function) -> Function:
        function.__dict__["__rpc_idempotent__"] = idempotent
        return function

    return mark


def service(*, errors: Sequence[type[Exception]]) -> Callable[[Class], Class]:
    """Declare the exceptions that are part of an interface: they reach the caller as themselves.

    They travel as class name and message and are raised as `cls(message)`; a subclass arrives as the nearest declared
    class. Everything else arrives as `RemoteError`.

        @service(errors=(Fenced, RunFailed))
        class DataflowService(Protocol): ...
    """

    def declare(interface: Class) -> Class:
        _errors[interface] = tuple(errors)
        return interface

    return declare


def is_idempotent(function: Callable[..., Any]) -> bool:
    return bool(getattr(function, "__rpc_idempotent__", False))


def declared_errors(interface: type[Any]) -> tuple[type[Exception], ...]:
    """The errors of an interface and of those it extends."""
    return tuple(dict.fromkeys(error for base in interface.__mro__ for error in _errors.get(base, ())))
