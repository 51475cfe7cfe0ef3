"""What happened lately: the figures that people and the balance rule look at.

Invariant: memory is bounded by the window's limit, whatever the rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Window(Generic[T]):
    """The values of the last `span_s` seconds, at most `limit` of them."""

    def __init__(self, span_s: float, limit: int = 512) -> None:
        self._span_s = span_s
        self._entries: deque[tuple[float, T]] = deque(maxlen=limit)

    def add(self, now: float, value: T) -> None:
        self._entries.append((now, value))

    def values(self, now: float) -> list[T]:
        while self._entries and self._entries[0][0] < now - self._span_s:
            self._entries.popleft()
        return [value for _, value in self._entries]


class Sums:
    """How much there was in the last `span_s` seconds, to a hundredth of that; however often it is added to."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._step_s = span_s / 100
        self._parts: deque[tuple[float, int]] = deque()

    def add(self, now: float, amount: int) -> None:
        if self._parts and now - self._parts[-1][0] < self._step_s:
            began, so_far = self._parts.pop()
            self._parts.append((began, so_far + amount))
        else:
            self._forget(now)
            self._parts.append((now, amount))

    def total(self, now: float) -> int:
        self._forget(now)
        return sum(amount for _, amount in self._parts)

    def _forget(self, now: float) -> None:
        while self._parts and self._parts[0][0] < now - self._span_s:
            self._parts.popleft()


def mean(values: Iterable[float]) -> float:
    """The mean, 0 of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def means_by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each name over the rows that have it."""
    totals: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            totals[name] = totals.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1
    return {name: total / counts[name] for name, total in totals.items()}
