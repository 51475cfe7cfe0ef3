"""A store in this process, for a trainer and an engine that share it: reads are views, nothing is copied twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .interface import Entry

_stores: dict[str, MemoryStore] = {}
_registry = threading.Lock()


class _Blob(NamedTuple):
    data: memoryview
    modified: float
    number: int


class MemoryStore:
    """Blobs in memory under a name that `open_store("mem:NAME")` finds, until `close()`.

    Raises ValueError if the name is taken. What a reader holds stays valid after `delete` and `close`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._blobs: dict[str, _Blob] = {}
        self._writes = 0
        self._lock = threading.Lock()
        with _registry:
            if not name or name in _stores:
                raise ValueError(
                    f"a memory store needs a name of its own, {name!r} is taken or empty; open_store finds it"
                )
            _stores[name] = self

    @property
    def url(self) -> str:
        return f"mem:{self._name}"

    @staticmethod
    def find(name: str) -> MemoryStore:
        """Raises LookupError."""
        with _registry:
            if name not in _stores:
                raise LookupError(f"no memory store {name!r} in this process; open: {sorted(_stores) or 'none'}")
            return _stores[name]

    def close(self) -> None:
        """Take the name out of the registry; those that hold the store can go on. Idempotent."""
        with _registry:
            if _stores.get(self._name) is self:
                del _stores[self._name]

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        blob = bytearray()
        for chunk in chunks:
            blob += chunk
        with self._lock:
            self._set(key, memoryview(blob).toreadonly())

    def read(self, key: str, offset: int = 0, length: int | None = None) -> memoryview:
        data = self._find(key).data
        return data[offset:] if length is None else data[offset : offset + length]

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        blob = self._find(key)
        return None if str(blob.number) == seen else (bytes(blob.data), str(blob.number))

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        with self._lock:
            held = self._blobs.get(key)
            if (None if held is None else bytes(held.data)) != old:
                return False
            self._set(key, memoryview(new))
            return True

    def list(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Sequence[Entry]:
        with self._lock:
            found = [Entry(key, len(blob.data), blob.modified) for key, blob in self._blobs.items()]
        return sorted(entry for entry in found if entry.key.startswith(prefix))

    def delete(self, key: str) -> None:
        with self._lock:
            self._blobs.pop(key, None)

    def _find(self, key: str) -> _Blob:
        with self._lock:
            blob = self._blobs.get(key)
        if blob is None:
            raise FileNotFoundError(f"{self.url} has no {key}")
        return blob

    def _set(self, key: str, data: memoryview) -> None:
        self._writes += 1
        self._blobs[key] = _Blob(data, time.time(), self._writes)
