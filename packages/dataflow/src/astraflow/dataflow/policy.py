"""One policy's stream: from groups through its buffer into batches, and the trainer that consumes them.

Invariants: a version's batch, once cut, is the same for whoever asks for it until a commit; only the newest
incarnation is heard; every sequence taken ends buffered, in one batch, or counted in `dropped`. Policies share
nothing: none waits for another.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .admission import YieldAverage, has_room
from .algorithms.stage import Stage
from .balance import wait_fraction
from .config import DataflowConfig, PolicyFeed
from .figures import PolicyStatus
from .filters import FilterChain
from .group import PolicyGroup
from .interface import Fenced, PolicyVersion, StepReport, TrainBatch
from .serving import Serving
from .signals import Signal
from .window import Window, mean

MAX_UNCOMMITTED = 64
"""Batches kept for a trainer that comes back; of more than that without a commit the oldest are forgotten."""

REMEMBERED_REWARDS = 4096


class PolicyStream:
    """The state of one trained policy."""

    def __init__(self, feed: PolicyFeed, config: DataflowConfig) -> None:
        context, window_s = config.context(feed.model_id), config.window_s
        self.feed = feed
        self.changed = Signal()
        self.published: PolicyVersion | None = None
        self.version = 0
        self.incarnation = 0
        self.asked: int | None = None
        self.ended = False
        self._waiters = 0
        self._asked_at = 0.0
        self._filters = FilterChain(config.filters_of(feed), context)
        self._serving = Serving(feed, context)
        self._n_samples = config.n_samples
        self._synchronous = config.synchronous
        # How many sequences, at first, make one of the units that batches count.
        unit = 1 if feed.batch_by == "samples" else self._n_samples
        self._patience = config.max_dropped_batches * feed.batch_size * unit
        self._yields = YieldAverage(self._n_samples // unit)
        self._cut: dict[int, TrainBatch] = {}
        self._dropped: Counter[str] = Counter()
        self._drought = Drought()
        self._stale_in_a_row = 0
        self._failure = ""
        self._produced = 0
        self._consumed = 0
        self._groups: Window[tuple[float, float]] = Window(window_s)
        self._kept: Window[int] = Window(window_s)
        self._used: Window[int] = Window(window_s)
        self._steps: Window[tuple[float, float]] = Window(window_s)
        self._reported = ("", 0)
        self._metrics: dict[str, float] = {}

    # --- the trainer -------------------------------------------------------------------------------------------

    def attach(self, version: int) -> int:
        """Another trainer takes over at `version`; returns its incarnation. Batches before it are committed, later
        ones wait to be served again; what abandoned versions sampled counts as sampled by `version`."""
        self.incarnation += 1
        self.commit(version)
        self.version = version
        self.asked = None
        self._failure = ""
        self._drought = Drought()
        self._stale_in_a_row = 0
        self._serving.rebase(version)
        self.changed.notify()
        return self.incarnation

    def check(self, incarnation: int) -> None:
        """Raises Fenced if another trainer has taken this one's place."""
        if incarnation != self.incarnation:
            raise Fenced(
                f"policy {self.feed.model_id!r}: incarnation {incarnation} spoke, but {self.incarnation} is in charge; "
                "another trainer has attached, so this one must stop"
            )

    def publish(self, published: PolicyVersion) -> None:
        """New weights; a late repetition of older ones changes nothing."""
        self.check(published.incarnation)
        before = self.published
        if before is None or before.incarnation != published.incarnation or before.version < published.version:
            self.published = published
            self.version = published.version

    def commit(self, version: int) -> None:
        """Batches that made versions up to `version` need not be served again."""
        self._cut = {number: batch for number, batch in self._cut.items() if number >= version}

    def report(self, report: StepReport, now: float) -> bool:
        """Take a step's figures; False if they came before."""
        key = (report.batch_id, report.incarnation)
        if key == self._reported:
            return False
        self._reported = key
        self._steps.add(now, (report.wait_s, report.step_s))
        self._metrics = report.metrics
        return True

    # --- batches -----------------------------------------------------------------------------------------------

    def served(self, version: int) -> TrainBatch | None:
        """The batch that was cut for `version`, if it was and is kept."""
        return self._cut.get(version)

    def ask(self, version: int, now: float) -> None:
        """The trainer wants the batch that makes `version` + 1.

        Raises:
            ValueError: it is neither kept nor the next: versions count batches, one after the other.
        """
        if version not in self._cut and version != self._next:
            raise ValueError(
                f"policy {self.feed.model_id!r}: the batch at version {version} was asked for, the next is {self._next}"
            )
        self.asked = version
        self._asked_at = now

    @contextmanager
    def waiting_call(self) -> Iterator[None]:
        """A call that waits for a batch is under way."""
        self._waiters += 1
        try:
            yield
        finally:
            self._waiters -= 1

    def asking(self, now: float, within_s: float) -> bool:
        """Does a trainer wait for a batch, or did it ask within the last seconds?"""
        unserved = self.asked is not None and self.asked not in self._cut
        return unserved and not self.done and (self._waiters > 0 or now - self._asked_at <= within_s)

    @property
    def buffered(self) -> int:
        return len(self._serving)

    @property
    def _next(self) -> int:
        """The first version from where the trainer is for which no batch was cut."""
        version = self.version
        while version in self._cut:
            version += 1
        return version

    @property
    def done(self) -> bool:
        """No more data is needed: every batch was cut, or the data ended."""
        return self.ended or self._next >= self.feed.steps

    @property
    def waiting(self) -> bool:
        """The trainer waits for a batch with its weights published and nothing cut ahead."""
        at = self.asked
        published = self.published
        return at is not None and at not in self._cut and published is not None and published.version == at

    def ready(self, version: int, tail: bool) -> bool:
        """Is there a batch to cut for `version`? Drops what is too stale for it. `tail`: no more data will come, so
        that a last, smaller batch is one."""
        stale = self._serving.drop_stale(version)
        self._dropped["stale"] += stale
        self._stale_in_a_row += stale
        if self._stale_in_a_row >= self._patience:
            self._failure = (
                f"policy {self.feed.model_id!r}: {self._stale_in_a_row} sequences in a row were more than "
                f"{self._serving.limit} versions old at version {version}; do the workers get new weights?"
            )
        return self._serving.units >= (1 if tail else self._serving.fresh_needed(version))

    def cut(self, version: int, now: float) -> TrainBatch:
        """Take the batch for `version`, which must be `ready`."""
        content = self._serving.cut(version)
        batch = TrainBatch(
            batch_id=f"{self.feed.model_id}/{self.incarnation}/{version}",
            model_id=self.feed.model_id,
            version=version,
            samples=content.samples,
        )
        self._cut[version] = batch
        while len(self._cut) > MAX_UNCOMMITTED:
            del self._cut[min(self._cut.keys() - {version})]
        self._stale_in_a_row = 0
        self._consumed += content.fresh
        self._used.add(now, content.fresh)
        return batch

    # --- data --------------------------------------------------------------------------------------------------

    def wants_group(self, running: int) -> bool:
        """Should another group start for this policy, `running` being under way?"""
        if self.done or self._failure:
            return False
        # Batches behind a gap (one was forgotten) do not count: the trainer cannot reach them without new data.
        untrained = sum(self._fresh_units(self._cut[version]) for version in range(self.version, self._next))
        # Early on there is nothing to replay yet, so that the next batch may need more than its share of the horizon.
        fresh = self._serving.fresh_needed(self._next)
        return has_room(
            running=running,
            average=self._yields.value,
            buffered=self._serving.units,
            cut=untrained,
            horizon=fresh if self._synchronous else max(self.feed.horizon, fresh),
        )

    def _fresh_units(self, batch: TrainBatch) -> int:
        fresh = [sample for sample in batch.samples if not sample.replayed]
        return len(fresh) if self.feed.batch_by == "samples" else len({sample.group_id for sample in fresh})

    def too_old(self, version: int) -> bool:
        """Would what was begun at this version be dropped by every batch to come?"""
        return self.done or self._next - version > self._serving.limit

    def take(self, group: PolicyGroup, missing: Counter[str], error: str, newest_version: int, now: float) -> None:
        """A group is complete. `missing` counts the samples that are not in it, by reason (`error`: why one of them
        is); tokens of versions above `newest_version` count as that one."""
        if self.done:
            self._dropped["finished"] += missing.total() + group.masked + len(group.samples)
            return
        left, reasons = self._filters.apply(group)
        kept = left.samples
        reasons += missing + Counter({"masked": group.masked})
        self._dropped.update(reasons)
        for sample in kept:
            self._dropped["overflow"] += self._serving.add(sample, newest_version)
        self._produced += len(kept)
        self._kept.add(now, len(kept))
        self._yields.add(len(kept) if self.feed.batch_by == "samples" else min(1, len(kept)))
        if group.rewards:
            self._groups.add(now, (mean(group.rewards), mean(float(reward != 0) for reward in group.rewards)))
        if kept:
            self._drought = Drought()
        else:
            self._drought.add(group, reasons, error, self._n_samples)
            if self._drought.samples >= self._patience:
                self._failure = self._drought.message(self.feed.model_id)

    # --- figures -----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why this policy's training cannot go on; empty while it can."""
        return self._failure

    def targets(self, now: float) -> tuple[float, int, int]:
        """What the balance rule looks at: wait fraction, sequences produced and consumed in the window."""
        return wait_fraction(self._steps.values(now)), sum(self._kept.values(now)), sum(self._used.values(now))

    @property
    def stages(self) -> dict[str, Stage]:
        """This policy's data algorithms after rollout, by name."""
        filters = {f"filter/{name}": stage for name, stage in self._filters.stages.items()}
        return {**filters, **self._serving.stages}

    def data(self) -> dict[str, dict[str, float]]:
        """The figures of these stages and of the last batch."""
        serving = {name: stage.stats() for name, stage in self._serving.stages.items()}
        return {**self._filters.stats(), **serving, "batch": self._serving.last.stats()}

    def status(self, now: float, running: int, target: int, selectors: dict[str, dict[str, float]]) -> PolicyStatus:
        groups = self._groups.values(now)
        last = self._serving.last
        return PolicyStatus(
            model_id=self.feed.model_id,
            version=self.version,
            steps=self.feed.steps,
            incarnation=self.incarnation,
            buffered=len(self._serving),
            running=running,
            reward_mean=mean(reward for reward, _ in groups),
            reward_nonzero=mean(share for _, share in groups),
            wait_fraction=wait_fraction(self._steps.values(now)),
            staleness_mean=last.staleness_mean,
            staleness_max=last.staleness_max,
            staleness_min=last.staleness_min,
            version_span=last.version_span,
            produced=self._produced,
            consumed=self._consumed,
            dropped={reason: count for reason, count in self._dropped.items() if count},
            target_workers=target,
            metrics=self._metrics,
            data={name: figures for name, figures in {**selectors, **self.data()}.items() if figures},
            finished=self.ended or self.version >= self.feed.steps,
        )


class Drought:
    """Consecutive groups that gave a policy nothing to train, and what they were, for the error that ends them."""

    def __init__(self) -> None:
        self.samples = 0
        self._groups = 0
        self._reasons: Counter[str] = Counter()
        self._rewards: deque[float] = deque(maxlen=REMEMBERED_REWARDS)
        self._error = ""

    def add(self, group: PolicyGroup, reasons: Counter[str], error: str, n_samples: int) -> None:
        self.samples += max(len(group.samples), n_samples)
        self._groups += 1
        self._reasons.update(reasons)
        self._rewards.extend(group.rewards)
        self._error = self._error or error

    def message(self, model_id: str) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common() if count)
        text = (
            f"policy {model_id!r}: {self._groups} groups ({self.samples} samples) in a row gave nothing to train "
            f"({reasons or 'no sequence of this policy'}); rewards: {histogram(self._rewards)}"
        )
        return f"{text}; first error: {self._error}" if self._error else text


def histogram(rewards: Sequence[float] | deque[float]) -> str:
    """Rewards by how often they came: by value if there are few, else in ten equal ranges."""
    counts = Counter(rewards)
    if not counts:
        return "none"
    if len(counts) <= 10:
        return ", ".join(f"{reward:g} x {count}" for reward, count in sorted(counts.items()))
    numbers, edges = np.histogram(np.asarray(rewards, dtype=np.float64), bins=10)
    ranges = zip(edges[:-1], edges[1:], numbers, strict=True)
    return ", ".join(f"{low:.3g}..{high:.3g} x {count}" for low, high, count in ranges if count)
