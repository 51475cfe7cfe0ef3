"""A thousand connections from twenty processes, two of them killed: nothing is left and nobody waits long."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import pytest

from astraflow.rpc import Server, serve

PROCESSES, CONNECTIONS, CALLS = 20, 50, 112
KILLED = 2
MiB = 1 << 20

CLIENT = """
import asyncio, gc, os, sys, time
from contextlib import AsyncExitStack
from typing import Protocol
import msgspec, uvloop
from astraflow.rpc import connect

class Parcel(msgspec.Struct, frozen=True):
    number: int
    data: bytes = b""

class Post(Protocol):
    async def send(self, request: Parcel, /) -> Parcel: ...

async def calls(proxy: Post, count: int) -> list[float]:
    took = []
    for number in range(count):
        begin = time.perf_counter()
        answer = await proxy.send(Parcel(number, b"x" * 200))
        took.append(time.perf_counter() - begin)
        assert answer.number == number
    return took

async def main() -> None:
    address, connections = sys.argv[1], int(sys.argv[2])
    for line in iter(sys.stdin.readline, ""):  # blocks: there is nothing else to do
        count = int(line)
        async with AsyncExitStack() as stack:
            doors = [connect(address, Post, connect_timeout=100) for _ in range(connections)]
            proxies = [await stack.enter_async_context(door) for door in doors]
            print("connected", flush=True)
            sys.stdin.readline()
            took = await asyncio.gather(*(calls(proxy, count) for proxy in proxies))
            print(msgspec.json.encode([round(one * 1e6) for each in took for one in each]).decode(), flush=True)
            sys.stdin.readline()
        gc.collect()
        print("gone", len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), flush=True)

uvloop.run(main())
"""


class Parcel(msgspec.Struct, frozen=True):
    number: int
    data: bytes = b""


class Post(Protocol):
    async def send(self, request: Parcel, /) -> Parcel: ...


class PostImpl:
    async def send(self, request: Parcel, /) -> Parcel:
        await asyncio.sleep(0)
        return request


class Figures(msgspec.Struct):
    tasks: int
    descriptors: int
    resident_mib: float

    @classmethod
    def now(cls) -> Figures:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mib = round(pages * os.sysconf("SC_PAGE_SIZE") / MiB, 1)
        return cls(len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), mib)


class Child:
    """One client process, told what to do line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def hear(self) -> bytes:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).strip()


@asynccontextmanager
async def child(address: str) -> AsyncIterator[Child]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, address, str(CONNECTIONS), stdin=pipe, stdout=pipe, limit=4 * MiB
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 (what is observed has no event)
            await anyio.sleep(0.01)


async def together(children: list[Child], line: str) -> list[bytes]:
    async def one(found: Child) -> bytes:
        await found.tell(line)
        return await found.hear()

    return list(await asyncio.gather(*map(one, children)))


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_thousand_connections_leave_nothing(tmp_path: Path) -> None:
    with anyio.fail_after(150):
        async with serve(PostImpl(), Post, f"unix:{tmp_path}/s") as server, AsyncExitStack() as stack:
            children = [await stack.enter_async_context(child(server.address)) for _ in range(PROCESSES)]
            _, _, left_before = await wave(children, server, calls=2, kill=0)  # what the first thousand cost once
            before = Figures.now()
            served = server.statistics()["send"].calls
            during, took, left_after = await wave(children, server, CALLS, KILLED)
            after = Figures.now()
            served = server.statistics()["send"].calls - served
    took.sort()
    p50, p99, worst = (took[int(len(took) * share)] / 1e3 for share in (0.5, 0.99, 0.9999999))
    print(f"\n{served} calls; milliseconds: p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f}")
    for when, figures in (("before", before), ("during", during), ("after", after)):
        print(f"{when}: {figures}")
    print(f"in each client before and after (tasks, descriptors): {left_before}, {left_after}")
    assert served >= 100_000
    assert len(left_after) == 1
    assert left_after == left_before
    assert len(took) == (PROCESSES - KILLED) * CONNECTIONS * CALLS
    assert during.descriptors >= before.descriptors + PROCESSES * CONNECTIONS
    assert after.tasks <= before.tasks
    assert after.descriptors <= before.descriptors
    assert after.resident_mib < before.resident_mib + 16
    assert server.statistics()["send"].in_flight == 0
    assert p99 < max(2_000, 10 * p50)  # a busy machine makes all of them slow, not a few


async def wave(children: list[Child], server: Server, calls: int, kill: int) -> tuple[Figures, list[int], set[bytes]]:
    """All connect, call and leave, but for `kill` processes that die on the way.

    Figures at the height, latencies in microseconds, and what the processes say is left in them.
    """
    assert await together(children, str(calls)) == [b"connected"] * len(children)
    await until(lambda: len(server.connections) == PROCESSES * CONNECTIONS)
    during, begun = Figures.now(), server.statistics()["send"].calls

    async def killer() -> None:
        half = begun + len(children) * CONNECTIONS * calls // 2
        await until(lambda: server.statistics()["send"].calls >= half, 100)
        for victim in children[:kill]:
            victim.process.send_signal(signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        if kill:
            tasks.start_soon(killer)
        answers = await together(children, "go")
    took = [one for answer in answers[kill:] for one in msgspec.json.decode(answer, type=list[int])]
    left = set(await together(children[kill:], "leave"))
    await until(lambda: not server.connections)
    return during, took, left
