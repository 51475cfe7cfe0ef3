"""Files written so that a crash at any point leaves the old one or the new one, whole."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

from .interface import WeightSyncError


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while len(view):
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def read_into(descriptor: int, memory: memoryview, offset: int) -> int:
    """Fill `memory` from `offset` on; returns how much of it, less where the file ends."""
    done = 0
    while done < len(memory):
        read = os.preadv(descriptor, [memory[done:]], offset + done)
        if not read:
            break
        done += read
    return done


def write_atomically(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write beside `path`, sync, rename over it, sync the directory."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        position = 0
        for chunk in chunks:
            write_all(descriptor, chunk, position)
            position += len(chunk)
        os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def lock_file(path: Path, taken: str) -> int:
    """A descriptor that holds a lock on `path` until it is closed. Raises WeightSyncError, with `taken`, where another
    has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WeightSyncError(taken) from None
    return descriptor


def in_use(descriptor: int) -> bool:
    """Whether anybody else may have the file open or mapped; True where the file system cannot tell.

    Asks for a write lease, which Linux grants to a file's only opener, and gives it back.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False


def temporaries(path: Path) -> list[Path]:
    """What writes of `path` that are under way, or died, have beside it."""
    return [
        other for other in path.parent.iterdir() if other.name.startswith(f".{path.name}.") and other.suffix == ".tmp"
    ]


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
