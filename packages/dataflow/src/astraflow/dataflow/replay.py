"""Consumed samples that may be trained again.

Invariants: at most `capacity` sequences are kept, the first to be consumed being forgotten first; none is given that
is staler than the bound, nor more often than its use cap; a unit (a sample, or a group) comes at most once in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from .algorithms.batching import BatchBy, unit_key, units
from .algorithms.catalogue import PICKS
from .algorithms.entry import Entry
from .algorithms.stage import Context, Stage, read_state
from .config import Replay
from .interface import TrainSample


class Unit(msgspec.Struct):
    """The sequences of a unit, the version of the oldest, and how many batches they were in, the first included."""

    entries: list[Entry]
    oldest: int
    uses: int = 1

    @classmethod
    def of(cls, entries: list[Entry], uses: int = 1) -> Unit:
        return cls(entries, min(entry.oldest for entry in entries), uses)


class ReplayedEntry(msgspec.Struct, frozen=True):
    """An entry of a pool without its sample."""

    sample_id: str
    oldest: int
    arrival: int
    uses: int


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    entries: list[ReplayedEntry]
    pick: Any = None


class ReplayPool(Stage):
    """What one policy consumed lately, in the order in which it did."""

    def __init__(self, config: Replay, batch_by: BatchBy, max_staleness: int, context: Context) -> None:
        self._config = config
        self._by = batch_by
        self._max_staleness = min(max_staleness, config.max_staleness)
        self._pick = PICKS.build(config.pick, context)
        self._units: dict[str, Unit] = {}
        self._size = 0
        self._awaited: dict[str, ReplayedEntry] = {}
        self._given = 0
        self._looked_at: int | None = None

    def offer(self, entries: Sequence[Entry]) -> None:
        """These were trained for the first time."""
        if self._config.ratio == 0:
            return
        for unit in units(entries, self._by):
            key = unit_key(unit[0], self._by)
            self._remove(key)
            self._units[key] = Unit.of(unit)
            self._size += len(unit)
        while self._size > self._config.capacity:
            self._remove(next(iter(self._units)))
        self._looked_at = None

    def available(self, version: int) -> int:
        """Units that may be trained again at `version`; what may not is forgotten."""
        if version == self._looked_at:
            return len(self._units)
        self._looked_at = version
        for key, unit in list(self._units.items()):
            used_up = self._config.max_uses and unit.uses >= self._config.max_uses
            if used_up or version - unit.oldest > self._max_staleness:
                self._remove(key)
        return len(self._units)

    def take(self, count: int, version: int) -> list[Entry]:
        """The sequences of up to `count` units for a batch at `version`."""
        count = min(count, self.available(version))
        if count == 0:
            return []
        held = list(self._units.values())
        chosen = [held[index] for index in self._pick.pick([unit.entries for unit in held], count)]
        for unit in chosen:
            unit.uses += 1
        self._looked_at = None
        self._given += sum(len(unit.entries) for unit in chosen)
        return [entry for unit in chosen for entry in unit.entries]

    def rebase(self, version: int) -> None:
        """The trainer went back to `version`: what abandoned later versions sampled counts as that one's."""
        self._units = {
            key: Unit.of([Entry(min(e.oldest, version), e.arrival, e.sample) for e in unit.entries], unit.uses)
            for key, unit in self._units.items()
        }
        self._looked_at = None

    def state(self) -> ReplayState:
        """Without the samples, which are large and kept elsewhere: see `refill`."""
        entries = [
            ReplayedEntry(entry.sample.sample_id, entry.oldest, entry.arrival, unit.uses)
            for unit in self._units.values()
            for entry in unit.entries
        ]
        return ReplayState(entries=entries, pick=self._pick.state())

    def restore(self, state: Any, /) -> None:
        """Empty until `refill` brings the samples."""
        kept = read_state(state, ReplayState)
        self._units, self._size = {}, 0
        self._awaited = {entry.sample_id: entry for entry in kept.entries}
        self._pick.restore(kept.pick)

    def refill(self, samples: Iterable[TrainSample]) -> int:
        """Bring back the samples that the restored state names; others are passed over. Returns how many are still
        missing, which are forgotten."""
        found = {sample.sample_id: sample for sample in samples if sample.sample_id in self._awaited}
        kept = [entry for entry in self._awaited.values() if entry.sample_id in found]
        missing = len(self._awaited) - len(kept)
        self._awaited = {}
        entries = [Entry(entry.oldest, entry.arrival, found[entry.sample_id]) for entry in kept]
        uses = {entry.sample_id: entry.uses for entry in kept}
        self.offer(entries)
        for unit in self._units.values():
            unit.uses = uses[unit.entries[0].sample.sample_id]
        return missing

    def stats(self) -> dict[str, float]:
        return {"kept": float(self._size), "replayed": float(self._given)}

    def _remove(self, key: str) -> None:
        unit = self._units.pop(key, None)
        if unit is not None:
            self._size -= len(unit.entries)
