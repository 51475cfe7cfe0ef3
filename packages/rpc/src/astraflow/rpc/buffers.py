"""Memory for large messages, used again once nobody looks at it.

Fresh memory costs more than what is put into it: the kernel gives it page by page, and clears each. A buffer is handed
out again only when no view of it is left anywhere, neither in a decoded message nor in a transport's queue.

What is kept is limited for all of the process together.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

KEPT = 4
MOST_KEPT = 256 << 20

Buffer = TypeVar("Buffer", bound=bytearray | mmap.mmap)


def pages(size: int) -> mmap.mmap:
    """Memory that the kernel gives as it is written."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Buffers(Generic[Buffer]):
    """The last few buffers that were taken, each the work of `make(size)`."""

    total_kept: ClassVar[int] = 0

    def __init__(self, make: Callable[[int], Buffer]) -> None:
        self._make = make
        self._kept: list[Buffer] = []

    def __del__(self) -> None:
        self.clear()

    def take(self, size: int) -> Buffer:
        """A buffer of `size` bytes or up to twice that, with anything in it. Whoever uses it must hold a view of it."""
        for buffer in self._kept:
            if size <= len(buffer) <= 2 * size and _unused(buffer):
                return buffer
        fresh = self._make(size)
        while len(self._kept) >= KEPT:
            Buffers.total_kept -= len(self._kept.pop(0))
        if Buffers.total_kept + size <= MOST_KEPT:
            Buffers.total_kept += size
            self._kept.append(fresh)
        return fresh

    def clear(self) -> None:
        Buffers.total_kept -= sum(map(len, self._kept))
        self._kept.clear()


def _unused(buffer: bytearray | mmap.mmap) -> bool:
    size = len(buffer)
    try:
        if isinstance(buffer, bytearray):
            buffer.append(0)
            buffer.pop()
        else:
            buffer.resize(size)
    except BufferError:  # its size is fixed as long as there is a view of it
        return False
    return True
