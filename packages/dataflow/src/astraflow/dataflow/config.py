"""How a run's data flows: which policies are fed and how, what a task is, when a worker counts as lost.

A configuration that exists is a possible one: what cannot work is refused when it is made, naming the field.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .interface import Sampling

LIMIT_DEADLINES = 30
"""Deadlines a task may take in all where no limit is set: it ends a rollout that would go on for ever."""

Order = Literal["edf", "fifo", "lifo"]
"""What is served first: the sequence with the oldest version (earliest deadline), the first to arrive, the last."""


class PolicyFeed(msgspec.Struct, frozen=True, kw_only=True):
    """One trained policy.

    `batch_size` counts sequences. `max_staleness` is in versions: a sequence is dropped at serving when the version it
    would be trained at minus the oldest version of its trained tokens exceeds it. `steps` is the number of versions to
    make.
    """

    model_id: str
    batch_size: int
    max_staleness: int = 8
    steps: int = 100
    order: Order = "edf"

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, steps=self.steps)
        _at_least(0, max_staleness=self.max_staleness)
        if not self.model_id:
            raise ValueError("model_id is empty: every policy needs a name")

    @property
    def horizon(self) -> int:
        """Sequences that can be trained before the newest of them is too stale: (max_staleness + 1) batches."""
        return (self.max_staleness + 1) * self.batch_size


class DataflowConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole dataflow.

    A task runs `workflow` `n_samples` times; `sampling` names every policy the workflow asks, trained or not. A
    task of which no new token was heard for `task_deadline_s` seconds is leased again, at most `max_attempts` times
    in all; as long as tokens come it may be as long as it is, up to `task_limit_s` (None: `LIMIT_DEADLINES`
    deadlines). A worker not heard of for `worker_silence_s` seconds loses its leases; when no worker at all was
    heard of for `worker_grace_s` seconds, waiting trainers fail. `zero_advantage` drops groups whose rewards are
    all equal (dynamic sampling); after `max_dropped_batches` batches' worth of consecutive groups that gave a
    policy nothing, its trainer fails. `synchronous`: generate, train and sync in turn. Rates and means are taken
    over the last `window_s` seconds.
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
    zero_advantage: bool = True
    max_dropped_batches: int = 20
    synchronous: bool = False
    window_s: float = 120.0

    def __post_init__(self) -> None:
        _at_least(1, n_samples=self.n_samples, max_attempts=self.max_attempts)
        _at_least(1, max_dropped_batches=self.max_dropped_batches)
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
        if self.zero_advantage and self.n_samples < 2:
            raise ValueError("zero_advantage with n_samples 1 would drop everything: every group of one is constant")

    @property
    def limit_s(self) -> float:
        """How long a task may take in all, in seconds from its lease."""
        return self.task_limit_s if self.task_limit_s is not None else LIMIT_DEADLINES * self.task_deadline_s


def _at_least(least: int, **fields: int) -> None:
    for name, value in fields.items():
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}")
