"""A blob on its way from a slow store into a file: fetched in pieces, readable as it grows.

A piece is fetched once, whoever waits for it. Bytes are given out only after the block they lie in has its digests; a
block that has not is fetched again. What arrived of each piece is noted beside the file, so that a process that is
killed goes on at the byte; what the note says is believed only as far as the digests bear it out.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import blake3
import numpy as np
from numpy.typing import NDArray

from .contents import Blob, Extent
from .files import sync_directory, write_all
from .interface import CorruptVersion, RemoteStore, Store
from .pulse import Pulse
from .spool import part_size

HAVE = ".have"
"""Ends the name of the note beside a file."""
_WRITE = 1 << 20
"""Bytes that arrive before they are written: what a kill loses of a piece at most."""
_STRIKES = 3
"""A block that arrives damaged this often is damaged at the source."""


class Block(NamedTuple):
    """Bytes [start, stop): whole extents, verified together."""

    start: int
    stop: int
    extents: tuple[Extent, ...]


class Piece(NamedTuple):
    """Bytes [start, stop) of one block, fetched by one request."""

    block: int
    start: int
    stop: int


def blocks_of(blob: Blob, size: int) -> list[Block]:
    """Small extents together up to `size` bytes, a larger one by itself."""
    blocks: list[Block] = []
    held: list[Extent] = []
    for extent in blob.extents:
        if held and extent.stop - held[0].start > size:
            blocks.append(Block(held[0].start, held[-1].stop, tuple(held)))
            held = []
        held.append(extent)
    if held:
        blocks.append(Block(held[0].start, held[-1].stop, tuple(held)))
    return blocks


def pieces_of(blocks: list[Block], size: int) -> list[Piece]:
    """Each block in pieces of at most `size` bytes."""
    return [
        Piece(number, start, min(start + size, block.stop))
        for number, block in enumerate(blocks)
        for start in range(block.start, block.stop, size)
    ]


def _runs(pieces: list[Piece], blocks: int) -> list[range]:
    """The pieces of each block."""
    counts = [0] * blocks
    for piece in pieces:
        counts[piece.block] += 1
    return [range(stop - count, stop) for count, stop in zip(counts, accumulate(counts), strict=True)]


class Incoming:
    """`blob` on its way into `path`. Not thread-safe: its methods belong to one event loop.

    Raises OSError where the files cannot be made. `note` beside the file holds, for each piece, the bytes that arrived.
    """

    def __init__(self, blob: Blob, path: Path, threads: anyio.CapacityLimiter) -> None:
        self.blob = blob
        self.fault: CorruptVersion | FileNotFoundError | None = None
        self.arrived = 0
        size = part_size(blob.size)
        self._blocks = blocks_of(blob, size)
        self._starts = [block.start for block in self._blocks]
        self._pieces = pieces_of(self._blocks, size)
        self._of_block = _runs(self._pieces, len(self._blocks))
        self._threads = threads
        self._path = path
        self._note = path.with_name(f"{path.name}{HAVE}")
        self._have = self._open()
        self._missing = dict.fromkeys(n for n, piece in enumerate(self._pieces) if self._lacks(n))
        self._urgent: dict[int, None] = {}
        self._taken: set[int] = set()
        self._strikes = [0] * len(self._blocks)
        self._good = [False] * len(self._blocks)
        self._dropped = False
        self._changed = Pulse()

    @property
    def complete(self) -> bool:
        return all(self._good)

    @property
    def missing_bytes(self) -> int:
        return self.blob.size - int(self._have.sum())

    def take(self, *, urgent: bool = False) -> int | None:
        """A piece that nobody fetches, to be handed to `fetch`; with `urgent` one that a reader waits for."""
        number = next(iter(self._urgent if urgent else self._missing), None)
        if number is not None:
            self._urgent.pop(number, None)
            del self._missing[number]
            self._taken.add(number)
        return number

    async def restore(self) -> None:
        """Verify the blocks that an earlier process fetched whole."""
        for number in range(len(self._blocks)):
            await self._verify(number)

    async def fetch(self, number: int, source: Store) -> None:
        """Bring a taken piece here, from where it was cut off. Raises OSError as `source` does; the piece is then free
        to be taken again."""
        piece = self._pieces[number]
        try:
            while self._lacks(number):
                start = piece.start + int(self._have[number])
                async with aclosing(arriving(source, self.blob.key, start, piece.stop)) as chunks:
                    came = await self._receive(number, chunks)
                if not came:
                    self._strike(piece.block, f"{source.url}/{self.blob.key} ends at byte {start} of {self.blob.size}")
                    break
        finally:
            self._taken.discard(number)
            if self._lacks(number) and self.fault is None:
                self._missing[number] = None
        await self._verify(piece.block)

    async def wait(self, start: int, stop: int, patience: float) -> None:
        """Until bytes [start, stop) are here and good.

        Raises CorruptVersion if the source's are damaged, FileNotFoundError if it removed them, TimeoutError if nothing
        arrived for `patience` seconds.
        """
        while True:
            overlapping = range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))
            waiting = [block for block in overlapping if not self._good[block]]
            if not waiting:
                return
            if self.fault is not None:
                raise type(self.fault)(*self.fault.args)
            wanted = (number for block in waiting for number in self._of_block[block])
            self._urgent.update(dict.fromkeys(number for number in wanted if number in self._missing))
            with anyio.move_on_after(patience) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                raise TimeoutError(f"{self.blob.key}: nothing came from the source for {patience:.0f} s")

    async def read(self, start: int, stop: int) -> bytes:
        """Bytes that `wait` waited for. Raises FileNotFoundError once it was `finish`ed or dropped."""
        return await anyio.to_thread.run_sync(_read, self._path, start, stop, limiter=self._threads)

    def fail(self, fault: CorruptVersion | FileNotFoundError) -> None:
        """Fetch no more of it; who waits is told."""
        self.fault = fault
        self._missing, self._urgent = {}, {}
        self._changed.beat()

    def forgive(self) -> None:
        """Try a source that failed once more."""
        self.fault = None
        self._strikes = [0] * len(self._blocks)
        self._missing = dict.fromkeys(
            number for number in range(len(self._pieces)) if self._lacks(number) and number not in self._taken
        )

    def finish(self, target: Path) -> None:
        """Make the complete file durable under its name. Blocking."""
        descriptor = os.open(self._path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self._path, target)
        sync_directory(target.parent)
        self._note.unlink(missing_ok=True)

    def drop(self) -> None:
        """Forget it, files and all; who waits is told."""
        self._dropped = True
        self._path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)
        self.fail(FileNotFoundError(f"{self.blob.key} was removed at the source"))

    def _open(self) -> NDArray[np.uint32]:
        """The note, mapped: kept if it fits, since a killed process's writes stay in the page cache."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fits = self._path.exists() and self._note.exists() and self._note.stat().st_size == 4 * len(self._pieces)
        if not fits:
            self._path.unlink(missing_ok=True)
            self._note.write_bytes(bytes(4 * len(self._pieces)))
            with self._path.open("wb") as file:
                file.truncate(self.blob.size)
        have: NDArray[np.uint32] = np.memmap(self._note, np.uint32, "r+")
        np.minimum(have, [piece.stop - piece.start for piece in self._pieces], out=have, casting="unsafe")
        return have

    def _lacks(self, number: int) -> bool:
        piece = self._pieces[number]
        return int(self._have[number]) < piece.stop - piece.start

    async def _receive(self, number: int, arriving: AsyncIterator[bytes | memoryview]) -> bool:
        """Write what arrives, even if it is cut off; whether anything came."""
        held: list[bytes | memoryview] = []
        size = 0
        came = False
        try:
            async for chunk in arriving:
                held.append(chunk)
                size += len(chunk)
                came = True
                if size >= _WRITE:
                    await self._write(number, held)
                    held, size = [], 0
        finally:
            with anyio.CancelScope(shield=True):
                if held:
                    await self._write(number, held)
        return came

    async def _write(self, number: int, chunks: list[bytes | memoryview]) -> None:
        piece = self._pieces[number]
        data = b"".join(chunks)[: piece.stop - piece.start - int(self._have[number])]
        if self._dropped:
            return
        at = piece.start + int(self._have[number])
        await anyio.to_thread.run_sync(_write, self._path, data, at, limiter=self._threads)
        self._have[number] += len(data)
        self.arrived += len(data)
        self._changed.beat()

    async def _verify(self, number: int) -> None:
        block = self._blocks[number]
        pieces = self._of_block[number]
        if self._good[number] or self._dropped or any(self._lacks(n) for n in pieces):
            return
        fault = await anyio.to_thread.run_sync(_fault, self._path, block, limiter=self._threads)
        if fault is None:
            self._good[number] = True
        elif not self._dropped:
            self._have[pieces.start : pieces.stop] = 0
            self._missing |= dict.fromkeys(pieces)
            self._strike(number, f"{self.blob.key} is damaged at {fault.what!r}, bytes {fault.start} to {fault.stop}")
        self._changed.beat()

    def _strike(self, block: int, told: str) -> None:
        self._strikes[block] += 1
        if self._strikes[block] >= _STRIKES:
            self.fail(CorruptVersion(f"{told}, {_STRIKES} times; the source's copy is damaged"))


async def arriving(source: Store, key: str, start: int, stop: int) -> AsyncGenerator[bytes | memoryview, None]:
    """Bytes [start, stop) of a blob as they come."""
    if isinstance(source, RemoteStore):
        async for chunk in source.stream(key, start, stop):
            yield chunk
        return
    while start < stop:
        read = partial(source.read, key, start, min(_WRITE, stop - start))
        part: bytes | memoryview = await anyio.to_thread.run_sync(read)
        if not part:
            return
        yield part
        start += len(part)


def _write(path: Path, data: bytes, offset: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        write_all(descriptor, data, offset)
    finally:
        os.close(descriptor)


def _read(path: Path, start: int, stop: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _fault(path: Path, block: Block) -> Extent | None:
    """The first extent that does not have its digest."""
    data = memoryview(_read(path, block.start, block.stop))
    for extent in block.extents:
        if blake3.blake3(data[extent.start - block.start : extent.stop - block.start]).digest() != extent.digest:
            return extent
    return None
