"""Sides of different age over a live connection, and a server that stays away for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import InterfaceMismatch, Unavailable, connect, method, serve


class Old(msgspec.Struct, frozen=True):
    text: str


class New(msgspec.Struct, frozen=True):
    text: str
    urgent: bool = False
    tags: tuple[str, ...] = ()


class Required(msgspec.Struct, frozen=True):
    text: str
    urgent: bool


class OldPlace(Protocol):
    @method(idempotent=True)
    async def say(self, request: Old, /) -> Old: ...
    def repeat(self, request: Old, /) -> AsyncIterator[Old]: ...


class NewPlace(Protocol):
    @method(idempotent=True)
    async def say(self, request: New, /) -> New: ...
    def repeat(self, request: New, /) -> AsyncIterator[New]: ...


class RequiredPlace(Protocol):
    async def say(self, request: Required, /) -> Required: ...
    def repeat(self, request: Required, /) -> AsyncIterator[Required]: ...


class Place:
    """Says what it heard, in whichever age it is served."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def say(self, request: Any, /) -> Any:
        self.heard.append(request)
        return request

    async def repeat(self, request: Any, /) -> AsyncIterator[Any]:
        self.heard.append(request)
        for _ in range(3):
            yield request


async def test_an_older_client_with_a_newer_server(address: str) -> None:
    place = Place()
    async with serve(place, NewPlace, address) as server, connect(server.address, OldPlace) as proxy:
        assert await proxy.say(Old("a")) == Old("a")
        assert [item async for item in proxy.repeat(Old("b"))] == [Old("b")] * 3
    assert place.heard == [New("a"), New("b")]


async def test_a_newer_client_with_an_older_server(address: str) -> None:
    place = Place()
    async with serve(place, OldPlace, address) as server, connect(server.address, NewPlace) as proxy:
        assert await proxy.say(New("a", True, ("x",))) == New("a")
        assert [item async for item in proxy.repeat(New("b", True))] == [New("b")] * 3
    assert place.heard == [Old("a"), Old("b")]


async def test_a_newer_server_may_take_over_from_an_older_one(address: str) -> None:
    async with serve(Place(), OldPlace, address) as old:
        where = old.address
        client = connect(where, OldPlace)
        proxy = await client.__aenter__()
        assert await proxy.say(Old("a")) == Old("a")
    async with serve(Place(), NewPlace, where):
        with anyio.fail_after(5):
            assert await proxy.say(Old("b")) == Old("b")
    await client.__aexit__(None, None, None)


@pytest.mark.parametrize(("ours", "theirs"), [(OldPlace, RequiredPlace), (RequiredPlace, OldPlace)])
async def test_a_new_required_field_is_not_compatible(ours: type, theirs: type, address: str) -> None:
    async with serve(Place(), ours, address) as server:
        with pytest.raises(InterfaceMismatch, match=r"Required\.urgent: required by one side, unknown to the other"):
            async with connect(server.address, theirs):
                pass


@pytest.mark.parametrize(
    ("absence", "scale"), [(1.6, 1 / 20), pytest.param(32.0, 1.0, marks=pytest.mark.slow)], ids=["scaled", "real"]
)
async def test_a_server_that_was_away_for_half_a_minute_is_found_again(
    absence: float, scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idempotent calls wait for it, others fail at once, and the wait after its return is one back-off at most."""
    address = f"unix:{tmp_path}/s"
    monkeypatch.setattr("astraflow.rpc.client.FIRST_DELAY", 0.05 * scale)
    monkeypatch.setattr("astraflow.rpc.client.LAST_DELAY", 2 * scale)
    async with serve(Place(), OldPlace, address):
        client = connect(address, OldPlace)
        proxy = await client.__aenter__()
        await proxy.say(Old("a"))
    waiting = asyncio.create_task(proxy.say(Old("b")))
    await anyio.sleep(absence)
    with pytest.raises(Unavailable, match="No such file"):
        async for _ in proxy.repeat(Old("c")):
            pass
    place = Place()
    async with serve(place, OldPlace, address):
        with anyio.fail_after(2 * scale + 1):
            assert await waiting == Old("b")
        assert place.heard == [Old("b")]
    await client.__aexit__(None, None, None)
