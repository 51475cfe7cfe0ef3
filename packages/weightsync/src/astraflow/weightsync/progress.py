"""How far something is that moves bytes: a function of (bytes so far, bytes in all), called from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .interface import Payloads

Progress = Callable[[int, int], None]


class Counter:
    """Counts bytes and tells of them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.done = 0
        self._progress = progress
        self._total = total
        self._adding = threading.Lock()

    def add(self, count: int) -> None:
        with self._adding:
            self.done += count
            if self._progress is not None:
                self._progress(self.done, self._total)


class Counted:
    """Payloads that count what is read of them."""

    def __init__(self, payloads: Payloads, counter: Counter) -> None:
        self._payloads, self._counter = payloads, counter

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        data = self._payloads.read(key, offset, length)
        self._counter.add(len(data))
        return data
