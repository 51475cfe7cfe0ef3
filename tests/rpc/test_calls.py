"""Unary calls over a socket: results, errors, deadlines, cancellation, limits, and what is left afterwards."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import numpy as np
import pytest

from astraflow.rpc import (
    DeadlineExceeded,
    FrameTooLarge,
    RemoteError,
    Server,
    Unavailable,
    connect,
    describe,
    method,
    serve,
    service,
    statistics,
    strict,
)
from astraflow.rpc.proxy import carrier_of


class Number(msgspec.Struct, frozen=True):
    value: int


class Text(msgspec.Struct, frozen=True):
    text: str = ""


class Blob(msgspec.Struct, frozen=True):
    data: memoryview


class Nap(msgspec.Struct, frozen=True):
    seconds: float
    shielded: bool = False


class Fenced(Exception):
    pass


class VeryFenced(Fenced):
    pass


@service(errors=(Fenced,))
class Desk(Protocol):
    async def double(self, request: Number, /) -> Number: ...
    async def ping(self) -> Text: ...
    async def echo(self, request: Blob, /) -> Blob: ...
    async def fail(self, request: Text, /) -> Text: ...
    async def nap(self, request: Nap, /) -> Text: ...
    @method(idempotent=True)
    async def lie(self, request: Text, /) -> Number: ...


class DeskImpl:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.left: list[float] = []

    async def double(self, request: Number, /) -> Number:
        await asyncio.sleep(0.001)
        return Number(2 * request.value)

    async def ping(self) -> Text:
        return Text("pong")

    async def echo(self, request: Blob, /) -> Blob:
        return request

    async def fail(self, request: Text, /) -> Text:
        match request.text:
            case "declared":
                raise VeryFenced("incarnation 3 was replaced by 4")
            case "group":
                raise ExceptionGroup("tasks", [Fenced("inner")])
            case "cancelled":
                raise asyncio.CancelledError
            case _:
                raise ZeroDivisionError(request.text)

    async def nap(self, request: Nap, /) -> Text:
        self.log.append("begun")
        self.left.append(anyio.current_effective_deadline() - anyio.current_time())
        try:
            await anyio.sleep(request.seconds)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return Text("rested")

    async def lie(self, request: Text, /) -> Number:
        return request if request.text == "type" else Number("seven")  # type: ignore[return-value,arg-type]


@asynccontextmanager
async def desk(
    address: str, *, default_timeout: float = 60.0, max_frame: int = 64 << 20
) -> AsyncIterator[tuple[Desk, DeskImpl, Server]]:
    impl = DeskImpl()
    async with (
        serve(impl, Desk, address, max_frame=max_frame) as server,
        connect(server.address, Desk, default_timeout=default_timeout) as proxy,
    ):
        yield proxy, impl, server


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():  # noqa: ASYNC110 (what is observed has no event)
            await anyio.sleep(0.005)


async def until_idle(server: Server, name: str) -> None:
    await until(lambda: not server.statistics()[name].in_flight)


async def test_a_call_goes_there_and_back(address: str) -> None:
    async with desk(address) as (proxy, _, server):
        assert await proxy.double(Number(21)) == Number(42)
        assert await proxy.ping() == Text("pong")
        seen, sent = server.statistics()["double"], statistics(proxy)["double"]
        assert (seen.calls, seen.failures, seen.in_flight) == (1, 0, 0)
        assert (sent.calls, sent.bytes_sent, sent.bytes_received) == (1, seen.bytes_received, seen.bytes_sent)
        assert sent.bytes_sent > 0


async def test_two_hundred_calls_at_once(address: str) -> None:
    async with desk(address) as (proxy, _, server):
        found = await asyncio.gather(*(proxy.double(Number(value)) for value in range(200)))
        assert [number.value for number in found] == [2 * value for value in range(200)]
        assert server.statistics()["double"].calls == 200


async def test_more_calls_than_may_be_in_flight_wait_their_turn() -> None:
    async with desk("tcp://127.0.0.1:0") as (proxy, _, server):
        found = await asyncio.gather(*(proxy.double(Number(value)) for value in range(1500)))
        assert len(found) == 1500
        assert server.statistics()["double"].failures == 0


async def test_a_declared_error_arrives_as_itself(address: str) -> None:
    async with desk(address) as (proxy, _, _):
        with pytest.raises(Fenced, match=r"^incarnation 3 was replaced by 4$"):
            await proxy.fail(Text("declared"))
        with pytest.raises(Fenced, match=r"^inner$"):
            await proxy.fail(Text("group"))


async def test_any_other_error_arrives_with_its_name_message_and_place(address: str) -> None:
    async with desk(address) as (proxy, _, server):
        with pytest.raises(RemoteError, match="ZeroDivisionError: by what") as caught:
            await proxy.fail(Text("by what"))
        assert (caught.value.kind, caught.value.message) == ("ZeroDivisionError", "by what")
        assert "raise ZeroDivisionError(request.text)" in caught.value.summary
        with pytest.raises(RemoteError, match="cancelled"):
            await proxy.fail(Text("cancelled"))
        assert server.statistics()["fail"].failures == 2
        assert await proxy.double(Number(1)) == Number(2)


async def test_messages_that_are_not_what_they_should_be_are_named() -> None:
    async with desk("tcp://127.0.0.1:0") as (proxy, _, _):
        with pytest.raises(TypeError, match="the argument of double must be Number, not Text"):
            await proxy.double(Text("x"))  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match=r"argument of double: Expected `int`, got `str` - at `\$.value`"):
            await proxy.double(Number("x"))  # type: ignore[arg-type]
        with pytest.raises(RemoteError, match="the result of lie must be Number, not Text"):
            await proxy.lie(Text("type"))
        with pytest.raises(RemoteError, match=r"result of lie: Expected `int`, got `str`"):
            await proxy.lie(Text("field"))
        assert await proxy.double(Number(1)) == Number(2)


async def test_cancelling_the_caller_cancels_the_handler(address: str) -> None:
    async with desk(address) as (proxy, impl, server):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(proxy.nap, Nap(30))
            await until(lambda: bool(impl.log))
            tasks.cancel_scope.cancel()
        await until_idle(server, "nap")
        assert impl.log == ["begun", "cancelled"]
        assert statistics(proxy)["nap"].in_flight == 0
        assert await proxy.double(Number(1)) == Number(2)


async def test_the_callers_deadline_is_known_to_the_handler_and_ends_it(address: str) -> None:
    async with desk(address) as (proxy, impl, server):
        with pytest.raises(TimeoutError), anyio.fail_after(0.1):
            await proxy.nap(Nap(30))
        await until_idle(server, "nap")
        assert impl.left[0] == pytest.approx(0.1, abs=0.05)
        assert impl.log == ["begun", "cancelled"]


async def test_a_scope_that_is_left_at_its_deadline_is_left_in_silence() -> None:
    async with desk("tcp://127.0.0.1:0") as (proxy, _, _):
        for _ in range(20):
            with anyio.move_on_after(0.005) as scope:
                await proxy.nap(Nap(30))
            assert scope.cancelled_caught
        with anyio.move_on_after(0) as scope:
            await proxy.nap(Nap(30))
        assert scope.cancelled_caught


async def test_a_server_whose_clock_is_ahead_does_not_overtake_the_callers_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def early(*_: object) -> None:
        raise DeadlineExceeded("the server says so")

    async with desk("tcp://127.0.0.1:0") as (proxy, _, _):
        monkeypatch.setattr(carrier_of(proxy), "_attempts", early)
        with anyio.move_on_after(0.05) as scope:
            await proxy.nap(Nap(30))
        assert scope.cancelled_caught


async def test_without_a_deadline_the_default_holds() -> None:
    async with desk("tcp://127.0.0.1:0", default_timeout=0.1) as (proxy, impl, server):
        with pytest.raises(DeadlineExceeded, match=r"Desk.nap did not end within the default timeout of 0.1 s"):
            await proxy.nap(Nap(30))
        with pytest.raises(DeadlineExceeded), anyio.fail_after(20):
            await proxy.nap(Nap(30))
        await until_idle(server, "nap")
        assert impl.left == pytest.approx([0.1, 0.1], abs=0.02)


async def test_the_server_ends_a_call_whose_client_does_not() -> None:
    async with desk("tcp://127.0.0.1:0") as (proxy, impl, _):
        # Below the client's own timer, so that only the server's can end the call.
        client = carrier_of(proxy)
        nap, soon = describe(Desk).methods["nap"], anyio.current_time() + 0.05
        with pytest.raises(DeadlineExceeded, match=r"Desk\.nap"):
            await client._attempts(nap, msgspec.msgpack.encode(Nap(30)), soon)
        assert impl.log == ["begun", "cancelled"]


async def test_cancellation_at_any_moment_leaves_the_connection_usable(address: str) -> None:
    async with desk(address) as (proxy, _, server):
        for step in range(150):
            with anyio.move_on_after(step * 2e-5):
                await proxy.double(Number(step))
        await until_idle(server, "double")
        assert await proxy.double(Number(4)) == Number(8)
        assert statistics(proxy)["double"].in_flight == 0


@pytest.mark.parametrize("size", [1000, 300_000, 24 << 20])
async def test_arrays_are_views_of_the_frame(address: str, size: int) -> None:
    values = np.arange(size, dtype=np.uint8)
    async with desk(address) as (proxy, _, _):
        found = await proxy.echo(Blob(values.data))
        view = np.frombuffer(found.data, dtype=np.uint8)
        assert np.array_equal(view, values)
        assert not view.flags.writeable
        assert found.data.readonly
        await proxy.echo(Blob(np.zeros_like(values).data))
        assert np.array_equal(view, values)


async def test_a_message_above_the_limit_is_not_sent_and_the_connection_lives(address: str) -> None:
    async with desk(address, max_frame=1 << 20) as (proxy, _, _):
        for _ in range(1100):  # more than may be in flight: none of them takes a place
            with pytest.raises(FrameTooLarge, match="exceeds the limit of 1048576 bytes"):
                await proxy.echo(Blob(memoryview(bytes(1 << 20))))
        assert await proxy.double(Number(1)) == Number(2)


async def test_a_result_above_the_callers_limit_says_so() -> None:
    async with (
        serve(DeskImpl(), Desk, "tcp://127.0.0.1:0") as server,
        connect(server.address, Desk, max_frame=1 << 19) as proxy,
    ):
        with pytest.raises(FrameTooLarge, match=r"Desk\.echo"):
            await proxy.echo(Blob(memoryview(bytes(1 << 19))))
        assert await proxy.double(Number(1)) == Number(2)


async def test_no_descriptor_is_left(address: str) -> None:
    async with desk(address) as (proxy, _, _):
        await proxy.ping()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with desk(address) as (proxy, _, _):
            await proxy.ping()
    assert len(os.listdir("/proc/self/fd")) == before


async def test_the_bodys_exception_is_the_one_that_surfaces(address: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with desk(address):
            raise KeyError("mine")


async def test_calls_after_the_end_are_refused() -> None:
    async with desk("tcp://127.0.0.1:0") as (proxy, _, _):
        pass
    with pytest.raises(Unavailable, match="the client is closed"):
        await proxy.lie(Text())


async def test_a_unix_socket_is_for_its_owner_and_goes_with_its_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serve(DeskImpl(), Desk, f"unix:{path}") as server:
        assert server.address == f"unix:{path}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(tmp_path) == []


async def test_strict_takes_every_message_through_the_wire_format() -> None:
    impl = DeskImpl()
    proxy = strict(impl, Desk)
    data = bytearray(b"abc")
    found = await proxy.echo(Blob(memoryview(data)))
    data[0] = 0
    assert bytes(found.data) == b"abc"
    with pytest.raises(Fenced, match="incarnation 3"):
        await proxy.fail(Text("declared"))
    with pytest.raises(RemoteError, match="ZeroDivisionError"):
        await proxy.fail(Text("x"))
    with pytest.raises(RemoteError, match=r"argument of double: Expected `int`"):
        await proxy.double(Number("x"))  # type: ignore[arg-type]


class Half:
    async def double(self, request: Number, /) -> Number:
        return request


def test_an_object_that_lacks_a_method_is_not_served() -> None:
    with pytest.raises(TypeError, match=r"Half cannot be served as Desk: it has no echo\(\)"):
        strict(Half(), Desk)
