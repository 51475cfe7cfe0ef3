"""The method table: what is refused, what is compatible, and how differences read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec
import pytest

from astraflow.rpc import describe, method, service
from astraflow.rpc.schema import Table, differences


class Ask(msgspec.Struct, frozen=True):
    text: str
    depth: int = 0


class Tree(msgspec.Struct, frozen=True):
    value: int
    children: tuple[Tree, ...] = ()


class Refused(Exception):
    pass


class Base(Protocol):
    async def ping(self) -> Ask: ...


@service(errors=(Refused,))
class Service(Base, Protocol):
    @method(idempotent=True)
    async def ask(self, request: Ask, /) -> Tree: ...
    def walk(self, request: Tree, /) -> AsyncIterator[Tree]: ...


def test_a_protocol_is_described_with_its_bases() -> None:
    found = describe(Service)
    assert list(found.methods) == ["ask", "ping", "walk"]
    assert (found.methods["ask"].request, found.methods["ask"].response) == (Ask, Tree)
    assert found.methods["ask"].idempotent
    assert not found.methods["ping"].idempotent
    assert found.methods["ping"].request is None
    assert found.methods["walk"].stream
    assert found.errors == (Refused,)
    assert describe(Service) is found
    assert describe(Base).fingerprint != found.fingerprint


class NotAsync(Protocol):
    def ask(self, request: Ask, /) -> Tree: ...


class Two(Protocol):
    async def ask(self, first: Ask, second: Ask, /) -> Tree: ...


class Plain(Protocol):
    async def ask(self, request: int, /) -> Tree: ...


class AsyncStream(Protocol):
    async def walk(self) -> AsyncIterator[Tree]: ...


class Odd(msgspec.Struct):
    value: complex


class OddField(Protocol):
    async def ask(self) -> Odd: ...


@pytest.mark.parametrize(
    ("interface", "reason"),
    [
        (NotAsync, "must be `async def`"),
        (Two, "one structure or nothing"),
        (Plain, "msgspec.Struct classes"),
        (AsyncStream, "declare it `def`"),
        (OddField, "cannot be part of a message"),
        (Ask, "not a typing.Protocol"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(interface: type, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        describe(interface)


Fields = list[Any]
"""(name, type) or (name, type, default) of each field."""


def table(fields: Fields, **options: Any) -> Table:
    """The table of an interface whose one method takes and gives a structure of these fields."""
    message = msgspec.defstruct("Message", fields, **options)

    class One(Protocol):
        async def call(self, request: message, /) -> message: ...  # type: ignore[valid-type]

    One.call.__annotations__.update(request=message, **{"return": message})
    return describe(One).table


def test_a_new_optional_field_is_compatible_both_ways() -> None:
    old, new = table([("a", int)]), table([("a", int), ("b", str, "")])
    assert old.fingerprint() != new.fingerprint()
    assert differences(old, new) == []
    assert differences(new, old) == []


@pytest.mark.parametrize(
    ("client", "server", "line"),
    [
        ([("a", int)], [("a", int), ("b", str)], "request of call: Message.b: required by one side"),
        ([("a", int), ("b", str)], [("a", int)], "result of call: Message.b: required by one side"),
        ([("a", int)], [("a", str)], "request of call: Message.a: int is written, str is read"),
        ([("a", list[int])], [("a", list[str])], "request of call: Message.a: int is written, str is read"),
        ([("a", int | None)], [("a", int)], "request of call: Message.a: none is written, int is read"),
        ([("a", Literal["x", "y"])], [("a", Literal["x"])], "request of call: Message.a: literal"),
        ([("a", dict[str, int])], [("a", dict[str, bytes])], "request of call: Message.a: int is written"),
    ],
)
def test_what_differs_is_named(client: Fields, server: Fields, line: str) -> None:
    assert any(found.startswith(line) for found in differences(table(client), table(server)))


def test_wider_readers_are_compatible_for_what_only_they_read() -> None:
    narrow, wide = table([("a", int)]), table([("a", int | None)])
    assert differences(narrow, wide) == ["result of call: Message.a: none is written, int is read"]


def test_positional_structures_compare_by_position() -> None:
    old = table([("a", int), ("b", int)], array_like=True)
    assert differences(old, table([("a", int), ("b", int), ("c", int, 0)], array_like=True)) == []
    assert differences(old, table([("b", int), ("a", int)], array_like=True))
    assert differences(old, table([("a", int), ("b", int)]))


def test_methods_that_only_one_side_has_are_named() -> None:
    assert differences(describe(Base).table, describe(Service).table) == [
        "method ask: only the server has it",
        "method walk: only the server has it",
    ]


def test_a_table_survives_the_wire() -> None:
    found = describe(Service).table
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=Table) == found
