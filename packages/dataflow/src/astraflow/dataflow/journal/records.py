"""What happens in a dataflow, as its journal takes it down: one structure a fact, in the order of their coming.

Invariant: records say only what rows cannot be derived from; the small states of policies, sources and algorithms are
snapshots that the journal takes by itself whenever it writes. A record holds references, encoding is the writer's work.
"""

from __future__ import annotations

import msgspec

from ..algorithms.entry import Entry
from ..interface import (
    EvaluateRequest,
    Evaluation,
    PolicyVersion,
    Registration,
    RolloutTask,
    StepReport,
    TrainBatch,
    Trajectory,
)

TRAINED = "trained"
"""The outcome of a sequence that was served in a batch; any other outcome is the reason it was dropped for."""


class Opened(msgspec.Struct, frozen=True):
    """A task exists from now on; `evaluation` is its label, empty for training."""

    task: RolloutTask
    evaluation: str = ""


class Leased(msgspec.Struct, frozen=True):
    """A worker was given the task."""

    task_id: str
    worker_id: str
    attempt: int


class Bounded(msgspec.Struct, frozen=True):
    """Tokens of this open task count, per policy, as at most these versions."""

    task_id: str
    newest_version: dict[str, int]


class Settled(msgspec.Struct, frozen=True):
    """A sample's outcome: its trajectory, or None and why."""

    task_id: str
    sample_index: int
    trajectory: Trajectory | None
    error: str = ""


class Closed(msgspec.Struct, frozen=True):
    """A task is complete or was given up."""

    task_id: str


class Kept(msgspec.Struct, frozen=True):
    """Sequences went into a policy's buffer; `trajectories` are their group's."""

    model_id: str
    entries: tuple[Entry, ...]
    trajectories: tuple[Trajectory | None, ...]


class Dropped(msgspec.Struct, frozen=True):
    """These sequences of a policy (sample ids) end here; a sample that failed has the position -1."""

    model_id: str
    sample_ids: tuple[str, ...]
    reason: str


class Cut(msgspec.Struct, frozen=True):
    """A batch exists from now on; `fresh` of its units are trained for the first time."""

    batch: TrainBatch
    incarnation: int
    fresh: int


class Forgotten(msgspec.Struct, frozen=True):
    """A policy's batches below `version` will not be served again."""

    model_id: str
    version: int


class Attached(msgspec.Struct, frozen=True):
    """A trainer took a policy over: what is buffered counts as sampled by `version` at most."""

    model_id: str
    version: int


class Published(msgspec.Struct, frozen=True):
    """A policy's weights are out."""

    version: PolicyVersion


class Stepped(msgspec.Struct, frozen=True):
    """A trainer told of a step."""

    report: StepReport


class EvaluationBegun(msgspec.Struct, frozen=True):
    """An evaluation exists from now on, at exactly these `versions` of the policies."""

    request: EvaluateRequest
    versions: dict[str, int]


class EvaluationEnded(msgspec.Struct, frozen=True):
    """An evaluation's final figures."""

    evaluation: Evaluation


class Registered(msgspec.Struct, frozen=True):
    """A worker introduced itself."""

    registration: Registration


class Touched(msgspec.Struct, frozen=True):
    """Nothing but small states changed."""


class StateSet(msgspec.Struct, frozen=True):
    """A snapshot of one small state, encoded."""

    key: str
    value: bytes


Record = (
    Opened
    | Leased
    | Bounded
    | Settled
    | Closed
    | Kept
    | Dropped
    | Cut
    | Forgotten
    | Attached
    | Published
    | Stepped
    | EvaluationBegun
    | EvaluationEnded
    | Registered
    | Touched
    | StateSet
)

MUST_SURVIVE_POWER = (Cut, Attached)
"""What a trainer may act on irrevocably: written through to the disk before it is told."""
