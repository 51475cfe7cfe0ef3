"""Server streams: order, ends, credit, and readers that are slow or leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Protocol, cast

import anyio
import msgspec
import pytest

from astraflow.rpc import RemoteError, Server, connect, serve, service, strict
from astraflow.rpc.frames import ITEM_OVERHEAD, STREAM_WINDOW


class Want(msgspec.Struct, frozen=True):
    count: int
    size: int = 1
    error: str = ""


class Piece(msgspec.Struct, frozen=True):
    index: int
    data: memoryview


class Dry(Exception):
    pass


@service(errors=(Dry,))
class Tap(Protocol):
    def flow(self, request: Want, /) -> AsyncIterator[Piece]: ...
    def forever(self) -> AsyncIterator[Piece]: ...
    async def echo(self, request: Want, /) -> Want: ...


class TapImpl:
    def __init__(self) -> None:
        self.made = 0
        self.closed = 0

    async def flow(self, request: Want, /) -> AsyncIterator[Piece]:
        try:
            for index in range(request.count):
                self.made += 1
                yield Piece(index, memoryview(bytes(request.size)))
            if request.error == "declared":
                raise Dry("no more")
            if request.error:
                raise OSError(request.error)
        finally:
            self.closed += 1

    async def forever(self) -> AsyncIterator[Piece]:
        try:
            yield Piece(0, memoryview(b""))
            await anyio.sleep_forever()
        finally:
            self.closed += 1

    async def echo(self, request: Want, /) -> Want:
        return request


@asynccontextmanager
async def tap(address: str) -> AsyncIterator[tuple[Tap, TapImpl, Server]]:
    impl = TapImpl()
    async with serve(impl, Tap, address) as server, connect(server.address, Tap) as proxy:
        yield proxy, impl, server


async def closed(impl: TapImpl, count: int) -> None:
    with anyio.fail_after(5):
        while impl.closed < count:  # noqa: ASYNC110 (what is observed has no event)
            await anyio.sleep(0.005)


async def test_items_come_in_order_and_end(address: str) -> None:
    async with tap(address) as (proxy, impl, server):
        assert [piece.index async for piece in proxy.flow(Want(1000))] == list(range(1000))
        assert [piece async for piece in proxy.flow(Want(0))] == []
        assert impl.closed == 2
        assert server.statistics()["flow"].in_flight == 0


async def test_an_error_comes_after_the_items_before_it(address: str) -> None:
    async with tap(address) as (proxy, _, _):
        pieces = proxy.flow(Want(3, error="declared"))
        assert [(await anext(pieces)).index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Dry, match=r"^no more$"):
            await anext(pieces)
        pieces = proxy.flow(Want(0, error="pipe burst"))
        with pytest.raises(RemoteError, match="OSError: pipe burst"):
            await anext(pieces)


async def test_a_reader_that_leaves_ends_the_handler(address: str) -> None:
    async with tap(address) as (proxy, impl, _):
        async with aclosing(cast("AsyncGenerator[Piece]", proxy.forever())) as pieces:
            async for _ in pieces:
                break
        await closed(impl, 1)
        async for _ in proxy.forever():
            break
        await closed(impl, 2)
        with anyio.move_on_after(0.05):
            async for _ in proxy.forever():
                pass
        await closed(impl, 3)
        async with aclosing(cast("AsyncGenerator[Piece]", proxy.flow(Want(100_000, 10_000)))) as pieces:
            async for _ in pieces:
                break
        await closed(impl, 4)
        assert await proxy.echo(Want(1)) == Want(1)


async def test_a_slow_reader_holds_back_only_its_own_stream_and_bounds_memory(address: str) -> None:
    size = 1 << 20
    async with tap(address) as (proxy, impl, _):
        slow = cast("AsyncGenerator[Piece]", proxy.flow(Want(100, size)))
        assert (await anext(slow)).index == 0
        await anyio.sleep(0.2)
        # One may be over the window, one encoded and waiting, one taken.
        assert impl.made <= STREAM_WINDOW // size + 3
        with anyio.fail_after(5):
            for index in range(50):
                assert await proxy.echo(Want(index)) == Want(index)
            assert len([piece async for piece in proxy.flow(Want(40, size))]) == 40
        assert [piece.index async for piece in slow] == list(range(1, 100))


async def test_tiny_items_are_bounded_too() -> None:
    async with tap("tcp://127.0.0.1:0") as (proxy, impl, _):
        slow = cast("AsyncGenerator[Piece]", proxy.flow(Want(10_000_000)))
        await anext(slow)
        made = -1
        with anyio.fail_after(30):
            while made != impl.made:
                made = impl.made
                await anyio.sleep(0.1)
        assert made <= STREAM_WINDOW // ITEM_OVERHEAD + 2
        await slow.aclose()
        await closed(impl, 1)


async def test_neither_end_of_a_busy_stream_holds_the_loop() -> None:
    async with tap("tcp://127.0.0.1:0") as (proxy, impl, _):
        ticks = burst = 0

        async def tick() -> None:
            nonlocal ticks, burst
            while True:
                made = impl.made
                await asyncio.sleep(0)
                ticks += 1
                burst = max(burst, impl.made - made)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            async for _ in proxy.flow(Want(2000)):
                pass
            tasks.cancel_scope.cancel()
        assert ticks >= 2000
        assert burst <= 2


async def test_strict_streams() -> None:
    impl = TapImpl()
    proxy = strict(impl, Tap)
    assert [piece.index async for piece in proxy.flow(Want(3))] == [0, 1, 2]
    with pytest.raises(Dry, match="no more"):
        await anext(proxy.flow(Want(0, error="declared")))
    async with aclosing(cast("AsyncGenerator[Piece]", proxy.forever())) as pieces:
        await anext(pieces)
    assert impl.closed == 3
