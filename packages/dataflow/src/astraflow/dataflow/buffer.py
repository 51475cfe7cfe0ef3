"""What one policy's trainer may still get: sequences waiting to be served.

Invariants: at most `bound` sequences are held, the oldest being dropped for a newer one; none is served whose
version is more than `max_staleness` behind the version it would be trained at.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import msgspec

from .config import PolicyFeed
from .interface import TrainSample


class Entry(msgspec.Struct, frozen=True):
    """A sequence with the version that counts for its staleness (see `PolicyBuffer.rebase`) and its arrival."""

    oldest: int
    arrival: int
    sample: TrainSample


def _age(entry: Entry) -> tuple[int, int]:
    return entry.oldest, entry.arrival


def _arrival(entry: Entry) -> int:
    return entry.arrival


class PolicyBuffer:
    """The sequences of one policy, kept sorted from the oldest version to the newest."""

    def __init__(self, feed: PolicyFeed) -> None:
        self._feed = feed
        # One batch over what admission allows: its estimate of what running groups give may be short.
        self._bound = feed.horizon + feed.batch_size
        self._entries: list[Entry] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sample: TrainSample, newest_version: int) -> int:
        """Take a sequence, counting tokens of versions above `newest_version` as that one. Returns how many were
        dropped to make room."""
        self._arrivals += 1
        oldest = min(sample.sequence.oldest_version, newest_version)
        insort(self._entries, Entry(oldest, self._arrivals, sample), key=_age)
        excess = max(0, len(self._entries) - self._bound)
        del self._entries[:excess]
        return excess

    def rebase(self, version: int) -> None:
        """The trainer went back to `version`: what abandoned later versions sampled counts as that one's."""
        rebased = (Entry(min(entry.oldest, version), entry.arrival, entry.sample) for entry in self._entries)
        self._entries = sorted(rebased, key=_age)

    def drop_stale(self, version_now: int) -> int:
        """Forget what would be too stale at `version_now`; returns how many."""
        stale = bisect_left(self._entries, version_now - self._feed.max_staleness, key=lambda entry: entry.oldest)
        del self._entries[:stale]
        return stale

    def take(self, count: int) -> list[Entry]:
        """Remove and return up to `count` sequences in the feed's order."""
        match self._feed.order:
            case "edf":
                taken = self._entries[:count]
            case "fifo":
                taken = heapq.nsmallest(count, self._entries, key=_arrival)
            case "lifo":
                taken = heapq.nlargest(count, self._entries, key=_arrival)
        gone = {entry.arrival for entry in taken}
        self._entries = [entry for entry in self._entries if entry.arrival not in gone]
        return taken
