"""What the cheap paths must not lose: memory that is used again, one timer for many calls, tasks without a group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import DeadlineExceeded, connect, describe, serve
from astraflow.rpc import frames as wire
from astraflow.rpc.buffers import KEPT, Buffers, pages


class Want(msgspec.Struct, frozen=True):
    count: int
    size: int = 0


class Piece(msgspec.Struct, frozen=True):
    data: memoryview


class Desk(Protocol):
    def flow(self, request: Want, /) -> AsyncIterator[Piece]: ...
    async def echo(self, request: Piece, /) -> Piece: ...
    async def wait(self) -> Want: ...


class DeskImpl:
    def __init__(self) -> None:
        self.refusals = 0
        self.waiting = 0

    async def flow(self, request: Want, /) -> AsyncIterator[Piece]:
        scratch = bytearray(request.size)
        for index in range(request.count):
            scratch[:] = bytes([index]) * request.size  # a sender may use its own memory again after each item
            yield Piece(memoryview(scratch))

    async def echo(self, request: Piece, /) -> Piece:
        return request

    async def wait(self) -> Want:
        self.waiting += 1
        try:
            while self.refusals < 3:
                try:
                    await anyio.sleep_forever()
                except asyncio.CancelledError:
                    self.refusals += 1
            await anyio.sleep_forever()
        finally:
            self.waiting -= 1
        raise AssertionError


@pytest.mark.parametrize("size", [70_000, 300_000, 3 << 20])
async def test_items_that_are_kept_stay_as_they_were(address: str, size: int) -> None:
    async with serve(DeskImpl(), Desk, address) as server, connect(server.address, Desk) as proxy:
        kept = [piece async for piece in proxy.flow(Want(30, size))]
        for index, piece in enumerate(kept):
            assert piece.data[0] == piece.data[-1] == index
            assert bytes(piece.data) == bytes([index]) * size


@pytest.mark.parametrize("size", [70_000, 300_000])
async def test_items_that_are_dropped_are_not_mixed_with_those_that_follow(address: str, size: int) -> None:
    async with serve(DeskImpl(), Desk, address) as server, connect(server.address, Desk) as proxy:
        index = 0
        async for piece in proxy.flow(Want(60, size)):
            if index % 7 == 0:
                await anyio.sleep(0.002)
            assert bytes(piece.data) == bytes([index]) * size
            index += 1
        assert index == 60


@pytest.mark.parametrize("make", [bytearray, pages])
def test_a_buffer_is_given_again_only_when_no_view_of_it_is_left(make: Callable[[int], Any]) -> None:
    buffers = Buffers(make)
    first = memoryview(buffers.take(1000))
    second = memoryview(buffers.take(1000))
    assert first.obj is not second.obj
    part, owner = first[10:20].toreadonly(), first.obj
    del first
    assert buffers.take(1000) is not owner
    del part
    assert buffers.take(900) is owner
    assert buffers.take(400) is not owner
    assert len(buffers.take(2000)) >= 2000


@pytest.mark.parametrize("make", [bytearray, pages])
def test_no_more_than_a_few_buffers_are_kept(make: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = Buffers.total_kept
    buffers = Buffers(make)
    views = [memoryview(buffers.take(100)) for _ in range(10)]
    old = id(views[0].obj)
    views.clear()
    again = [memoryview(buffers.take(100)) for _ in range(KEPT)]
    assert old not in [id(view.obj) for view in again]
    assert Buffers.total_kept == before + 100 * KEPT
    monkeypatch.setattr("astraflow.rpc.buffers.MOST_KEPT", before + 100 * KEPT + 10)
    others = Buffers(make)
    others.take(11)  # more than all together may keep
    assert Buffers.total_kept == before + 100 * KEPT
    others.take(10)
    assert Buffers.total_kept == before + 100 * KEPT + 10
    del buffers, others
    assert Buffers.total_kept == before


async def test_calls_in_flight_together_end_each_at_its_own_limit() -> None:
    loop = asyncio.get_running_loop()

    async with (
        serve(DeskImpl(), Desk, "tcp://127.0.0.1:0", drain_timeout=0) as server,
        connect(server.address, Desk, default_timeout=0.2) as proxy,
    ):

        async def call(delay: float) -> float:
            await asyncio.sleep(delay)
            begin = loop.time()
            with pytest.raises(DeadlineExceeded, match=r"default timeout of 0\.2 s"):
                await proxy.wait()
            return loop.time() - begin

        took = await asyncio.gather(*(call(0.05 * step) for step in range(5)))
        assert took == pytest.approx([0.2] * 5, abs=0.04)


async def test_limits_that_are_reached_at_once() -> None:
    """The loop then gives no timer but a handle, which cannot say when."""
    async with (
        serve(DeskImpl(), Desk, "tcp://127.0.0.1:0", drain_timeout=0) as server,
        connect(server.address, Desk, default_timeout=0.0004) as proxy,
    ):

        async def call() -> None:
            with pytest.raises(DeadlineExceeded):
                await proxy.wait()

        for _ in range(20):
            await asyncio.gather(*(call() for _ in range(4)))


async def test_a_handler_that_will_not_be_cancelled_is_told_until_it_ends(address: str) -> None:
    impl = DeskImpl()
    async with serve(impl, Desk, address) as server:
        async with connect(server.address, Desk) as proxy:
            call = asyncio.create_task(proxy.wait())
            with anyio.fail_after(5):
                while not impl.waiting:  # noqa: ASYNC110 (what is observed has no event)
                    await anyio.sleep(0.005)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        with anyio.fail_after(5):
            while impl.waiting:  # noqa: ASYNC110 (what is observed has no event)
                await anyio.sleep(0.005)
    assert impl.refusals == 3


async def test_results_that_nobody_reads_do_not_keep_the_server_from_closing() -> None:
    def frame(header: wire.Header, payload: bytes = b"") -> bytes:
        return wire.encode_head(header, len(payload), 1 << 30) + payload

    body = msgspec.msgpack.encode(Piece(memoryview(bytes(4 << 20))))
    async with serve(DeskImpl(), Desk, "tcp://127.0.0.1:0", drain_timeout=0.1) as server:
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(frame(wire.Hello(wire.VERSION, describe(Desk).fingerprint, 1 << 30)))
        assert await reader.readexactly(4)  # welcome
        for number in range(8):
            writer.write(frame(wire.Call(number, "echo"), body))
        with anyio.fail_after(10):
            while server.statistics()["echo"].calls < 8:  # noqa: ASYNC110 (what is observed has no event)
                await anyio.sleep(0.01)
        begin = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - begin < 3
    writer.transport.abort()
