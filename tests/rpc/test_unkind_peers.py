"""Peers that speak the protocol and mean no good: they do not listen, announce what never comes, or take their time.

Whatever it is, it costs the server little memory, and those who behave notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec
import pytest
import structlog

from astraflow.rpc import RemoteError, connect, describe, serve, statistics
from astraflow.rpc.frames import SCRATCH

pack = msgspec.msgpack.encode

HELLO, CALL, CANCEL, RESULT, END, FAILURE, PING = 1, 4, 5, 8, 9, 10, 12
MiB = 1 << 20
LIMIT = 1 * MiB


class Tree(msgspec.Struct, frozen=True):
    text: str = ""
    children: tuple[Tree, ...] = ()


class Garden(Protocol):
    async def echo(self, request: Tree, /) -> Tree: ...
    async def wait(self, request: Tree, /) -> Tree: ...
    async def fail(self, request: Tree, /) -> Tree: ...


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


class GardenImpl:
    def __init__(self) -> None:
        self.running = 0

    async def echo(self, request: Tree, /) -> Tree:
        return request

    async def wait(self, request: Tree, /) -> Tree:
        self.running += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.running -= 1
        return request

    async def fail(self, request: Tree, /) -> Tree:
        match request.text:
            case "surrogate":
                raise ValueError("caf\udce9")
            case "mute":
                raise MuteError
        raise ValueError("no" * 4000)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failures are not for the test's captured output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


def frame(*header: Any, payload: bytes = b"") -> bytes:
    head = pack(header)
    return struct.pack(">IH", 2 + len(head) + len(payload), len(head)) + head + payload


GREETING = frame(HELLO, 1, describe(Garden).fingerprint, LIMIT, "", payload=pack(describe(Garden).table))


def resident() -> int:
    """This process's memory, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Bystander:
    """A client that behaves, calling all the while; its calls must neither fail nor wait for others."""

    def __init__(self, garden: Garden) -> None:
        self.garden = garden
        self.latencies: list[float] = []

    async def run(self) -> None:
        while True:
            begin = time.perf_counter()
            assert await self.garden.echo(Tree("still")) == Tree("still")
            self.latencies.append(time.perf_counter() - begin)
            await anyio.sleep(0.002)

    def worst(self) -> float:
        return max(self.latencies)


@asynccontextmanager
async def garden(path: Path, **options: Any) -> AsyncIterator[tuple[Callable[[], Any], GardenImpl, Any, Bystander]]:
    """How to connect without a client, and a bystander at work."""
    impl = GardenImpl()
    async with (
        serve(impl, Garden, f"unix:{path}/s", drain_timeout=0.2, **options) as server,
        connect(server.address, Garden) as proxy,
        anyio.create_task_group() as tasks,
    ):
        bystander = Bystander(proxy)
        tasks.start_soon(bystander.run)
        yield lambda: asyncio.open_unix_connection(f"{path}/s", limit=LIMIT), impl, server, bystander
        assert await proxy.echo(Tree("last")) == Tree("last")
        assert statistics(proxy)["echo"].failures == 0
        tasks.cancel_scope.cancel()


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """What the server said before it closed, which it must do soon."""
    found = bytearray()
    with anyio.fail_after(10), contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            found += data
    return bytes(found)


def answered(data: bytes) -> list[int]:
    """The ids of the final frames in what a server sent."""
    ids, position = [], 0
    while position + 6 <= len(data):
        length, size = struct.unpack_from(">IH", data, position)
        header = msgspec.msgpack.decode(data[position + 6 : position + 6 + size])
        if header[0] in (RESULT, END, FAILURE):
            ids.append(header[1])
        position += 4 + length
    return ids


@pytest.mark.parametrize("kind", ["failing", "bad argument", "cancelled", "no time", "ping"])
async def test_a_peer_that_asks_and_never_listens_costs_no_memory(kind: str, tmp_path: Path) -> None:
    """Answers pile up at the server if it goes on working for one who does not take them."""

    def questions(first: int) -> bytes:
        ids = range(first, first + 100)
        match kind:
            case "failing":
                return b"".join(frame(CALL, n, "fail", payload=b"\x80") for n in ids)
            case "bad argument":
                return b"".join(frame(CALL, n, "echo", payload=b"\xc0") for n in ids)
            case "cancelled":
                return b"".join(frame(CALL, n, "wait", payload=b"\x80") + frame(CANCEL, n) for n in ids)
            case "no time":
                return b"".join(frame(CALL, n, "wait", 0, payload=b"\x80") for n in ids)
        return frame(PING) * 100

    async with garden(tmp_path, max_frame=LIMIT) as (dial, impl, server, bystander):
        reader, writer = await dial()
        writer.write(GREETING)
        await reader.readexactly(4)
        writer.transport.pause_reading()
        before, first, end = resident(), 1, time.monotonic() + (2.5 if kind == "failing" else 1)
        while time.monotonic() < end and first < 60_000 and not writer.transport.is_closing():
            writer.write(questions(first))
            first += 100
            with anyio.move_on_after(0.05), contextlib.suppress(ConnectionError):
                await writer.drain()
            await anyio.lowlevel.checkpoint()
        grown = (resident() - before - writer.transport.get_write_buffer_size()) / MiB
        writer.transport.abort()
        with anyio.fail_after(5):
            while len(server.connections) > 1 or impl.running:  # noqa: ASYNC110 (what is observed has no event)
                await anyio.sleep(0.01)
    print(f"{kind}: {first} questions, resident +{grown:.1f} MiB")
    assert grown < 9
    assert bystander.worst() < 1


async def test_a_server_that_ends_answers_no_more_than_is_read(tmp_path: Path) -> None:
    impl, backlog = GardenImpl(), [0]

    async def ask() -> None:
        first = 1
        while not writer.transport.is_closing() and first < 60_000:
            writer.write(b"".join(frame(CALL, n, "echo", payload=b"\x80") for n in range(first, first + 100)))
            first += 100
            with anyio.move_on_after(0.05), contextlib.suppress(ConnectionError):
                await writer.drain()
            await anyio.lowlevel.checkpoint()
            backlog.extend(peer.channel.backlog() for peer in server.connections)
        if not writer.transport.is_closing():
            writer.write(frame(CANCEL, 0))

    async with anyio.create_task_group() as tasks:
        async with serve(impl, Garden, f"unix:{tmp_path}/s", drain_timeout=20) as server:
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/s")
            writer.write(GREETING)
            await reader.readexactly(4)
            writer.write(frame(CALL, 0, "wait", payload=b"\x80"))
            transport: Any = writer.transport
            transport.pause_reading()
            with anyio.fail_after(5):
                while not impl.running:  # noqa: ASYNC110 (what is observed has no event)
                    await anyio.sleep(0.01)
            tasks.start_soon(ask)
        writer.transport.abort()
    print(f"at most {max(backlog) / MiB:.1f} MiB of answers were waiting")
    assert 0.5 * MiB < max(backlog) < 2 * MiB


async def test_a_peers_mistakes_cost_less_than_a_handlers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback is made or logged for an argument that is not what it should be."""
    structlog.reset_defaults()
    async with garden(tmp_path) as (dial, _, _, _):
        reader, writer = await dial()
        writer.write(GREETING)
        await reader.readexactly(4)
        writer.write(frame(CALL, 1, "echo", payload=b"\xc0"))
        said = b""
        with anyio.fail_after(5):
            while b"ValidationError" not in said:
                said += await reader.read(1000)
        writer.close()
    assert b"the argument of echo: Expected" in said
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["surrogate", "mute"])
async def test_an_error_that_cannot_be_told_hurts_nobody(text: str, tmp_path: Path) -> None:
    async with garden(tmp_path) as (_, _, server, _), connect(server.address, Garden) as proxy:
        with pytest.raises(RemoteError, match=r"ValueError: caf|MuteError: "):
            await proxy.fail(Tree(text))
        assert await proxy.echo(Tree("x")) == Tree("x")


@pytest.mark.parametrize("size", [MiB, 16 * MiB, 60 * MiB])
async def test_what_is_only_announced_costs_no_memory(size: int, tmp_path: Path) -> None:
    async with garden(tmp_path) as (dial, _, server, bystander):
        writers = []
        for _ in range(60):
            reader, writer = await dial()
            writers.append(writer)
            writer.write(GREETING)
            await reader.readexactly(4)
        before = resident()
        for writer in writers:
            writer.write(struct.pack(">IH", size, 3) + b"\x93\x04")
        with anyio.fail_after(10):
            while sum(len(peer.channel.reader.buffer()) > SCRATCH for peer in server.connections) < 60:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        grown = resident() - before
        for writer in writers:
            writer.transport.abort()
        assert grown < 8 * MiB
        assert bystander.worst() < 1


async def test_slow_senders_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.HANDSHAKE_TIMEOUT", 0.5)
    call = frame(CALL, 1, "echo", payload=pack(Tree("slow", (Tree("x" * 300),) * 300)))

    async def trickle(greeted: bool) -> bytes:
        reader, writer = await dial()
        data = GREETING + call
        if greeted:
            writer.write(GREETING)
            data = call
        found = asyncio.create_task(read_to_end(reader))
        for byte in data[:100]:
            if not writer.transport.is_closing():
                writer.write(bytes([byte]))
            await anyio.sleep(0.01)
        if not writer.transport.is_closing():
            writer.write(data[100:])
            writer.write_eof()
        said = await found
        writer.close()
        return said

    async with garden(tmp_path, keepalive=0.2) as (dial, _, _, bystander):
        cut_off, served = await asyncio.gather(trickle(False), trickle(True))
        assert b"no greeting within 0.5 s" in cut_off
        assert answered(served) == [1]
        assert bystander.worst() < 0.5
