"""A store in a directory: a local disk, tmpfs, or a file system that trainer and servers share."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from .files import sync_directory, temporaries, write_all, write_atomically
from .interface import Entry, Located, WeightSyncError

_LOCK_SECONDS = 30.0
_ATTEMPTS = 5


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
        for attempt in range(_ATTEMPTS):
            _make_directory(path.parent)
            try:
                write_atomically(path, chunks)
                return
            except FileNotFoundError:  # a `delete` elsewhere removed the directory, which was empty
                if attempt + 1 == _ATTEMPTS or path.parent.is_dir():
                    raise

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

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        """Tells states apart by inode and time: every write makes a new file."""
        path = self._path(key)
        if seen and _tag(path.stat()) == seen:
            return None
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            return _pread(descriptor, 0, status.st_size), _tag(status)
        finally:
            os.close(descriptor)

    def locate(self, key: str) -> Located:
        """Where a blob is, for who serves this directory. Raises FileNotFoundError."""
        path = self._path(key)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or not path.resolve().is_relative_to(self._root.resolve()):
            raise FileNotFoundError(f"{self.url} has no {key}")
        return Located(status.st_size, _tag(status), path)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        path = self._path(key)
        _make_directory(path.parent)
        with _locked(path.with_name(f".{path.name}.lock")):
            if (path.read_bytes() if path.exists() else None) != old:
                return False
            for left in temporaries(path):  # by a swap that died: who writes one holds the lock
                left.unlink(missing_ok=True)
            write_atomically(path, [new])
            return True

    def list(self, prefix: str) -> list[str]:
        """Files of an unfinished `put` are listed too, under their temporary names, so that they can be removed."""
        return [entry.key for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Sequence[Entry]:
        """As `list`; what is removed meanwhile is left out."""
        found = []
        for directory, _, names in os.walk(self._root):
            for name in names:
                path = Path(directory, name)
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix):
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        found.append(Entry(key, status.st_size, status.st_mtime))
        return sorted(found)

    def delete(self, key: str) -> None:
        path = self._path(key)
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == self._root:
                break
            try:
                parent.rmdir()
            except OSError:  # not empty, or another removed it
                break

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


def _tag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


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
