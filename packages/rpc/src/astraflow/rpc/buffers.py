"""Memory for large messages, used again once nobody looks at it.

Fresh memory costs more than what is put into it: the kernel gives it page by page, and clears each. A buffer is handed
out again only when no view of it is left anywhere, neither in a decoded message nor in a transport's queue.
"""

from __future__ import annotations

KEPT = 4


class Buffers:
    """The last few buffers that were taken."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """A buffer of `size` bytes or up to twice that, with anything in it. Whoever uses it must hold a view of it."""
        for buffer in self._kept:
            if size <= len(buffer) <= 2 * size and _unused(buffer):
                return buffer
        buffer = bytearray(size)
        self._kept = [*self._kept[1 - KEPT :], buffer]
        return buffer

    def clear(self) -> None:
        self._kept.clear()


def _unused(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:  # its size is fixed as long as there is a view of it
        return False
    buffer.pop()
    return True
