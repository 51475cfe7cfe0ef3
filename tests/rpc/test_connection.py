"""Connections: who is let in, what is refused, and what happens to calls when the other side goes away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import (
    InterfaceMismatch,
    Server,
    Unauthorized,
    Unavailable,
    connect,
    describe,
    method,
    serve,
    statistics,
)
from astraflow.rpc import frames as wire

SERVICE = """
import asyncio, os, sys
from typing import Protocol
import msgspec
from astraflow.rpc import method, serve

class Word(msgspec.Struct, frozen=True):
    text: str = ""

class Place(Protocol):
    @method(idempotent=True)
    async def read(self, request: Word, /) -> Word: ...
    async def write(self, request: Word, /) -> Word: ...

class Impl:
    async def read(self, request: Word, /) -> Word:
        if request.text == "wait":
            await asyncio.sleep(60)
        return Word(str(os.getpid()))
    write = read

async def main() -> None:
    async with serve(Impl(), Place, sys.argv[1]):
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


class Word(msgspec.Struct, frozen=True):
    text: str = ""


class Place(Protocol):
    @method(idempotent=True)
    async def read(self, request: Word, /) -> Word: ...
    async def write(self, request: Word, /) -> Word: ...


class PlaceImpl:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.go = asyncio.Event()

    async def read(self, request: Word, /) -> Word:
        self.begun.append(request.text)
        try:
            if request.text == "wait":
                await self.go.wait()
        finally:
            self.ended.append(request.text)
        return request

    async def write(self, request: Word, /) -> Word:
        return await self.read(request)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110 (what is observed has no event)
            await anyio.sleep(0.005)


@asynccontextmanager
async def process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server process, ready; killed at the end."""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVICE, address, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        with anyio.fail_after(20):
            assert await child.stdout.readline() == b"ready\n"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child._transport.close()  # type: ignore[attr-defined]


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:0", r"not a loopback address.*TLS"),
        ("tcp://192.168.1.7:80", r"not a loopback address"),
        ("tcp://example.com:80", r"not a loopback address"),
        ("tcp://127.0.0.1", r"use unix:PATH or tcp://host:port"),
        ("tcp://127.0.0.1:99999", r"out of range"),
        ("http://127.0.0.1:1", r"use unix:PATH or tcp://host:port"),
        ("unix:", r"wants a path"),
    ],
)
async def test_addresses_that_are_not_taken(address: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        async with serve(PlaceImpl(), Place, address):
            pass
    with pytest.raises(ValueError, match=reason):
        async with connect(address, Place):
            pass


async def test_ipv6_and_localhost_are_loopback() -> None:
    for address in ("tcp://[::1]:0", "tcp://localhost:0"):
        async with serve(PlaceImpl(), Place, address) as server, connect(server.address, Place) as proxy:
            assert await proxy.read(Word("x")) == Word("x")


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    async with serve(PlaceImpl(), Place, f"unix:{path}") as server:
        with pytest.raises(OSError, match=r"cannot listen on unix:.*another server is listening"):
            async with serve(PlaceImpl(), Place, f"unix:{path}"):
                pass
        async with connect(server.address, Place) as proxy:
            assert await proxy.read(Word("x")) == Word("x")


async def test_a_file_that_is_not_a_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(OSError, match="not a socket"):
        async with serve(PlaceImpl(), Place, f"unix:{path}"):
            pass
    assert path.read_text() == "mine"


# --- who is let in ---------------------------------------------------------------------------------------------------


async def test_the_token_decides(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address, token="open sesame") as server:
        for token, reason in ((None, "a token is required"), ("wrong", "the token is wrong")):
            with pytest.raises(Unauthorized, match=reason):
                async with connect(server.address, Place, token=token):
                    pass
        async with connect(server.address, Place, token="open sesame") as proxy:
            await proxy.read(Word("x"))
    assert impl.begun == ["x"]


class Bigger(msgspec.Struct, frozen=True):
    text: str = ""
    urgent: bool = False


class Stricter(msgspec.Struct, frozen=True):
    text: str
    count: int


class NewerPlace(Protocol):
    async def read(self, request: Bigger, /) -> Bigger: ...
    async def write(self, request: Bigger, /) -> Bigger: ...


class OtherPlace(Protocol):
    async def read(self, request: Stricter, /) -> Word: ...
    async def erase(self, request: Word, /) -> Word: ...


class NewerImpl:
    async def read(self, request: Bigger, /) -> Bigger:
        return Bigger(request.text, not request.urgent)

    write = read


async def test_an_older_client_and_a_newer_server_understand_each_other(address: str) -> None:
    async with serve(NewerImpl(), NewerPlace, address) as server, connect(server.address, Place) as proxy:
        assert await proxy.read(Word("x")) == Word("x")


async def test_another_interface_is_refused_with_what_differs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address) as server:
        with pytest.raises(InterfaceMismatch) as caught:
            async with connect(server.address, OtherPlace):
                pass
    for side in (str(caught.value), capsys.readouterr().out.replace("\\n", "\n")):
        assert describe(Place).fingerprint in side
        assert describe(OtherPlace).fingerprint in side
        assert "method erase: only the client has it" in side
        assert "method write: only the server has it" in side


async def test_no_server_is_said_so_within_the_time_given(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no connection within 0.2 s: .*No such file"):
        async with connect(f"unix:{tmp_path}/s", Place, connect_timeout=0.2):
            pass


async def test_a_client_may_start_before_its_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"

    async def later() -> None:
        await anyio.sleep(0.2)
        async with serve(PlaceImpl(), Place, address):
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(later)
        async with connect(address, Place) as proxy:
            assert await proxy.read(Word("x")) == Word("x")
        tasks.cancel_scope.cancel()


# --- garbage ---------------------------------------------------------------------------------------------------------


async def raw(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


def frame(header: Any, payload: bytes = b"") -> bytes:
    return wire.encode_head(header, len(payload), 1 << 30) + payload


HELLO = frame(wire.Hello(wire.VERSION, describe(Place).fingerprint, 1 << 20))


@pytest.mark.parametrize("greeted", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        (100).to_bytes(4, "big") + b"\x00\x63" + b"\xc1" * 98,
        frame(wire.Welcome("x", 1, 1)),
        frame(wire.Result(1)),
        frame(wire.Call(1, "nothing")),
        frame(wire.Call(1, "n" * 60_000)),
        frame(wire.Call(1, "read", -1.0)) * 2,
        frame(wire.Call(1, "read", float("nan"))),
        frame(wire.Call(1, "read"), msgspec.msgpack.encode(Word("wait"))) * 2,
        frame(wire.Call(1, "read"), msgspec.msgpack.encode(Word("wait"))) + b"\x00\x00\x01",
        b"".join(frame(wire.Call(n, "read"), msgspec.msgpack.encode(Word("wait"))) for n in range(1030)),
        frame(wire.Credit(1, -5)),
        frame(wire.Hello(99, "x", 1)) * 2,
        frame(wire.Hello(1, "x", 1), b"\x93\xa1x\x81\xa1m\x93\xc2\xc0\x91\xa5array\x80"),
    ],
)
async def test_whatever_is_sent_the_server_closes_that_connection_and_serves_on(data: bytes, greeted: bool) -> None:
    impl = PlaceImpl()
    async with (
        serve(impl, Place, "tcp://127.0.0.1:0", drain_timeout=0.1) as server,
        connect(server.address, Place) as proxy,
    ):
        reader, writer = await raw(server)
        if greeted:
            writer.write(HELLO)
            assert await reader.readexactly(4)
        writer.write(data)
        writer.write_eof()
        with anyio.fail_after(3):
            await reader.read()
        writer.close()
        await until(lambda: len(server.connections) == 1)
        assert len(impl.begun) == len(impl.ended)
        assert await proxy.read(Word("still")) == Word("still")


async def test_random_bytes_and_cut_frames_hurt_nobody() -> None:
    rng = random.Random(7)
    call = frame(wire.Call(1, "read"), msgspec.msgpack.encode(Word("x" * 50)))
    async with (
        serve(PlaceImpl(), Place, "tcp://127.0.0.1:0") as server,
        connect(server.address, Place) as proxy,
    ):
        for round_ in range(60):
            _, writer = await raw(server)
            data = bytearray(HELLO + call)
            if round_ % 2:
                for _ in range(3):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            writer.write(bytes(data[: rng.randrange(len(data))]))
            writer.close()
        assert await proxy.read(Word("still")) == Word("still")
        await until(lambda: len(server.connections) == 1)


async def test_a_mute_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.HANDSHAKE_TIMEOUT", 0.1)
    async with serve(PlaceImpl(), Place, "tcp://127.0.0.1:0") as server:
        reader, writer = await raw(server)
        with anyio.fail_after(3):
            assert b"no greeting within 0.1 s" in await reader.read()
        writer.close()


# --- the other side goes away ----------------------------------------------------------------------------------------


async def test_a_killed_server_fails_calls_at_once_and_idempotent_ones_find_the_next(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address) as first, connect(address, Place) as proxy:
        assert (await proxy.read(Word())).text == str(first.pid)
        again = asyncio.create_task(proxy.read(Word("wait")))
        once = asyncio.create_task(proxy.write(Word("wait")))
        await until(lambda: sum(figure.in_flight for figure in statistics(proxy).values()) == 2)
        first.send_signal(signal.SIGKILL)
        with anyio.fail_after(2), pytest.raises(Unavailable, match=r"Place.write: the peer closed the connection"):
            await once
        with anyio.fail_after(0.5), pytest.raises(Unavailable):
            await proxy.write(Word())
        again.cancel()
        waiting = asyncio.create_task(proxy.read(Word()))
        async with process(address) as second:
            with anyio.fail_after(10):
                assert (await waiting).text == str(second.pid)
                assert (await proxy.write(Word())).text == str(second.pid)
        await asyncio.wait([again])


async def test_an_idempotent_call_in_flight_is_sent_again_and_others_are_not(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address, drain_timeout=0) as server:
        where = server.address
        client = connect(where, Place)
        proxy = await client.__aenter__()
        calls = [asyncio.create_task(call(Word("wait"))) for call in (proxy.read, proxy.write)]
        await until(lambda: len(impl.begun) == 2)
    with pytest.raises(Unavailable, match=r"Place.write"):
        await calls[1]
    impl.go.set()
    async with serve(impl, Place, where):
        assert await calls[0] == Word("wait")
    assert impl.begun == ["wait"] * 3
    await client.__aexit__(None, None, None)


async def test_while_there_is_no_server_a_call_waits_no_longer_than_it_may(address: str) -> None:
    async with serve(PlaceImpl(), Place, address) as server:
        client = connect(server.address, Place, default_timeout=0.3)
        proxy = await client.__aenter__()
    try:
        with pytest.raises(Unavailable, match=r"Place.read: no connection for 0.3 s"):
            await proxy.read(Word())
        with anyio.move_on_after(0.05) as scope:
            await proxy.read(Word())
        assert scope.cancelled_caught
        with anyio.fail_after(0.1), pytest.raises(Unavailable):
            await proxy.write(Word())
    finally:
        await client.__aexit__(None, None, None)


async def test_a_peer_that_stands_still_is_given_up(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with process(address) as child, connect(address, Place, keepalive=0.1) as proxy:
        await anyio.sleep(0.5)
        assert (await proxy.write(Word())).text == str(child.pid)
        child.send_signal(signal.SIGSTOP)
        with anyio.fail_after(2), pytest.raises(Unavailable, match=r"silent for 0.3 s"):
            await proxy.write(Word("wait"))
        child.send_signal(signal.SIGCONT)
        with anyio.fail_after(5):
            assert (await proxy.read(Word())).text == str(child.pid)


async def test_a_client_that_goes_away_takes_its_handlers_with_it(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address) as server:
        async with connect(server.address, Place) as proxy:
            call = asyncio.create_task(proxy.write(Word("wait")))
            await until(lambda: impl.begun == ["wait"])
        with pytest.raises(Unavailable):
            await call
        await until(lambda: impl.ended == ["wait"] and not server.connections)


async def test_at_the_end_calls_in_flight_finish_and_no_new_ones_begin(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address) as server:
        client = connect(server.address, Place)
        proxy = await client.__aenter__()
        call = asyncio.create_task(proxy.write(Word("wait")))
        await until(lambda: impl.begun == ["wait"])

        async def finish() -> None:
            await anyio.sleep(0.1)
            with pytest.raises(Unavailable):
                await proxy.write(Word("new"))
            impl.go.set()

        finishing = asyncio.create_task(finish())
    await finishing
    assert await call == Word("wait")
    assert impl.begun == ["wait"]
    assert statistics(proxy)["write"].calls == 1
    await client.__aexit__(None, None, None)


async def test_the_end_does_not_wait_for_calls_that_do_not(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address, drain_timeout=0.1) as server:
        client = connect(server.address, Place)
        proxy = await client.__aenter__()
        call = asyncio.create_task(proxy.write(Word("wait")))
        await until(lambda: impl.begun == ["wait"])
        begin = anyio.current_time()
    assert anyio.current_time() - begin < 1
    with pytest.raises(Unavailable, match="the server closed before the call ended"):
        await call
    assert impl.ended == ["wait"]
    await client.__aexit__(None, None, None)


async def test_many_clients_that_vanish_leave_nothing(address: str) -> None:
    impl = PlaceImpl()
    async with serve(impl, Place, address) as server:
        async with connect(server.address, Place) as proxy:
            await proxy.read(Word())
        await until(lambda: not server.connections)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            async with connect(server.address, Place) as proxy:
                await proxy.read(Word())
        await until(lambda: not server.connections)
        assert len(os.listdir("/proc/self/fd")) == before
