"""Where the time of a publish or a pull goes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


class Seconds:
    """Seconds by part of the work, summed over the threads that do it: with two of them, up to twice the clock's."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._adding = threading.Lock()

    @contextmanager
    def of(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._adding:
                self._spent[part] += time.perf_counter() - started

    def waiting(self, items: Iterator[Item]) -> Iterator[Item]:
        """`items`, and what it took them to come as `wait`."""
        while True:
            with self.of("wait"):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item

    def __getitem__(self, part: str) -> float:
        return self._spent.get(part, 0.0)
