"""Fixtures of the mirror's tests: a source behind a link that can fail, its publisher, a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from astraflow.weightsync import MemoryStore, Publisher
from astraflow.weightsync.manifest import decode_head

Arrays = dict[str, np.ndarray[Any, Any]]
CHUNK = 64 << 10


class Distant:
    """`origin` behind a link: it counts what it sends, and can be down, held up at a byte, cut, or wrong. Publishers
    write to `origin` itself."""

    def __init__(self, origin: MemoryStore) -> None:
        self.origin = origin
        self.url = origin.url
        self.put, self.swap, self.delete = origin.put, origin.swap, origin.delete
        self.list, self.entries = origin.list, origin.entries
        self.sent = 0
        self.down = False
        self.cut_every = 1 << 60
        self.flips = 0
        self.hold_at: int | None = None
        self.released = anyio.Event()

    def read(self, key: str, offset: int = 0, length: int | None = None) -> memoryview:
        self._reach()
        return self.origin.read(key, offset, length)

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        self._reach()
        return self.origin.poll(key, seen)

    async def stream(self, key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        until_cut = self.cut_every
        while start < stop:
            self._reach()
            if self.hold_at is not None and start + CHUNK > self.hold_at:
                await self.released.wait()
            chunk = bytearray(self.origin.read(key, start, min(CHUNK, stop - start, until_cut)))
            await anyio.lowlevel.checkpoint()
            self._reach()
            if not chunk:
                return
            if self.flips:
                self.flips -= 1
                chunk[len(chunk) // 2] ^= 1
            self.sent += len(chunk)
            yield bytes(chunk)
            start += len(chunk)
            until_cut -= len(chunk)
            if not until_cut:
                raise ConnectionError(f"{key} was cut at byte {start}")

    def sizes(self) -> int:
        """Bytes of all payloads."""
        return sum(entry.size for entry in self.entries("") if entry.key.endswith((".ws", ".safetensors")))

    def named(self) -> list[str]:
        """HEAD, and all that belongs to the versions it names."""
        versions = decode_head(self.origin.read("HEAD")).versions
        prefixes = ("HEAD", *(f"{ref.incarnation}/v/{ref.version}/" for ref in versions))
        return [key for key in self.list("") if key.startswith(prefixes)]

    def _reach(self) -> None:
        if self.down:
            raise ConnectionError(f"{self.url} is down")


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Distant]:
    origin = MemoryStore(request.node.name)
    yield Distant(origin)
    origin.close()


@pytest.fixture
def tensors() -> Arrays:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(1000, 700)).astype(np.float32), "b": rng.normal(size=333).astype(np.float32)}


@pytest.fixture
def publisher(source: Distant) -> Publisher:
    return Publisher(source.origin, stream="policy", incarnation=1, anchor_every=3)


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait until something is so, for half a minute at most."""

    async def wait(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():  # noqa: ASYNC110
                await anyio.sleep(0.002)

    return wait


@pytest.fixture
def step() -> Callable[[Arrays], None]:
    """An update, in place."""

    def apply(tensors: Arrays) -> None:
        tensors["w"][::7, ::5] += 0.125

    return apply
