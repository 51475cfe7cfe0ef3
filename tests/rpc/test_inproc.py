"""`inproc:NAME`: the object itself, or with `strict` every message through msgspec and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import InterfaceMismatch, RemoteError, Unavailable, connect, serve


class Words(msgspec.Struct):
    words: list[str]


class Desk(Protocol):
    async def keep(self, request: Words, /) -> Words: ...
    def speak(self, request: Words, /) -> AsyncIterator[Words]: ...


class Other(Protocol):
    async def keep(self, request: Words, /) -> Words: ...


class DeskImpl:
    async def keep(self, request: Words, /) -> Words:
        if not request.words:
            raise ValueError("nothing to keep")
        return request

    async def speak(self, request: Words, /) -> AsyncIterator[Words]:
        for word in request.words:
            yield Words([word])


async def test_the_object_is_handed_over() -> None:
    impl = DeskImpl()
    async with serve(impl, Desk, "inproc:desk") as server:
        assert server.address == "inproc:desk"
        async with connect(server.address, Desk) as desk:
            assert desk is impl


async def test_strict_shares_nothing() -> None:
    async with serve(DeskImpl(), Desk, "inproc:desk"), connect("inproc:desk", Desk, strict=True) as desk:
        ours = Words(["a"])
        theirs = await desk.keep(ours)
        theirs.words.append("b")
        assert ours.words == ["a"]
        assert [item async for item in desk.speak(Words(["x", "y"]))] == [Words(["x"]), Words(["y"])]
        with pytest.raises(RemoteError, match="ValueError: nothing to keep"):
            await desk.keep(Words([]))


async def test_a_client_may_come_first_and_waits_no_longer_than_it_may() -> None:
    async def later() -> None:
        await anyio.sleep(0.1)
        async with serve(DeskImpl(), Desk, "inproc:desk"):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        async with connect("inproc:desk", Desk) as desk:
            assert isinstance(desk, DeskImpl)
        tasks.cancel_scope.cancel()
    with pytest.raises(Unavailable, match=r"within 0.1 s: nothing is served at inproc:desk"):
        async with connect("inproc:desk", Desk, connect_timeout=0.1):
            pass


async def test_a_name_is_one_objects() -> None:
    async with serve(DeskImpl(), Desk, "inproc:desk"):
        with pytest.raises(OSError, match="another object is served there"):
            async with serve(DeskImpl(), Desk, "inproc:desk"):
                pass
        with pytest.raises(InterfaceMismatch, match=r"only the server has it|only the client|speak"):
            async with connect("inproc:desk", Other):
                pass


async def test_another_event_loop_does_not_get_it() -> None:
    async def elsewhere() -> None:
        with pytest.raises(Unavailable, match="another event loop"):
            async with connect("inproc:desk", Desk):
                pass

    async with serve(DeskImpl(), Desk, "inproc:desk"):
        await asyncio.to_thread(asyncio.run, elsewhere())


async def test_a_name_is_wanted() -> None:
    with pytest.raises(ValueError, match="wants a name"):
        async with connect("inproc:", Desk):
            pass
