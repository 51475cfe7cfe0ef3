"""Every test of the transport runs on both event loops it may meet, and leaves no task behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import pytest_asyncio
import structlog
import uvloop

from astraflow.rpc import Server, connect, serve, statistics

ONE_LOOP = {"test_connection.py", "test_fuzz.py", "test_soak.py", "test_compatibility.py", "test_unkind_peers.py"}

RESULT, END, FAILURE = 8, 9, 10

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    if item.path.name in ONE_LOOP:  # what matters there is not the loop's
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp://127.0.0.1:0"


@pytest_asyncio.fixture(autouse=True)
async def no_task_left() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    for _ in range(100):
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        if not left:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"tasks left behind: {left}")


# --- bad peers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """What is logged of thousands of bad peers is not for a test's captured output."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
def resident() -> Callable[[], int]:
    """This process's memory, in bytes."""
    return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Siege:
    """A server among bad peers, and a client that behaves, calling its `echo` all the while: its calls must neither
    fail nor wait for others."""

    def __init__(self, server: Server, proxy: Any, message: object) -> None:
        self.server = server
        self.latencies: list[float] = []
        self._proxy = proxy
        self._message = message

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect without a client."""
        return await asyncio.open_unix_connection(self.server.address.removeprefix("unix:"), limit=1 << 20)

    async def stand_by(self) -> None:
        while True:
            begin = time.perf_counter()
            assert await self._proxy.echo(self._message) == self._message
            self.latencies.append(time.perf_counter() - begin)
            await anyio.sleep(0.002)

    def worst(self) -> float:
        """The bystander's longest wait for an answer, in seconds."""
        return max(self.latencies)

    @staticmethod
    async def read_to_end(reader: asyncio.StreamReader) -> bytes:
        """What the server said before it closed, which it must do soon."""
        found = bytearray()
        with anyio.fail_after(10), contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                found += data
        return bytes(found)

    @staticmethod
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


@pytest.fixture
def besieged(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Siege]]:
    """Serve an object, with options as `serve` takes them, while a bystander sends `message` to its `echo`."""

    @asynccontextmanager
    async def besieged(
        impl: object, interface: Callable[..., Any], message: object, **options: Any
    ) -> AsyncIterator[Siege]:
        async with (
            serve(impl, interface, f"unix:{tmp_path}/s", drain_timeout=0.2, **options) as server,
            connect(server.address, interface) as proxy,
            anyio.create_task_group() as tasks,
        ):
            siege = Siege(server, proxy, message)
            tasks.start_soon(siege.stand_by)
            yield siege
            assert await proxy.echo(message) == message
            assert statistics(proxy)["echo"].failures == 0
            tasks.cancel_scope.cancel()

    return besieged
