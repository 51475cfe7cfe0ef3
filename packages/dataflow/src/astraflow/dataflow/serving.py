"""What a policy's batches are made of: the buffer of fresh sequences, replay, and the correction of staleness.

Invariants: at most int(N * ratio) units of a batch of N are replayed, the rest is fresh, and a batch has at least one
fresh unit; nothing in a batch is staler than the correction's limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .algorithms.batching import count_units
from .algorithms.catalogue import CORRECTIONS, ORDERS
from .algorithms.entry import Entry
from .algorithms.stage import Context, Stage
from .buffer import PolicyBuffer
from .config import PolicyFeed
from .group import advantage_of
from .interface import TrainSample
from .replay import ReplayPool
from .window import mean


class BatchFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to say of a batch of so many `samples`, `fresh` of which are trained for the first time; staleness
    in versions, see `PolicyStatus`."""

    samples: int = 0
    fresh: int = 0
    effective: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness_min: int = 0
    version_span: int = 0

    def stats(self) -> dict[str, float]:
        """The share of samples whose advantage is not 0, and how many are replayed."""
        replayed = self.samples - self.fresh
        return {"samples": float(self.samples), "replayed": float(replayed), "effective": self.effective}


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a batch; `fresh_units` of it, as batches count, are trained for the first time."""

    samples: tuple[TrainSample, ...]
    fresh_units: int
    figures: BatchFigures


class Serving:
    """One policy's supply of batches. `horizon` bounds the buffer, in the units that batches count."""

    def __init__(self, feed: PolicyFeed, context: Context) -> None:
        self._feed = feed
        self._correction = CORRECTIONS.build(feed.staleness, context.within("staleness"))
        self._order = ORDERS.build(feed.order, context.within("order"))
        # Staleness above which nothing is served, in versions.
        self.limit = self._correction.limit(feed.max_staleness)
        # A batch over what admission allows: its estimate of what running groups give may be short.
        self._buffer = PolicyBuffer(self._order, feed.batch_by, feed.horizon + feed.batch_size)
        self.replay = ReplayPool(feed.replay, feed.batch_by, feed.max_staleness, context.within("replay"))

    @property
    def stages(self) -> dict[str, Stage]:
        return {"staleness": self._correction, "order": self._order, "replay": self.replay}

    def __len__(self) -> int:
        """Fresh sequences that wait."""
        return len(self._buffer)

    @property
    def units(self) -> int:
        """What waits, counted as batches count."""
        return self._buffer.units

    def restore(self, entries: Sequence[Entry], arrivals: int) -> None:
        """See `PolicyBuffer.restore`."""
        self._buffer.restore(entries, arrivals)

    @property
    def arrivals(self) -> int:
        """See `PolicyBuffer.arrivals`."""
        return self._buffer.arrivals

    def add(self, sample: TrainSample, newest_version: int) -> tuple[Entry, list[Entry]]:
        """See `PolicyBuffer.add`."""
        return self._buffer.add(sample, newest_version)

    def rebase(self, version: int) -> None:
        """See `PolicyBuffer.rebase`."""
        self._buffer.rebase(version)
        self.replay.rebase(version)

    def drop_stale(self, version: int) -> list[Entry]:
        """Forget what would be too stale in a batch for `version`; returns it."""
        return self._buffer.drop_stale(version - self.limit)

    def fresh_needed(self, version: int) -> int:
        """Fresh units that a full batch for `version` needs: as many as replay cannot give."""
        return self._feed.batch_size - min(self._feed.replayed, self.replay.available(version))

    def cut(self, version: int) -> Content:
        """Take a batch for `version`: a full one, or with what is left a smaller one of the same mix."""
        wanted = self._feed.replayed
        if self.units < self.fresh_needed(version):
            ratio = self._feed.replay.ratio
            wanted = int(self.units * ratio / (1 - ratio))
        replayed = self.replay.take(wanted, version)
        fresh = self._buffer.take(self._feed.batch_size - count_units(replayed, self._feed.batch_by))
        self.replay.offer(fresh)
        return self._described(fresh, replayed, version)

    def _described(self, fresh: Sequence[Entry], replayed: Sequence[Entry], version: int) -> Content:
        entries = (*fresh, *replayed)
        ages = [version - entry.oldest for entry in entries]
        samples = tuple(
            self._correction.correct(entry.sample, age, self._feed.max_staleness)
            for entry, age in zip(entries, ages, strict=True)
        )
        again = tuple(msgspec.structs.replace(sample, replayed=True) for sample in samples[len(fresh) :])
        ranges = [sample.sequence.version_range for sample in samples]
        figures = BatchFigures(
            samples=len(samples),
            fresh=len(fresh),
            effective=mean(float(advantage_of(sample) != 0) for sample in samples),
            staleness_mean=mean(ages),
            staleness_max=max(ages),
            staleness_min=max(0, min(version - newest for _, newest in ranges)),
            version_span=max(newest - oldest for oldest, newest in ranges),
        )
        return Content(
            samples=samples[: len(fresh)] + again,
            fresh_units=count_units(fresh, self._feed.batch_by),
            figures=figures,
        )
