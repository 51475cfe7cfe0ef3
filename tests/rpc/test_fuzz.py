"""A hostile peer: whatever frames it sends, the server answers or closes, stays small, and others notice nothing.

Frames are made here byte by byte, as a peer would that has the specification and no respect for it. Each kind of
malice is either `harmless` (the connection must go on) or `fatal` (the server must close it, and only it).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.rpc import (
    FrameTooLarge,
    ProtocolError,
    RpcError,
    Unavailable,
    connect,
    describe,
)
from astraflow.rpc.frames import FrameReader

pack = msgspec.msgpack.encode

HELLO, CALL, CANCEL, CREDIT, ITEM, RESULT, END, FAILURE, PING = 1, 4, 5, 6, 7, 8, 9, 10, 12
LIMIT = 1 << 20
MiB = 1 << 20

pytestmark = pytest.mark.usefixtures("quiet")

COUNTS = [20_000, pytest.param(120_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


class Tree(msgspec.Struct, frozen=True):
    text: str = ""
    number: int = 0
    children: tuple[Tree, ...] = ()


class Garden(Protocol):
    async def echo(self, request: Tree, /) -> Tree: ...
    async def wait(self, request: Tree, /) -> Tree: ...
    def grow(self, request: Tree, /) -> AsyncIterator[Tree]: ...


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

    async def grow(self, request: Tree, /) -> AsyncIterator[Tree]:
        for number in range(request.number % 8):
            yield Tree("leaf", number)


# --- frames ----------------------------------------------------------------------------------------------------------


def raw(head: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">IH", 2 + len(head) + len(payload), len(head)) + head + payload


def frame(*header: Any, payload: bytes = b"") -> bytes:
    return raw(pack(header), payload)


GREETING = frame(HELLO, 1, describe(Garden).fingerprint, LIMIT, "", payload=pack(describe(Garden).table))


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any message at all."""
    match rng.randrange(8 if depth < 4 else 6):
        case 0:
            return rng.choice([0, -1, 2**31, 2**63, 2**64 - 1, -(2**63), rng.randrange(1000)])
        case 1:
            return rng.choice([0.0, -1.5, float("inf"), float("nan"), 1e308])
        case 2:
            return rng.choice(["", "echo", "\x00", "\U0001f600" * 20, "x" * rng.randrange(300)])
        case 3:
            return rng.randbytes(rng.randrange(100))
        case 4:
            return rng.choice([None, True, False])
        case 5:
            return msgspec.Raw(rng.choice([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"\xd9"]))
        case 6:
            return [value(rng, depth + 1) for _ in range(rng.randrange(6))]
        case _:
            keys = ("text", "number", "children", "\x00")
            return {rng.choice(keys): value(rng, depth + 1) for _ in range(rng.randrange(5))}


def nested(rng: random.Random) -> bytes:
    """Arrays, maps or trees, deeper than a stack may follow."""
    depth = rng.choice([10, 900, 5_000, 30_000])
    return rng.choice([b"\x91", b"\x81\xa0", b"\x81\xa8children\x91"]) * depth


def message(rng: random.Random) -> bytes:
    """The payload of a call: right, wrong in one place, or anything."""
    match rng.randrange(6):
        case 0:
            return pack(Tree("a", 3, (Tree("b"),)))
        case 1:
            return rng.randbytes(rng.randrange(64))
        case 2:
            return nested(rng)
        case 3:
            data = bytearray(pack(Tree("a", 3, (Tree("b"),))))
            data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 4:
            return rng.choice([b"\xdf\xff\xff\xff\xff", b"\x81\xa4text\xdb\xff\xff\xff\xff", b"\x83\xa4text"])
        case _:
            return pack(value(rng))


def harmless(rng: random.Random, number: int) -> bytes:
    """A frame that a server takes without closing; `number` is a fresh id."""
    match rng.randrange(8):
        case 0 | 1 | 2 | 3:
            timeout = rng.choice([None, None, 0, 1e-9, 5, 1e308, float("inf")])
            return frame(CALL, number, rng.choice(["echo", "grow"]), timeout, payload=message(rng))
        case 4:
            return frame(CALL, number, "echo", None, "from a newer client", payload=message(rng))
        case 5:
            return frame(CANCEL, rng.choice([number - 1, number + 1000, -1, 0]))
        case 6:
            return frame(CREDIT, rng.choice([number - 1, 0, -7, 2**63]), rng.choice([0, 1, 2**63]))
        case _:
            return frame(PING, payload=rng.randbytes(rng.randrange(50)))


def fatal(rng: random.Random) -> bytes:
    """What no server may let pass."""
    wait = pack(Tree())
    match rng.randrange(12):
        case 0:  # a length above the limit, with or without more
            return struct.pack(">I", rng.choice([LIMIT + 1, 2**31, 2**32 - 1])) + rng.randbytes(rng.randrange(9))
        case 1:  # a header that does not end within its frame
            return struct.pack(">IH", 20, rng.randrange(19, 65536)) + bytes(18)
        case 2:  # a frame too short for a header
            return struct.pack(">I", rng.randrange(2)) + b"\x00"
        case 3:  # wrong type
            header = [CALL, 7, "echo", None]
            header[rng.randrange(1, 3)] = rng.choice([None, 1.5, [], {}, b"echo", [[7]]])
            return frame(*header)
        case 4:  # wrong tag, or one that only servers send
            return frame(rng.choice([0, 2, 7, 8, 9, 10, 11, 14, 255, -1, "4", None]), 1, 1, 1)
        case 5:  # a duplicate id
            return frame(CALL, 2**40, "wait", payload=wait) * 2
        case 6:  # a method that is not there, or that must never be found
            name = rng.choice(["", "nothing", "__init__", "__class__", "running", "echo\x00", "e" * 60_000])
            return frame(CALL, 2**41, name, payload=wait)
        case 7:
            return frame(CALL, 2**41, "echo", rng.choice([-1, float("nan"), -float("inf"), "1", [1]]), payload=wait)
        case 8:  # deep nesting in the header
            return raw(b"\x94\x04" + b"\x91" * rng.choice([3, 2000, 60_000]))
        case 9:  # a second greeting
            return GREETING
        case 10:  # huge lengths declared inside the header
            return raw(rng.choice([b"\xdd\xff\xff\xff\xff\x04", b"\x94\x04\x07\xdb\xff\xff\xff\xff", b"\xc9\xff\xff"]))
        case _:
            return frame(CREDIT, 1, rng.choice([-1, -(2**63)])) + frame(CANCEL, [1])


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bits, bytes or pieces of a valid sequence are elsewhere."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(found))
        match rng.randrange(4):
            case 0:
                found[at] ^= 1 << rng.randrange(8)
            case 1:
                found[at] = rng.choice([0, 1, 0x7F, 0x80, 0xC1, 0xFF])
            case 2:
                del found[at : at + rng.randrange(8)]
                found = found or bytearray(1)
            case _:
                found[at:at] = rng.randbytes(rng.randrange(1, 8))
    return bytes(found)


# --- the decoder -----------------------------------------------------------------------------------------------------


def feed(reader: FrameReader, data: bytes, cut: int) -> int:
    """How many frames were read. Raises what the reader raises."""
    position = frames = 0
    while position < len(data):
        buffer = reader.buffer()
        size = min(len(buffer), len(data) - position, cut)
        buffer[:size] = data[position : position + size]
        frames += sum(1 for _ in reader.advance(size))
        position += size
    return frames


@pytest.mark.parametrize("count", COUNTS)
def test_the_decoder_reads_or_refuses_and_stays_small(count: int) -> None:
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    tracemalloc.start()
    try:
        for number in range(count):
            data = fatal(rng) if rng.random() < 0.5 else harmless(rng, 5)
            if rng.random() < 0.5:
                data = mutated(rng, data)
            try:
                frames = feed(FrameReader(LIMIT), data, rng.choice([1 << 20, 1 << 20, len(data) // 3 + 1]))
            except (ProtocolError, FrameTooLarge) as error:
                outcomes[type(error).__name__] += 1
            else:
                outcomes["read" if frames else "waits for more"] += 1
            if number % 1000 == 0:
                assert tracemalloc.get_traced_memory()[0] < 8 * MiB
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    print(f"decoder: {count} sequences, {dict(outcomes)}, peak {peak / MiB:.1f} MiB")
    assert len(outcomes) == 4
    assert peak < 8 * MiB


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(header=st.lists(VALUES, max_size=6), tag=st.integers(0, 15), payload=st.binary(max_size=50))
def test_any_header_is_read_or_refused(header: list[Any], tag: int, payload: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert feed(FrameReader(LIMIT), frame(tag, *header, payload=payload), 1 << 20) == 1


# --- a live server ---------------------------------------------------------------------------------------------------


async def attack(siege: Any, rng: random.Random) -> int:
    """One connection's worth of frames; how many of them the server had to deal with."""
    batch = [harmless(rng, number) for number in range(1, rng.randrange(4, 60))]
    try:
        reader, writer = await siege.dial()
        writer.write(GREETING)
        welcome = await reader.readexactly(4)
        kind = rng.randrange(5)
        if kind < 3:
            writer.write(b"".join(batch) + fatal(rng))
        else:
            data = b"".join(batch)
            writer.write(mutated(rng, data) if kind == 3 else data[: -rng.randrange(1, len(batch[-1]))])
            writer.write_eof()
        ids = siege.answered(welcome + await siege.read_to_end(reader)) if kind < 3 else []
        assert len(set(ids)) == len(ids), "a call was answered twice"
        assert set(ids) <= {*range(1, 60), 2**40, 2**41, 7}
        if kind >= 3:
            await siege.read_to_end(reader)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass  # closed with our frames unread
    finally:
        writer.close()
    return len(batch) + 1


@pytest.mark.parametrize("count", COUNTS)
async def test_a_live_server_survives_them_all(count: int, besieged: Any, resident: Callable[[], int]) -> None:
    impl, sent, sizes = GardenImpl(), 0, [resident()]

    async def attacker(seed: int) -> None:
        nonlocal sent
        rng = random.Random(seed)
        while sent < count:
            frames = await attack(siege, rng)
            sent += frames
            sizes.append(resident())

    async with besieged(impl, Garden, Tree("still", 1), max_frame=LIMIT) as siege:
        for seed in range(20):  # warm
            await attack(siege, random.Random(1000 + seed))
        sizes[0] = resident()
        async with anyio.create_task_group() as tasks:
            for seed in range(4):
                tasks.start_soon(attacker, seed)
        with anyio.fail_after(5):
            while len(siege.server.connections) > 1 or impl.running:  # noqa: ASYNC110 (what is observed has no event)
                await anyio.sleep(0.01)
    grown, peak = (sizes[-1] - sizes[0]) / MiB, (max(sizes) - sizes[0]) / MiB
    print(
        f"server: {sent} frames on {len(sizes)} connections, resident +{grown:.1f} MiB (peak +{peak:.1f}); bystander: "
        f"{len(siege.latencies)} calls, worst {siege.worst() * 1e3:.0f} ms"
    )
    assert peak < 48
    assert siege.worst() < 1


# --- a live client ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def impostor(path: Path, welcome: bytes, then: Callable[[], bytes]) -> AsyncIterator[str]:
    """What listens there greets with `welcome` and answers every read with `then()`."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1 << 16)
            writer.write(welcome)
            while await reader.read(1 << 16):
                writer.write(then())
        writer.close()

    server = await asyncio.start_unix_server(serve_one, f"{path}/s")
    try:
        yield f"unix:{path}/s"
    finally:
        server.close()


def answer(rng: random.Random, number: int) -> bytes:
    """What a server may say, and what it may not."""
    ids = [number, number, number, number + 1, 0, -1, None]
    tag = rng.choice([RESULT, RESULT, ITEM, END, FAILURE, FAILURE, 2, 3, 11, 13, CALL, 99])
    data = message(rng)
    if rng.random() < 0.5:
        data = pack([rng.choice(["error", "declared", "odd", 3]), "ValueError", "x", "y"])
    found = frame(tag, rng.choice(ids), *([value(rng)] * rng.randrange(3)), payload=data)
    return mutated(rng, found) if rng.random() < 0.2 else found


async def test_a_hostile_server_makes_only_typed_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.rpc.client.FIRST_DELAY", 0.0001)
    monkeypatch.setattr("astraflow.rpc.client.LAST_DELAY", 0.0005)
    rng, outcomes = random.Random(3), Counter[str]()
    welcome = frame(2, describe(Garden).fingerprint, LIMIT, 1024)
    async with (
        impostor(tmp_path, welcome, lambda: answer(rng, rng.randrange(1, 4))) as address,
        connect(address, Garden) as proxy,
    ):
        for number in range(400):
            try:
                with anyio.move_on_after(0.005):
                    if number % 2:
                        await proxy.echo(Tree("x"))
                    else:
                        async for _ in proxy.grow(Tree("x")):
                            pass
                outcomes["answered, or given up"] += 1
            except RpcError as error:
                outcomes[type(error).__name__] += 1
                await anyio.sleep(0.001)
    print(f"client: {dict(outcomes)}")
    assert len(outcomes) >= 3


@pytest.mark.parametrize(("max_frame", "max_calls"), [(LIMIT, 0), (LIMIT, -1), (-1, 10), (0, 10), (8, 10)])
async def test_a_welcome_with_impossible_limits_is_refused(max_frame: int, max_calls: int, tmp_path: Path) -> None:
    welcome = frame(2, describe(Garden).fingerprint, max_frame, max_calls)
    async with impostor(tmp_path, welcome, bytes) as address:
        with pytest.raises(Unavailable, match=f"no call fits in {max_calls} calls of {max_frame} bytes"):
            async with connect(address, Garden, connect_timeout=0.2):
                pass
