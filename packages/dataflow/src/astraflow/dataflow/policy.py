"""One policy's stream: from groups through its buffer into batches, and the trainer that consumes them.

Invariants: a version's batch, once cut, is the same for whoever asks for it until a commit; only the newest
incarnation is heard; every sequence taken ends buffered, in one batch, or counted in `dropped`. Policies share
nothing: none waits for another.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

import msgspec
import numpy as np

from .admission import YieldAverage, has_room
from .algorithms.entry import Entry
from .algorithms.stage import AlgorithmFailed, Stage
from .balance import wait_fraction
from .batches import Batches, Served
from .config import DataflowConfig, PolicyFeed
from .figures import PolicyStatus
from .filters import FilterChain
from .group import PolicyGroup
from .ingest import sequence_ids
from .interface import AttachRequest, Fenced, PolicyVersion, RolloutGroup, StepReport, TrainBatch, TrainSample
from .journal import Attached, Cut, Dropped, Forgotten, Kept, NoJournal, Published, Stepped, Touched
from .lineage import Lineage, check_consumed
from .serving import BatchFigures, Serving
from .signals import Signal
from .window import Sums, Window, mean

REMEMBERED_REWARDS = 4096
REMEMBERED_FIGURES = 8
"""Batches whose figures can be asked for: a trainer reports of one that was cut a while ago."""


class PolicyState(msgspec.Struct, frozen=True, kw_only=True):
    """What survives a restart beside the buffer and the batches."""

    version: int
    lineage: Lineage
    published: PolicyVersion | None
    arrivals: int
    yields: float
    produced: int
    consumed: int
    dropped: dict[str, int]


class PolicyStream:
    """The state of one trained policy. The `journal` takes down what happens to it."""

    def __init__(self, feed: PolicyFeed, config: DataflowConfig, journal: NoJournal) -> None:
        context, window_s = config.context(feed.model_id), config.window_s
        self.feed = feed
        self.changed = Signal()
        self.published: PolicyVersion | None = None
        self.version = 0
        self.asked: int | None = None
        self.ended = False
        self._waiters = 0
        self._asked_at = self._waiting_since = 0.0
        self._filters = FilterChain(config.filters_of(feed), context)
        self._serving = Serving(feed, context)
        self._n_samples = config.n_samples
        self._synchronous = config.synchronous
        # How many sequences, at first, make one of the units that batches count.
        unit = 1 if feed.batch_by == "samples" else self._n_samples
        self._patience = config.max_dropped_batches * feed.batch_size * unit
        self._yields = YieldAverage(self._n_samples // unit)
        self._lineage = Lineage()
        self._keep_checkpoints = config.keep_checkpoints
        self._record = journal.record
        self._batches = Batches(journal.keeps)
        self._figures: deque[tuple[int, BatchFigures]] = deque(maxlen=REMEMBERED_FIGURES)
        self._dropped: Counter[str] = Counter()
        self._drought = Drought()
        self._stale_in_a_row = 0
        self._failure = ""
        self._produced = 0
        self._consumed = 0
        self._groups: Window[tuple[float, float]] = Window(window_s)
        self._kept = Sums(window_s)
        self._used = Sums(window_s)
        self._steps: Window[tuple[float, float]] = Window(window_s)
        self._reported = ("", 0)
        self._metrics: dict[str, float] = {}

    # --- what survives a restart -------------------------------------------------------------------------------

    def state(self) -> PolicyState:
        return PolicyState(
            version=self.version,
            lineage=self._lineage,
            published=self.published,
            arrivals=self._serving.arrivals,
            yields=self._yields.state(),
            produced=self._produced,
            consumed=self._consumed,
            dropped=dict(self._dropped),
        )

    def restore(
        self,
        state: PolicyState,
        buffered: Sequence[Entry],
        batches: Iterable[tuple[int, Served]],
        replayable: Iterable[TrainSample],
    ) -> None:
        """Go on from there; the stages have been restored before."""
        self.version = state.version
        self.published = state.published
        self._lineage = state.lineage
        self._serving.restore(buffered, state.arrivals)
        self._batches.restore(batches)
        self._yields.restore(state.yields)
        self._produced, self._consumed = state.produced, state.consumed
        self._dropped = Counter(state.dropped)
        self._serving.replay.refill(replayable)

    # --- the trainer -------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        """The one that is heard."""
        return self._lineage.incarnation

    def attach(self, request: AttachRequest) -> int:
        """Another trainer takes over at the request's version; returns its incarnation. Batches before it are
        committed, later ones wait to be served again; what abandoned versions sampled counts as sampled by that one.

        Raises:
            ValueError: the trainer consumed other batches than this policy was served.
        """
        version = request.version
        check_consumed(self.feed.model_id, version, request.consumed, self._batches.names)
        self._lineage.attach(version, self._keep_checkpoints)
        self._forget()
        self._record(Attached(self.feed.model_id, version))
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
            self._record(Published(published))

    def commit(self, version: int) -> None:
        """There is a checkpoint at `version`: batches before the oldest that the trainer keeps will not be served
        again."""
        self._lineage.commit(version, self._keep_checkpoints)
        self._record(Touched())
        self._forget()

    def _forget(self) -> None:
        floor = self._lineage.floor
        if self._batches.forget(floor):
            self._record(Forgotten(self.feed.model_id, floor))

    def bound(self, incarnation: int) -> int | None:
        """What tokens of weights of that incarnation count as at most; None if nobody has gone back since."""
        return self._lineage.bound(incarnation)

    def report(self, report: StepReport, now: float) -> bool:
        """Take a step's figures; False if they came before."""
        key = (report.batch_id, report.incarnation)
        if key == self._reported:
            return False
        self._reported = key
        self._record(Stepped(report))
        self._steps.add(now, (report.wait_s, report.step_s))
        self._metrics = report.metrics
        return True

    # --- batches -----------------------------------------------------------------------------------------------

    def served(self, version: int) -> Served | None:
        """The batch that was cut for `version`, if it was and is kept."""
        return self._batches.get(version)

    def ask(self, version: int, now: float) -> None:
        """The trainer wants the batch that makes `version` + 1.

        Raises:
            ValueError: it is neither kept nor the next: versions count batches, one after the other. Or a checkpoint
                has it already.
        """
        committed = version < self._lineage.checkpoint
        if committed or (version not in self._batches and version != self._next):
            raise ValueError(
                f"policy {self.feed.model_id!r}: the batch at version {version} was asked for, the next is {self._next}"
            )
        if version != self.asked:
            self._waiting_since = now
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
        unserved = self.asked is not None and self.asked not in self._batches
        return unserved and not self.done and (self._waiters > 0 or now - self._asked_at <= within_s)

    @property
    def buffered(self) -> int:
        return len(self._serving)

    @property
    def _next(self) -> int:
        """The first version from where the trainer is for which no batch was cut."""
        return self._batches.next(self.version)

    @property
    def done(self) -> bool:
        """No more data is needed: every batch was cut, or the data ended."""
        return self.ended or self._next >= self.feed.steps

    @property
    def waiting(self) -> bool:
        """The trainer waits for a batch with its weights published and nothing cut ahead."""
        at = self.asked
        published = self.published
        return at is not None and at not in self._batches and published is not None and published.version == at

    def ready(self, version: int, tail: bool) -> bool:
        """Is there a batch to cut for `version`? Drops what is too stale for it. `tail`: no more data will come, so
        that a last, smaller batch is one."""
        stale = self._serving.drop_stale(version)
        self._drop("stale", [entry.sample.sample_id for entry in stale])
        self._stale_in_a_row += len(stale)
        if self._stale_in_a_row >= self._patience:
            self._failure = (
                f"policy {self.feed.model_id!r}: {self._stale_in_a_row} sequences in a row were more than "
                f"{self._serving.limit} versions old at version {version}; do the workers get new weights?"
            )
        return self._serving.units >= (1 if tail else self._serving.fresh_needed(version))

    def cut(self, version: int, now: float) -> None:
        """Take the batch for `version`, which must be `ready`."""
        content = self._serving.cut(version)
        self._figures.append((version, content.figures))
        batch = TrainBatch(
            batch_id=f"{self.feed.model_id}/{self.incarnation}/{version}",
            model_id=self.feed.model_id,
            version=version,
            samples=content.samples,
        )
        self._batches.add(version, Served(batch.batch_id, content.fresh_units, batch))
        self._record(Cut(batch, self.incarnation, content.fresh_units))
        self._stale_in_a_row = 0
        self._consumed += content.figures.fresh
        self._used.add(now, content.figures.fresh)

    # --- data --------------------------------------------------------------------------------------------------

    def wants_group(self, running: int) -> bool:
        """Should another group start for this policy, `running` being under way?"""
        if self.done or self._failure:
            return False
        # Batches behind a gap (one was forgotten) do not count: the trainer cannot reach them without new data.
        untrained = self._batches.fresh(range(self.version, self._next))
        # Early on there is nothing to replay yet, so that the next batch may need more than its share of the horizon.
        fresh = self._serving.fresh_needed(self._next)
        return has_room(
            running=running,
            average=self._yields.value,
            buffered=self._serving.units,
            cut=untrained,
            horizon=fresh if self._synchronous else max(self.feed.horizon, fresh),
        )

    def too_old(self, version: int) -> bool:
        """Would what was begun at this version be dropped by every batch to come?"""
        return self.done or self._next - version > self._serving.limit

    def take(
        self,
        group: PolicyGroup,
        whole: RolloutGroup,
        missing: Mapping[str, Sequence[str]],
        error: str,
        newest_version: int,
        now: float,
    ) -> None:
        """The `whole` group is complete. `missing` has the samples that are not in it, by reason (`error`: why one of
        them is); tokens of versions above `newest_version` count as that one."""
        all_ids = sequence_ids(whole, self.feed.model_id)
        if self.done:
            self._drop("finished", [*chain.from_iterable(missing.values()), *all_ids])
            return
        try:
            left, filtered = self._filters.apply(group)
        except AlgorithmFailed as failure:
            self._failure = f"policy {self.feed.model_id!r}: {failure}"
            left, filtered = group.keeping(()), {"failed": [sample.sample_id for sample in group.samples]}
        kept = left.samples
        usable = {sample.sample_id for sample in group.samples}
        dropped = {**missing, "masked": [name for name in all_ids if name not in usable], **filtered}
        for reason, sample_ids in dropped.items():
            self._drop(reason, sample_ids)
        self._keep(kept, whole, newest_version)
        self._produced += len(kept)
        self._kept.add(now, len(kept))
        self._yields.add(len(kept) if self.feed.batch_by == "samples" else min(1, len(kept)))
        if group.rewards:
            self._groups.add(now, (mean(group.rewards), mean(float(reward != 0) for reward in group.rewards)))
        if kept:
            self._drought = Drought()
        else:
            reasons = Counter({reason: len(sample_ids) for reason, sample_ids in dropped.items()})
            self._drought.add(group, reasons, error, self._n_samples)
            if self._drought.samples >= self._patience:
                self._failure = self._drought.message(self.feed.model_id)

    def _keep(self, samples: Sequence[TrainSample], whole: RolloutGroup, newest_version: int) -> None:
        """Into the buffer; what has no room goes."""
        added = [self._serving.add(sample, newest_version) for sample in samples]
        if added:
            self._record(Kept(self.feed.model_id, tuple(entry for entry, _ in added), whole.trajectories))
        self._drop("overflow", [entry.sample.sample_id for _, dropped in added for entry in dropped])

    def _drop(self, reason: str, sample_ids: Collection[str]) -> None:
        if sample_ids:
            self._dropped[reason] += len(sample_ids)
            self._record(Dropped(self.feed.model_id, tuple(sample_ids), reason))

    # --- figures -----------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why this policy's training cannot go on; empty while it can."""
        return self._failure

    def steps_taken(self, now: float) -> list[tuple[float, float]]:
        """(wait_s, step_s) of the trainer's steps in the window, and of the wait that goes on."""
        steps = self._steps.values(now)
        if self.asking(now, 0.0):
            steps.append((now - self._waiting_since, 0.0))
        return steps

    def produced_lately(self, now: float) -> int:
        """Fresh sequences that got into the buffer in the window."""
        return self._kept.total(now)

    def consumed_lately(self, now: float) -> int:
        """Fresh sequences that got into batches in the window."""
        return self._used.total(now)

    @property
    def stages(self) -> dict[str, Stage]:
        """This policy's data algorithms after rollout, by name."""
        filters = {f"filter/{name}": stage for name, stage in self._filters.stages.items()}
        return {**filters, **self._serving.stages}

    def data(self, version: int | None = None) -> dict[str, dict[str, float]]:
        """The figures of these stages and of the newest batch, or of the one that was cut for `version`."""
        serving = {name: stage.stats() for name, stage in self._serving.stages.items()}
        batch = next((cut for at, cut in reversed(self._figures) if version in (None, at)), BatchFigures())
        return {**self._filters.stats(), **serving, "batch": batch.stats()}

    def status(self, now: float, running: int, target: int, selectors: dict[str, dict[str, float]]) -> PolicyStatus:
        groups = self._groups.values(now)
        last = self._figures[-1][1] if self._figures else BatchFigures()
        return PolicyStatus(
            model_id=self.feed.model_id,
            version=self.version,
            steps=self.feed.steps,
            incarnation=self.incarnation,
            buffered=len(self._serving),
            running=running,
            reward_mean=mean(reward for reward, _ in groups),
            reward_nonzero=mean(share for _, share in groups),
            wait_fraction=wait_fraction(self.steps_taken(now)),
            staleness_mean=last.staleness_mean,
            staleness_max=last.staleness_max,
            staleness_min=last.staleness_min,
            version_span=last.version_span,
            produced=self._produced,
            consumed=self._consumed,
            dropped=dict(self._dropped),
            target_workers=target,
            metrics=self._metrics,
            data={name: figures for name, figures in {**selectors, **self.data()}.items() if figures},
            finished=self.ended or self.version >= self.feed.steps,
        )


def abandoned(incarnations: Mapping[str, int], policies: Mapping[str, PolicyStream]) -> dict[str, int]:
    """What tokens of weights of these incarnations count as at most, where a trainer has gone back since."""
    bounds = {name: policies[name].bound(number) for name, number in incarnations.items() if name in policies}
    return {name: bound for name, bound in bounds.items() if bound is not None}


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
