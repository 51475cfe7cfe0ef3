"""What arrived of a transfer, in memory or in files that a killed puller's successor goes on with.

A part is a stretch of a blob that one request brings; parts are cut by the blob's size alone, so that every process
cuts the same. What is in a file is as untrusted as the link: who reads it verifies it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from .files import lock_file, read_into, write_all

LARGEST_PART = 8 << 20
SMALLEST_PART = 256 << 10
SPREAD = 32
"""A blob is cut so that this many connections have a part each, where it is large enough."""

_LOCK = ".lock"


class Stretch(NamedTuple):
    """Bytes [start, stop) of a blob."""

    key: str
    start: int
    stop: int


def part_size(size: int) -> int:
    """Of the parts of a blob of `size` bytes."""
    return min(LARGEST_PART, max(SMALLEST_PART, -(-size // SPREAD)))


def cut_parts(blob: Stretch) -> list[Stretch]:
    size = part_size(blob.stop - blob.start)
    return [Stretch(blob.key, start, min(start + size, blob.stop)) for start in range(blob.start, blob.stop, size)]


class Spool(Protocol):
    """Keeps parts as they grow. Methods block, briefly; one writer a part."""

    in_memory: bool

    def have(self, part: Stretch) -> int:
        """Bytes of it that are here, from its start."""
        ...

    def append(self, part: Stretch, data: bytes) -> None: ...

    def read(self, part: Stretch, start: int, stop: int) -> memoryview:
        """Bytes [start, stop) of the blob, which lie in the part and are here."""
        ...

    def drop(self, part: Stretch) -> None: ...


class MemorySpool:
    """Parts in memory. What was read stays valid after `drop`."""

    in_memory = True

    def __init__(self) -> None:
        self._parts: dict[Stretch, tuple[bytearray, int]] = {}

    def have(self, part: Stretch) -> int:
        return self._parts[part][1] if part in self._parts else 0

    def append(self, part: Stretch, data: bytes) -> None:
        buffer, have = self._parts.get(part) or (bytearray(part.stop - part.start), 0)
        buffer[have : have + len(data)] = data
        self._parts[part] = (buffer, have + len(data))

    def read(self, part: Stretch, start: int, stop: int) -> memoryview:
        return memoryview(self._parts[part][0]).toreadonly()[start - part.start : stop - part.start]

    def drop(self, part: Stretch) -> None:
        self._parts.pop(part, None)


class FileSpool:
    """Each part a file that grows. One process a directory: raises WeightSyncError if another is at it.

    Not synced: what a crash of the machine leaves behind is verified as what arrives is.
    """

    in_memory = False

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)
        taken = f"{self._root} is the spool of a pull under way: give each puller its own"
        self._lock = lock_file(self._root / _LOCK, taken)

    def close(self) -> None:
        os.close(self._lock)

    def keep_only(self, parts: Iterable[Stretch]) -> None:
        """Remove the parts of other transfers."""
        names = {self._name(part) for part in parts} | {_LOCK}
        for path in self._root.iterdir():
            if path.name not in names:
                path.unlink()

    def have(self, part: Stretch) -> int:
        path = self._root / self._name(part)
        return min(path.stat().st_size, part.stop - part.start) if path.exists() else 0

    def append(self, part: Stretch, data: bytes) -> None:
        descriptor = os.open(self._root / self._name(part), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_all(descriptor, data, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def read(self, part: Stretch, start: int, stop: int) -> memoryview:
        data = memoryview(bytearray(stop - start))
        descriptor = os.open(self._root / self._name(part), os.O_RDONLY)
        try:
            return data[: read_into(descriptor, data, start - part.start)].toreadonly()
        finally:
            os.close(descriptor)

    def drop(self, part: Stretch) -> None:
        """It stays until the transfer has ended, or another begins."""

    @staticmethod
    def _name(part: Stretch) -> str:
        return f"{part.key.replace('/', '~')}.{part.start}-{part.stop}"
