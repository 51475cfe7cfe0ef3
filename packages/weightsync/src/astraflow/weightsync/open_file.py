"""A weight file that is read and written at offsets: through a mapping where its pages are the storage, on tmpfs.

There a kept mapping costs neither the system's copy nor the pages' faults, which is most of what a changed version
costs in a file. Elsewhere, and in a file whose pages are not all there yet (writing one to a full file system through a
mapping is a SIGBUS, not an error), it is `pread` and `pwrite`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from .files import in_use, read_into, write_all
from .interface import Bytes


class OpenFile:
    """Open for reading and writing until `close`."""

    def __init__(self, path: Path, size: int, *, new: bool = False) -> None:
        self._descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), 0o644)
        if new:
            os.truncate(self._descriptor, size)
        self._view: Bytes | None = None

    def is_at(self, path: Path) -> bool:
        here, there = os.fstat(self._descriptor), path.stat()
        return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)

    def is_free(self, size: int) -> bool:
        """Whether it has this size and nobody else has it open or mapped."""
        return os.fstat(self._descriptor).st_size == size and not in_use(self._descriptor)

    def map(self) -> None:
        """From now on through a mapping, where that is safe and pays."""
        status = os.fstat(self._descriptor)
        whole = status.st_blocks * 512 >= status.st_size > 0
        if self._view is None and whole and _on_tmpfs(status.st_dev):
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._view = np.frombuffer(mmap.mmap(self._descriptor, status.st_size, flags=flags), np.uint8)

    def room(self, offset: int, length: int) -> Bytes | None:
        """Its own memory there, if it is mapped."""
        return None if self._view is None else self._view[offset : offset + length]

    def read(self, offset: int, into: Bytes) -> Bytes:
        """`into`, filled, or its own memory. Raises EOFError if the file is shorter."""
        if self._view is not None:
            return self._view[offset : offset + len(into)]
        if read_into(self._descriptor, into.data, offset) != len(into):
            raise EOFError(f"a file ends before byte {offset + len(into)}")
        return into

    def write(self, offset: int, data: Bytes) -> None:
        room = self.room(offset, len(data))
        if room is None:
            write_all(self._descriptor, data.data, offset)
        elif not np.may_share_memory(room, data):
            room[:] = data

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        """The mapping goes with the last array that shows it."""
        self._view = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def _on_tmpfs(device: int) -> bool:
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = (line.partition(" - ")[2].split(" ")[0] for line in mounts if line.split(" ")[2] == name)
    return next(kinds, "") == "tmpfs"
