"""Peers that speak the protocol and mean no good: they do not listen, announce what never comes, or take their time.

Whatever it is, it costs the server little memory, and those who behave notice nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.lowlevel
import msgspec
import pytest
import structlog

from astraflow.rpc import RemoteError, connect, describe, serve
from astraflow.rpc.frames import SCRATCH

pack = msgspec.msgpack.encode

HELLO, CALL, CANCEL, PING = 1, 4, 5, 12
MiB = 1 << 20
LIMIT = 1 * MiB

pytestmark = pytest.mark.usefixtures("quiet")


class Tree(msgspec.Struct, frozen=True):
    text: str = ""
    children: tuple[Tree, ...] = ()


class Garden(Protocol):
    async def echo(self, request: Tree, /) -> Tree: ...
    async def wait(self, request: Tree, /) -> Tree: ...
    async def fail(self, request: Tree, /) -> Tree: ...


STILL = Tree("still")


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


def frame(*header: Any, payload: bytes = b"") -> bytes:
    head = pack(header)
    return struct.pack(">IH", 2 + len(head) + len(payload), len(head)) + head + payload


GREETING = frame(HELLO, 1, describe(Garden).fingerprint, LIMIT, "", payload=pack(describe(Garden).table))


@pytest.mark.parametrize("kind", ["failing", "bad argument", "cancelled", "no time", "ping"])
async def test_a_peer_that_asks_and_never_listens_costs_no_memory(
    kind: str, besieged: Any, resident: Callable[[], int]
) -> None:
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

    impl = GardenImpl()
    async with besieged(impl, Garden, STILL, max_frame=LIMIT) as siege:
        reader, writer = await siege.dial()
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
            while len(siege.server.connections) > 1 or impl.running:  # noqa: ASYNC110 (what is observed has no event)
                await anyio.sleep(0.01)
    print(f"{kind}: {first} questions, resident +{grown:.1f} MiB")
    assert grown < 9
    assert siege.worst() < 1


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


async def test_a_peers_mistakes_cost_less_than_a_handlers(besieged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback is made or logged for an argument that is not what it should be."""
    structlog.reset_defaults()
    async with besieged(GardenImpl(), Garden, STILL) as siege:
        reader, writer = await siege.dial()
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
async def test_an_error_that_cannot_be_told_hurts_nobody(text: str, besieged: Any) -> None:
    async with (
        besieged(GardenImpl(), Garden, STILL) as siege,
        connect(siege.server.address, Garden) as proxy,
    ):
        with pytest.raises(RemoteError, match=r"ValueError: caf|MuteError: "):
            await proxy.fail(Tree(text))
        assert await proxy.echo(Tree("x")) == Tree("x")


@pytest.mark.parametrize("size", [MiB, 16 * MiB, 60 * MiB])
async def test_what_is_only_announced_costs_no_memory(size: int, besieged: Any, resident: Callable[[], int]) -> None:
    async with besieged(GardenImpl(), Garden, STILL) as siege:
        writers = []
        for _ in range(60):
            reader, writer = await siege.dial()
            writers.append(writer)
            writer.write(GREETING)
            await reader.readexactly(4)
        before = resident()
        for writer in writers:
            writer.write(struct.pack(">IH", size, 3) + b"\x93\x04")
        with anyio.fail_after(10):
            while sum(len(peer.channel.reader.buffer()) > SCRATCH for peer in siege.server.connections) < 60:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        grown = resident() - before
        for writer in writers:
            writer.transport.abort()
        assert grown < 8 * MiB
        assert siege.worst() < 1


async def test_slow_senders_hold_up_nobody(besieged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.server.HANDSHAKE_TIMEOUT", 0.5)
    call = frame(CALL, 1, "echo", payload=pack(Tree("slow", (Tree("x" * 300),) * 300)))

    async def trickle(greeted: bool) -> bytes:
        reader, writer = await siege.dial()
        data = GREETING + call
        if greeted:
            writer.write(GREETING)
            data = call
        found = asyncio.create_task(siege.read_to_end(reader))
        for byte in data[:100]:
            if not writer.transport.is_closing():
                writer.write(bytes([byte]))
            await anyio.sleep(0.01)
        if not writer.transport.is_closing():
            writer.write(data[100:])
            writer.write_eof()
        said: bytes = await found
        writer.close()
        return said

    async with besieged(GardenImpl(), Garden, STILL, keepalive=0.2) as siege:
        cut_off, served = await asyncio.gather(trickle(False), trickle(True))
        assert b"no greeting within 0.5 s" in cut_off
        assert siege.answered(served) == [1]
        assert siege.worst() < 0.5
