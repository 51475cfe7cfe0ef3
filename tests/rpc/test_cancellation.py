"""Cancellation at every await: of the caller, of the handler, of a client and a server that begin, work and end.

A scenario runs again and again, and each time its victim is cancelled one suspension later, counted over the victim's
own awaits and those of every task the transport has made, until it ends untouched. After each strike no task and no
descriptor may be left, nothing may be in flight, and the connection must still carry a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest

import astraflow.rpc
from astraflow.rpc import RemoteError, Server, Unavailable, connect, method, serve, statistics
from astraflow.rpc.hosts import IDLE, KEPT

# whose coroutines are the transport's: a task group's tasks begin in anyio
TRANSPORT = tuple(str(Path(module.__file__ or "").parent) for module in (astraflow.rpc, anyio))
MOST_STEPS = 400
HANG = 15


class Number(msgspec.Struct, frozen=True):
    value: int = 0


class Shop(Protocol):
    async def ask(self, request: Number, /) -> Number: ...
    @method(idempotent=True)
    async def read(self, request: Number, /) -> Number: ...
    def count(self, request: Number, /) -> AsyncIterator[Number]: ...


class ShopImpl:
    def __init__(self) -> None:
        self.running: list[asyncio.Task[Any]] = []

    @contextlib.contextmanager
    def _task(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self.running.append(task)
        try:
            yield
        finally:
            self.running.remove(task)

    async def ask(self, request: Number, /) -> Number:
        with self._task():
            for _ in range(3):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005)
            return Number(request.value + 1)

    async def read(self, request: Number, /) -> Number:
        return await self.ask(request)

    async def count(self, request: Number, /) -> AsyncIterator[Number]:
        with self._task():
            for value in range(request.value):
                await asyncio.sleep(0)
                yield Number(value)


# --- the sweep -------------------------------------------------------------------------------------------------------


class Probe:
    """Counts suspensions of watched coroutines, and strikes at one of them."""

    def __init__(self, at: int, strike: Callable[[], None]) -> None:
        self.at = at
        self.strike = strike
        self.count = 0
        self.on = True

    async def watch(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _Watched(self, coroutine)

    def suspended(self) -> None:
        self.count += self.on
        if self.on and self.count == self.at:
            self.strike()

    def factory(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        code = getattr(coroutine, "cr_code", None)
        ours = self.on and code is not None and code.co_filename.startswith(TRANSPORT)
        return asyncio.Task(self.watch(coroutine) if ours else coroutine, loop=loop, **options)


class _Watched:
    def __init__(self, probe: Probe, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._probe = probe
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        thrown: BaseException | None = None
        while True:
            try:
                awaited = self._coroutine.send(None) if thrown is None else self._coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value
            self._probe.suspended()
            thrown = None
            try:
                yield awaited
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:
                thrown = error


def at_work() -> set[asyncio.Task[Any]]:
    """The tasks there are, but for those in which a server waits for calls, of which it keeps a few."""
    tasks = asyncio.all_tasks()
    idle = {task for task in tasks if task.get_name() == IDLE}
    assert len(idle) <= KEPT
    return tasks - idle


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def becomes(condition: Callable[[], bool], seconds: float) -> bool:
    for _ in range(int(seconds / 0.005)):
        if condition():
            return True
        await asyncio.sleep(0.005)
    return False


async def settled(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    if not await becomes(condition, 2):
        pytest.fail(f"still there: {what()}")


Scenario = Callable[[], Coroutine[Any, Any, None]]
Victim = Callable[[], asyncio.Task[Any] | None]


async def struck(scenario: Scenario, step: int, victim: Victim | None, scope: bool) -> tuple[int, BaseException | None]:
    """Run the scenario once, with a strike at a suspension; how many there were, and how it ended."""
    loop = asyncio.get_running_loop()
    around = anyio.CancelScope()

    def strike() -> None:
        if scope:
            around.cancel()
        elif (found := main if victim is None else victim()) is not None:
            found.cancel()

    async def scoped() -> None:
        with around:
            await scenario()

    probe = Probe(step, strike)
    loop.set_task_factory(probe.factory)  # type: ignore[arg-type]
    main = asyncio.create_task(probe.watch(scoped()))
    try:
        done, _ = await asyncio.wait([main], timeout=HANG)
    finally:
        probe.on = False
        loop.set_task_factory(None)
    if not done:
        main.print_stack()
        pytest.fail(f"hangs when cancelled at suspension {step}")
    return probe.count, None if main.cancelled() else main.exception()


async def sweep(
    scenario: Scenario,
    *,
    after: Callable[[], Awaitable[None]],
    victim: Victim | None = None,
    scope: bool = False,
    errors: tuple[type[BaseException], ...] = (),
) -> int:
    """Run `scenario` until no strike reaches it; how often it was struck.

    Struck is the scenario itself, its task or (with `scope`) an anyio scope around it; or the task that `victim` gives.
    """
    for step in range(1, MOST_STEPS):
        for attempt in range(3):
            tasks, files = at_work(), descriptors()
            suspensions, error = await struck(scenario, step, victim, scope)
            if error is not None and not isinstance(error, errors):
                raise error
            await after()
            await settled(lambda before=tasks: at_work() <= before, at_work)  # type: ignore[misc]
            gc.collect(0)
            if await becomes(lambda before=files: descriptors() <= before, 0.2):  # type: ignore[misc]
                break  # the loop opens one of its own now and then, but not at each attempt
            assert attempt < 2, f"descriptors are left when cancelled at suspension {step}"
        if suspensions < step:
            print(f"{step - 1} strikes")
            return step - 1
    pytest.fail(f"the scenario has more than {MOST_STEPS} suspensions")


@asynccontextmanager
async def shop(address: str) -> AsyncIterator[tuple[Shop, ShopImpl, Server, Callable[[], Awaitable[None]]]]:
    """A served shop, its proxy, and a check that the connection is idle, usable and still the same."""
    impl = ShopImpl()
    async with serve(impl, Shop, address, drain_timeout=0.2) as server, connect(server.address, Shop) as proxy:
        first = set(server.connections)

        def busy() -> int:
            figures = [*server.statistics().values(), *statistics(proxy).values()]
            return sum(figure.in_flight for figure in figures) + len(impl.running)

        async def usable() -> None:
            with anyio.fail_after(5):
                assert await proxy.ask(Number(4)) == Number(5)
            await settled(lambda: not busy(), busy)
            assert set(server.connections) == first

        yield proxy, impl, server, usable


FLAVOURS = pytest.mark.parametrize("scope", [False, True], ids=["task", "scope"])


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s"


# --- the caller ------------------------------------------------------------------------------------------------------


@FLAVOURS
async def test_a_unary_call(address: str, scope: bool) -> None:
    async with shop(address) as (proxy, _, _, usable):

        async def call() -> None:
            assert await proxy.ask(Number(1)) == Number(2)

        assert await sweep(call, after=usable, scope=scope) >= 1


@FLAVOURS
async def test_a_call_with_a_deadline_of_its_own(address: str, scope: bool) -> None:
    async with shop(address) as (proxy, _, _, usable):

        async def call() -> None:
            with anyio.move_on_after(0.001):
                await proxy.read(Number(1))

        assert await sweep(call, after=usable, scope=scope) >= 1


@FLAVOURS
async def test_a_stream_read_to_its_end(address: str, scope: bool) -> None:
    async with shop(address) as (proxy, _, _, usable):

        async def read() -> None:
            items = proxy.count(Number(4))
            async with aclosing(items):  # type: ignore[type-var]
                assert [item.value async for item in items] == [0, 1, 2, 3]

        assert await sweep(read, after=usable, scope=scope) >= 4


@FLAVOURS
async def test_a_stream_that_is_left(address: str, scope: bool) -> None:
    async with shop(address) as (proxy, _, _, usable):

        async def read() -> None:
            items = proxy.count(Number(12))
            async with aclosing(items):  # type: ignore[type-var]
                async for item in items:
                    if item.value == 3:
                        break

        assert await sweep(read, after=usable, scope=scope) >= 4


@FLAVOURS
async def test_a_call_that_waits_for_its_turn(scope: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.MAX_CALLS", 1)
    async with shop(f"unix:{tmp_path}/s") as (proxy, _, _, usable):

        async def calls() -> None:
            async with asyncio.TaskGroup() as tasks:
                for value in range(3):
                    tasks.create_task(proxy.ask(Number(value)))

        assert await sweep(calls, after=usable, scope=scope) >= 1


# --- the client ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0"])
@FLAVOURS
async def test_connecting_calling_and_closing(address: str, scope: bool) -> None:
    async with shop(address) as (_, _, server, usable):

        async def visit() -> None:
            async with connect(server.address, Shop) as visitor:
                assert await visitor.ask(Number(1)) == Number(2)

        async def alone() -> None:
            await settled(lambda: len(server.connections) == 1, lambda: server.connections)
            await usable()

        assert await sweep(visit, after=alone, scope=scope) >= 3


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0"])
@FLAVOURS
@pytest.mark.parametrize("busy", [False, True])
async def test_reconnecting(address: str, scope: bool, busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is lost, with a call in flight or none, and made again; the client is cancelled on the way."""
    monkeypatch.setattr("astraflow.rpc.client.FIRST_DELAY", 0.001)
    async with shop(address) as (_, impl, server, usable):
        keep = set(server.connections)

        def cut() -> None:
            for connection in server.connections - keep:
                connection.channel.abort("cut")

        async def reconnect() -> None:
            async with connect(server.address, Shop, connect_timeout=2) as visitor:
                assert await visitor.read(Number(1)) == Number(2)
                asyncio.get_running_loop().call_later(0.0003 if busy else 0, cut)
                assert await visitor.read(Number(2)) == Number(3)
                assert await visitor.read(Number(3)) == Number(4)

        async def alone() -> None:
            await settled(lambda: server.connections == keep and not impl.running, lambda: server.connections)
            await usable()

        assert await sweep(reconnect, after=alone, scope=scope) >= 5


# --- the server ------------------------------------------------------------------------------------------------------


@FLAVOURS
async def test_serving_from_beginning_to_end(scope: bool, tmp_path: Path) -> None:
    """Both ends in one task, so that each await of the server's beginning, work, drain and end is struck."""
    address = f"unix:{tmp_path}/s"
    impl = ShopImpl()

    async def day() -> None:
        async with serve(impl, Shop, address, drain_timeout=0.05) as server, connect(server.address, Shop) as proxy:
            assert await proxy.ask(Number(1)) == Number(2)

    async def gone() -> None:
        await settled(lambda: not impl.running, lambda: impl.running)
        await settled(lambda: not os.path.exists(address.removeprefix("unix:")), lambda: "the socket")

    assert await sweep(day, after=gone, scope=scope) >= 5


async def test_a_server_that_is_cancelled_at_work_fails_its_callers_at_once(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    impl = ShopImpl()
    serving: list[asyncio.Task[None]] = []

    async def server() -> None:
        async with serve(impl, Shop, address, drain_timeout=0.05):
            await asyncio.sleep(60)

    async def work() -> None:
        serving[:] = [asyncio.create_task(server())]
        try:
            async with connect(address, Shop, connect_timeout=0.1) as proxy:
                assert await proxy.ask(Number(1)) == Number(2)
                items = proxy.count(Number(3))
                async with aclosing(items):  # type: ignore[type-var]
                    assert [item.value async for item in items] == [0, 1, 2]
        finally:
            serving[0].cancel()
            await asyncio.wait(serving)

    async def gone() -> None:
        await settled(lambda: not impl.running, lambda: impl.running)
        await settled(lambda: not os.path.exists(address.removeprefix("unix:")), lambda: "the socket")

    strikes = await sweep(work, after=gone, victim=lambda: serving[0] if serving else None, errors=(Unavailable,))
    assert strikes >= 5


@pytest.mark.parametrize("kept", [0, KEPT])
@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_a_handler_that_is_cancelled_from_within(
    kind: str, kept: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation that leaks out of a handler ends its call with an error, and nothing else."""
    monkeypatch.setattr("astraflow.rpc.hosts.KEPT", kept)  # 0: a task for each call, whose awaits are counted, too
    async with shop(address) as (proxy, impl, _, usable):

        async def call() -> None:
            if kind == "unary":
                assert await proxy.ask(Number(1)) == Number(2)
                return
            items = proxy.count(Number(5))
            async with aclosing(items):  # type: ignore[type-var]
                assert [item.value async for item in items] == [0, 1, 2, 3, 4]

        def handler() -> asyncio.Task[Any] | None:
            return impl.running[0] if impl.running else None

        assert await sweep(call, after=usable, victim=handler, errors=(RemoteError,)) >= (1 if kept else 3)
