"""What one policy's trainer may still get: sequences waiting to be served.

Invariants: at most `bound` units (sequences, or groups if batches are cut by groups) are held, the oldest being
dropped for a newer one; none is served that is staler than the limit allows at the version it would be trained at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence

from .algorithms.batching import BatchBy, first_units, unit_key
from .algorithms.entry import Entry
from .algorithms.order import EarliestDeadline, Order
from .interface import TrainSample


def _age(entry: Entry) -> tuple[int, int]:
    return entry.oldest, entry.arrival


class PolicyBuffer:
    """The sequences of one policy, kept sorted from the oldest version to the newest."""

    def __init__(self, order: Order, batch_by: BatchBy, bound: int) -> None:
        self._order = order
        self._by = batch_by
        self._bound = bound
        self._entries: list[Entry] = []
        self._sizes: Counter[str] = Counter()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def units(self) -> int:
        """What is held, counted as batches count."""
        return len(self._sizes)

    @property
    def arrivals(self) -> int:
        """How many sequences came so far."""
        return self._arrivals

    def restore(self, entries: Sequence[Entry], arrivals: int) -> None:
        """Hold these and no others; `arrivals` have come so far."""
        self._entries = sorted(entries, key=_age)
        self._sizes = Counter(unit_key(entry, self._by) for entry in self._entries)
        self._arrivals = arrivals

    def add(self, sample: TrainSample, newest_version: int) -> tuple[Entry, list[Entry]]:
        """Take a sequence, counting tokens of versions above `newest_version` as that one. Returns it as it is kept,
        and what was dropped to make room."""
        self._arrivals += 1
        entry = Entry(min(sample.sequence.oldest_version, newest_version), self._arrivals, sample)
        if self._entries and self._entries[-1].oldest > entry.oldest:
            insort(self._entries, entry, key=_age)
        else:  # nearly always: versions only grow, and so do arrivals
            self._entries.append(entry)
        self._sizes[unit_key(entry, self._by)] += 1
        dropped: list[Entry] = []
        while self.units > self._bound:
            dropped += self._remove(first_units(self._entries, 1, self._by))
        return entry, dropped

    def rebase(self, version: int) -> None:
        """The trainer went back to `version`: what abandoned later versions sampled counts as that one's."""
        rebased = (Entry(min(entry.oldest, version), entry.arrival, entry.sample) for entry in self._entries)
        self._entries = sorted(rebased, key=_age)

    def drop_stale(self, oldest_allowed: int) -> list[Entry]:
        """Forget the units with a sequence of a version below `oldest_allowed`; returns their sequences."""
        stale = bisect_left(self._entries, oldest_allowed, key=lambda entry: entry.oldest)
        if stale == 0:
            return []
        old = {unit_key(entry, self._by) for entry in self._entries[:stale]}
        return self._remove([entry for entry in self._entries if unit_key(entry, self._by) in old])

    def take(self, count: int) -> list[Entry]:
        """Remove and return the sequences of up to `count` units in the policy's order."""
        by_age = type(self._order) is EarliestDeadline  # as they are kept
        ordered = self._entries if by_age else sorted(self._entries, key=self._order.key)
        return self._remove(first_units(ordered, count, self._by))

    def _remove(self, entries: list[Entry]) -> list[Entry]:
        gone = {entry.arrival for entry in entries}
        self._entries = [entry for entry in self._entries if entry.arrival not in gone]
        for key in (unit_key(entry, self._by) for entry in entries):
            self._sizes[key] -= 1
            if not self._sizes[key]:
                del self._sizes[key]
        return entries
