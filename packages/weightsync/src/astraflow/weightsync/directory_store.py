"""A store in a directory: a local disk, tmpfs, or a file system that trainer and servers share."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .files import sync_directory, write_all, write_atomically
from .interface import WeightSyncError

_LOCK_SECONDS = 30.0


class DirectoryStore:
    """A blob is a file, written beside its name, synced and renamed; a swap compares and renames under a lock file.

    Reads are `pread` into memory of their own: a file that another host truncates is a short read, not a SIGBUS.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._root = Path(path).absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        path = self._path(key)
        _make_directory(path.parent)
        write_atomically(path, chunks)

    def put_at(self, key: str, size: int, pieces: Iterable[tuple[int, bytes | memoryview]]) -> None:
        path = self._path(key)
        _make_directory(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.truncate(descriptor, size)
            for offset, data in pieces:
                write_all(descriptor, data, offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_directory(path.parent)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        descriptor = os.open(self._path(key), os.O_RDONLY)
        try:
            wanted = max(0, os.fstat(descriptor).st_size - offset)
            return _pread(descriptor, offset, wanted if length is None else min(length, wanted))
        finally:
            os.close(descriptor)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        path = self._path(key)
        _make_directory(path.parent)
        with _locked(path.with_name(f".{path.name}.lock")):
            if (path.read_bytes() if path.exists() else None) != old:
                return False
            write_atomically(path, [new])
            return True

    def list(self, prefix: str) -> list[str]:
        """Files of an unfinished `put` are listed too, under their temporary names, so that they can be removed."""
        found = (path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file())
        return sorted(key for key in found if key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self._root or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()

    def _path(self, key: str) -> Path:
        pure = PurePosixPath(key)
        if not pure.parts or pure.is_absolute() or ".." in pure.parts:
            raise ValueError(f"{key!r} is no relative key")
        return self._root / pure


def _make_directory(path: Path) -> None:
    """With its parents, each one's entry as durable as what will be in it."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def _pread(descriptor: int, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises WeightSyncError if another holds the lock for too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WeightSyncError(f"{path} was held by another process for {_LOCK_SECONDS:.0f} s") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(descriptor)
