"""How a run's data flows: which policies are fed and how, what a task is, when a worker counts as lost.

A configuration that exists is a possible one: what cannot work is refused when it is made, naming the field.
"""

from __future__ import annotations

import msgspec

from .algorithms.batching import BatchBy
from .algorithms.catalogue import CORRECTIONS, FILTERS, ORDERS, PICKS, SELECTORS
from .algorithms.stage import Context
from .failures import FailurePolicy
from .interface import Sampling

LIMIT_DEADLINES = 30
"""Deadlines a task may take in all where no limit is set: it ends a rollout that would go on for ever."""


def _at_least(least: int, **fields: int) -> None:
    for name, value in fields.items():
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Consumed samples trained again, as far as there are so many; none that is too stale for the policy either."""

    ratio: float = 0.0
    """Share of a batch of N that is replayed: int(N * ratio) of it (0: no replay)."""
    capacity: int = 10_000
    """Consumed sequences kept, the newest."""
    pick: str = "random"
    """Which of them are trained again: latest, random, prioritised (by |advantage|), or your own."""
    max_uses: int = 0
    """Batches a sample may be in, the first included (0: no cap)."""
    max_staleness: int = 8
    """Versions a replayed token may be older than the weights it trains."""

    def __post_init__(self) -> None:
        _at_least(1, capacity=self.capacity)
        _at_least(0, max_uses=self.max_uses, max_staleness=self.max_staleness)
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}: it must be at least 0 and below 1")
        PICKS.build(self.pick, Context())


class PolicyFeed(msgspec.Struct, frozen=True, kw_only=True):
    """One trained policy.

    `batch_size` counts sequences, or groups with `batch_by` "groups". `max_staleness` is in versions: what exceeds it
    at serving, the version it would be trained at minus the oldest version of its trained tokens, is treated as the
    line `staleness` says (drop, keep). `order` is the line for what is served first (edf, fifo, lifo), `replay` what is
    served again. `filters` are run on this policy's groups instead of the run's own. `steps` is the number of versions
    to make.
    """

    model_id: str
    batch_size: int
    max_staleness: int = 8
    steps: int = 100
    order: str = "edf"
    batch_by: BatchBy = "samples"
    staleness: str = "drop"
    replay: Replay = Replay()
    filters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, steps=self.steps)
        _at_least(0, max_staleness=self.max_staleness)
        if not self.model_id:
            raise ValueError("model_id is empty: every policy needs a name")
        ORDERS.build(self.order, Context())
        CORRECTIONS.build(self.staleness, Context())

    @property
    def replayed(self) -> int:
        """Most units of a batch that are replayed: int(N * ratio)."""
        return int(self.batch_size * self.replay.ratio)

    @property
    def horizon(self) -> int:
        """Units that can be trained before the newest of them is too stale: the fresh part of (max_staleness + 1)
        batches."""
        return (self.max_staleness + 1) * (self.batch_size - self.replayed)


class DataflowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole dataflow.

    A task runs `workflow` `n_samples` times; `sampling` names every policy the workflow asks, trained or not. A task of
    which no new token was heard for `task_deadline_s` seconds is leased again, at most `max_attempts` times in all;
    as long as tokens come it may be as long as it is, up to `task_limit_s` (None: `LIMIT_DEADLINES` deadlines). A
    worker not heard of for `worker_silence_s` seconds loses its leases; when no worker at all was heard of for
    `worker_grace_s` seconds, waiting trainers fail. `selectors` and `filters` are the data algorithms before and
    after rollout, in the order in which they run (docs/data_algorithms.md); after `max_dropped_batches` batches'
    worth of consecutive groups that gave a policy nothing, its trainer fails. All suites are evaluated every
    `evaluate_every` versions (0: not while training), by at most `evaluation_share` of the workers at a time.
    `synchronous`: generate, train and sync in turn. Rates and means are taken over the last `window_s` seconds.
    Batches since the oldest of a trainer's last `keep_checkpoints` checkpoints can be served again.
    """

    policies: tuple[PolicyFeed, ...]
    workflow: str
    n_samples: int
    sampling: dict[str, Sampling]
    seed: int = 0
    task_deadline_s: float = 120.0
    task_limit_s: float | None = None
    worker_silence_s: float = 15.0
    worker_grace_s: float = 300.0
    max_attempts: int = 3
    selectors: tuple[str, ...] = ()
    filters: tuple[str, ...] = ("zero_advantage",)
    failures: FailurePolicy = FailurePolicy()
    evaluate_every: int = 0
    evaluation_share: float = 0.5
    max_dropped_batches: int = 20
    synchronous: bool = False
    window_s: float = 120.0
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _at_least(1, n_samples=self.n_samples, max_attempts=self.max_attempts)
        _at_least(1, max_dropped_batches=self.max_dropped_batches, keep_checkpoints=self.keep_checkpoints)
        for name in ("task_deadline_s", "worker_silence_s", "window_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive, in seconds")
        if self.limit_s < self.task_deadline_s:
            raise ValueError(f"task_limit_s {self.limit_s} is shorter than task_deadline_s {self.task_deadline_s}")
        if self.worker_grace_s < self.worker_silence_s:
            raise ValueError(
                f"worker_grace_s {self.worker_grace_s} is shorter than worker_silence_s {self.worker_silence_s}: "
                "the run would fail before a silent worker's tasks are given to others"
            )
        if self.failures.min_samples > self.n_samples:
            raise ValueError(
                f"failures.min_samples {self.failures.min_samples} is more than n_samples {self.n_samples}"
            )
        names = [feed.model_id for feed in self.policies]
        if not names:
            raise ValueError("policies is empty: name at least one policy to train")
        if len(set(names)) != len(names):
            raise ValueError(f"policies: {names} names one policy twice")
        for name in names:
            if name not in self.sampling:
                raise ValueError(f"sampling has no entry for the policy {name!r}; it has {sorted(self.sampling)}")
            if self.sampling[name].temperature <= 0:
                raise ValueError(f"sampling of {name!r}: temperature 0 is greedy: for evaluation only")
        for feed in self.policies:
            context = self.context(feed.model_id)
            for line in self.selectors:
                SELECTORS.build(line, context)
            for line in self.filters_of(feed):
                FILTERS.build(line, context)

    @property
    def stalled_s(self) -> float:
        """Seconds without any progress after which whoever waits gets an error: time for every attempt of a task."""
        return max(self.worker_grace_s, self.max_attempts * self.task_deadline_s)

    @property
    def limit_s(self) -> float:
        """How long a task may take in all, in seconds from its lease."""
        return self.task_limit_s if self.task_limit_s is not None else LIMIT_DEADLINES * self.task_deadline_s

    def context(self, model_id: str) -> Context:
        """What the data algorithms of a policy are told of their place."""
        return Context(seed=self.seed, model_id=model_id, n_samples=self.n_samples)

    def filters_of(self, feed: PolicyFeed) -> tuple[str, ...]:
        """The filters that a policy's groups go through."""
        return self.filters if feed.filters is None else feed.filters
