"""What is served first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from .entry import Entry
from .stage import Stage


@runtime_checkable
class Order(Stage, Protocol):
    """Orders a policy's buffered sequences."""

    def key(self, entry: Entry, /) -> tuple[float, ...]:
        """The smallest is served first; ties go to the oldest version, then to the first to arrive."""
        ...


class FunctionOrder(Order):
    """A function from an entry to its key."""

    def __init__(self, function: Callable[[Entry], tuple[float, ...]]) -> None:
        self._function = function

    def key(self, entry: Entry, /) -> tuple[float, ...]:
        return self._function(entry)


class EarliestDeadline(Order):
    """The oldest version: it would be too stale first."""

    def key(self, entry: Entry, /) -> tuple[float, ...]:
        return entry.oldest, entry.arrival


class FirstIn(Order):
    """The first to arrive."""

    def key(self, entry: Entry, /) -> tuple[float, ...]:
        return (entry.arrival,)


class LastIn(Order):
    """The last to arrive."""

    def key(self, entry: Entry, /) -> tuple[float, ...]:
        return (-entry.arrival,)
