"""A handler finds the same world whether its call began where its frame arrived or in a task's turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec
import pytest

from astraflow.rpc import RemoteError, Server, connect, describe, serve, statistics, trace_id
from astraflow.rpc import frames as wire
from astraflow.rpc.hosts import IDLE, KEPT

seen: ContextVar[str] = ContextVar("seen", default="")


class Note(msgspec.Struct, frozen=True):
    text: str = ""


class Desk(Protocol):
    async def do(self, request: Note, /) -> Note: ...


class DeskImpl:
    """Does what `action` says with each call."""

    def __init__(self) -> None:
        self.action: Callable[[Note], Awaitable[Note]] = self.echo
        self.begun = 0
        self.ended = 0
        self.tasks: list[asyncio.Task[Any] | None] = []

    async def echo(self, request: Note) -> Note:
        return request

    async def do(self, request: Note, /) -> Note:
        self.begun += 1
        self.tasks.append(asyncio.current_task())
        try:
            return await self.action(request)
        finally:
            self.tasks.append(asyncio.current_task())
            self.ended += 1


@asynccontextmanager
async def desk(address: str, **options: Any) -> AsyncIterator[tuple[Desk, DeskImpl, Server]]:
    """With a task that waits for calls, so that the next one begins at once."""
    impl = DeskImpl()
    async with serve(impl, Desk, address) as server, connect(server.address, Desk, **options) as proxy:
        await proxy.do(Note())
        impl.tasks.clear()
        yield proxy, impl, server


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 (what is observed has no event)
            await anyio.sleep(0.002)


def idle() -> int:
    return sum(task.get_name() == IDLE for task in asyncio.all_tasks())


async def test_a_call_that_does_not_wait_takes_no_task(address: str) -> None:
    async with desk(address) as (proxy, impl, server):
        made: list[str] = []
        loop = asyncio.get_running_loop()

        def factory(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            made.append(repr(coroutine))
            return asyncio.Task(coroutine, loop=loop, **options)

        loop.set_task_factory(factory)
        try:
            for number in range(50):
                assert await proxy.do(Note(str(number))) == Note(str(number))
        finally:
            loop.set_task_factory(None)
        assert made == []
        assert len(set(impl.tasks)) == 1
        assert server.statistics()["do"].calls == server.statistics()["do"].latency.count == 51
        assert statistics(proxy)["do"].bytes_sent == server.statistics()["do"].bytes_received


@pytest.mark.parametrize("waits", [False, True])
async def test_scopes_and_groups_of_either_kind_work(address: str, waits: bool) -> None:
    async def use(request: Note) -> Note:
        done = []
        with anyio.move_on_after(5 if request.text == "calm" else 0.005) as scope:
            if waits or request.text != "calm":
                await anyio.sleep(0.01 if request.text == "calm" else 60)
        done.append("moved on" if scope.cancelled_caught else "slept")
        try:
            async with asyncio.timeout(0.005):
                await asyncio.sleep(60)
        except TimeoutError:
            done.append("timeout")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0.001)
            tasks.start_soon(anyio.sleep, 60)
            await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()
        with pytest.raises(ExceptionGroup):
            await both()
        with anyio.CancelScope() as own:
            own.cancel()
            await anyio.lowlevel.checkpoint()
        assert own.cancelled_caught
        return Note(" ".join(done))

    async def fail() -> None:
        raise ValueError

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(anyio.sleep(60))
            group.create_task(fail())

    async with desk(address) as (proxy, impl, _):
        impl.action = use
        for _ in range(3):
            assert await proxy.do(Note("calm")) == Note("slept timeout")
            assert await proxy.do(Note("late")) == Note("moved on timeout")
            assert impl.tasks[0] is impl.tasks[1]
            impl.tasks.clear()
        assert idle() <= 1


async def test_a_call_sees_its_own_context_only(address: str) -> None:
    async def use(request: Note) -> Note:
        before = seen.get()
        token = seen.set(request.text)
        if request.text.startswith("wait"):
            await anyio.sleep(0.002)
            assert seen.get() == request.text
            seen.reset(token)
            seen.set(request.text)
        return Note(f"{before}|{trace_id.get()}")

    async with desk(address) as (proxy, impl, _):
        impl.action = use
        trace_id.set("mine")
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                for text in ("a", "wait b", "c", "wait d"):
                    tasks.start_soon(proxy.do, Note(text))
            for text in ("a", "wait b", "c", "wait d"):
                assert await proxy.do(Note(text)) == Note("|mine")


async def test_a_call_that_began_at_once_is_cancelled_with_its_caller(address: str) -> None:
    async def wait(request: Note) -> Note:
        await anyio.sleep(60)
        return request

    async with desk(address) as (proxy, impl, server):
        impl.action = wait
        for strike in ("task", "scope", "deadline"):
            begun = impl.begun
            if strike == "deadline":
                with anyio.move_on_after(0.1) as scope:
                    await proxy.do(Note())
                assert scope.cancelled_caught
            elif strike == "task":
                call = asyncio.create_task(proxy.do(Note()))
                await until(lambda begun=begun: impl.begun == begun + 1)  # type: ignore[misc]
                call.cancel()
                await asyncio.wait([call])
            else:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(proxy.do, Note())
                    await until(lambda begun=begun: impl.begun == begun + 1)  # type: ignore[misc]
                    tasks.cancel_scope.cancel()
            await until(lambda: impl.ended == impl.begun and not server.statistics()["do"].in_flight)
            impl.action = impl.echo
            assert await proxy.do(Note("next")) == Note("next")
            impl.action = wait
        assert server.statistics()["do"].failures == 3


@pytest.mark.parametrize("left", [0.02, 0.2, 30.0])
async def test_a_deadline_is_seen_from_the_first_step_on(address: str, left: float) -> None:
    async def tell(request: Note) -> Note:
        first = anyio.current_effective_deadline() - anyio.current_time()
        if request.text == "wait":
            await anyio.sleep(0.001)
        return Note(f"{first} {anyio.current_effective_deadline() - anyio.current_time()}")

    async with desk(address) as (proxy, impl, _):
        impl.action = tell
        for text in ("", "wait", "", ""):
            with anyio.fail_after(left):
                found = [float(one) for one in (await proxy.do(Note(text))).text.split()]
            assert all(left * 0.2 < one <= left + 0.002 for one in found)


async def test_handlers_that_cancel_themselves_hurt_nobody(address: str) -> None:
    async def strike(request: Note) -> Note:
        task = asyncio.current_task()
        assert task is not None
        if request.text == "raise":
            raise asyncio.CancelledError
        if request.text == "calm":
            await anyio.sleep(0.01)
            return request
        task.cancel()
        if request.text == "wait":
            await anyio.sleep(60)
        return request

    async with desk(address) as (proxy, impl, server):
        for text in ("raise", "wait", "go on", "raise", "wait"):
            impl.action = strike
            calls = [asyncio.create_task(proxy.do(Note(text))) for _ in range(3)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            if text == "go on":
                assert found == [Note(text)] * 3
            else:
                assert all(isinstance(one, RemoteError) and "was cancelled" in str(one) for one in found)
            both = await asyncio.gather(proxy.do(Note("go on")), proxy.do(Note("calm")))
            assert list(both) == [Note("go on"), Note("calm")]
            impl.action = impl.echo
            assert await proxy.do(Note("next")) == Note("next")
        assert server.statistics()["do"].in_flight == 0


async def test_a_handler_that_survives_its_cancellation_answers(address: str) -> None:
    async def stubborn(request: Note) -> Note:
        with pytest.raises(asyncio.CancelledError):
            await anyio.sleep(60)
        return request

    async with desk(address) as (proxy, impl, server):
        impl.action = stubborn
        with anyio.move_on_after(0.1):
            await proxy.do(Note())
        await until(lambda: not server.statistics()["do"].in_flight)
        impl.action = impl.echo
        assert await proxy.do(Note("next")) == Note("next")


async def test_whatever_can_be_awaited_is_a_handler(address: str) -> None:
    class Plain(DeskImpl):
        def do(self, request: Note, /) -> Any:
            return asyncio.ensure_future(self.echo(request))

    impl = Plain()
    async with serve(impl, Desk, address) as server, connect(server.address, Desk) as proxy:
        for _ in range(3):
            assert await proxy.do(Note("x")) == Note("x")


async def test_what_a_handler_raises_at_once_is_told_and_what_it_gives_is_checked(address: str) -> None:
    async def wrong(request: Note) -> Any:
        if request.text == "raise":
            raise KeyError("absent")
        if request.text == "stop":
            raise StopIteration("x")
        return "a string"

    async with desk(address) as (proxy, impl, server):
        impl.action = wrong
        for text, reason in (
            ("raise", "KeyError"),
            ("stop", "RuntimeError"),
            ("", "result of do must be Note, not str"),
        ):
            with pytest.raises(RemoteError, match=reason):
                await proxy.do(Note(text))
        assert server.statistics()["do"].failures == 3


async def test_many_calls_at_once_leave_the_loop_its_turns() -> None:
    async def slow(request: Note) -> Note:
        return request

    def frame(header: wire.Header, payload: bytes = b"") -> bytes:
        return wire.encode_head(header, len(payload), 1 << 30) + payload

    async with desk("tcp://127.0.0.1:0") as (_, impl, server):
        impl.action = slow
        host, _, port = server.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame(wire.Hello(wire.VERSION, describe(Desk).fingerprint, 1 << 30)))
        assert await reader.readexactly(4)  # welcome
        body, begun, steps = msgspec.msgpack.encode(Note()), impl.begun, []
        loop = asyncio.get_running_loop()

        def turn(before: int) -> None:
            steps.append(impl.begun - before)
            if impl.begun < begun + 500:
                loop.call_soon(turn, impl.begun)

        loop.call_soon(turn, begun)
        writer.write(b"".join(frame(wire.Call(number, "do"), body) for number in range(500)))
        await until(lambda: impl.ended == begun + 500)
        assert max(steps) <= 40
        writer.close()


async def test_tasks_are_kept_for_the_next_calls_but_not_all(address: str) -> None:
    go = asyncio.Event()

    async def wait(request: Note) -> Note:
        await go.wait()
        return request

    async with desk(address) as (proxy, impl, _):
        impl.action = wait
        async with anyio.create_task_group() as tasks:
            for _ in range(2 * KEPT):
                tasks.start_soon(proxy.do, Note())
            await until(lambda: impl.begun == 1 + 2 * KEPT)
            go.set()
        assert idle() == KEPT
        assert await proxy.do(Note("x")) == Note("x")
    assert idle() == 0
