"""The figures that reports are made of: a metric with its interval, a policy now, a worker now."""

from __future__ import annotations

import msgspec


class MetricSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of a trajectory metric over `n` samples with its 95 % interval (Wilson for values in {0, 1}, else
    normal)."""

    mean: float
    low: float
    high: float
    n: int


class LengthCount(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of at least `least` sampled tokens (and fewer than the next row's): how many came to an end, however it
    was, and how many ran out of time."""

    least: int
    ended: int
    timed_out: int


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One policy now. Rewards are means over groups ingested in the window; staleness is of the last batch, in
    versions, by each sequence's oldest trained token (`staleness_min`: the newest trained token of all; `version_span`:
    the most versions that one sequence spans); `wait_fraction` is waiting over step time in the window; `dropped`
    counts by reason (a filter's name, or stale, overflow, failed, masked, finished); `data` are the figures of this
    policy's data algorithms by stage. `reward_nonzero` is the share of trajectories with a
    reward other than 0. `target_workers` is the balance report's wish. `finished`: every version was made, or the data
    ended before."""

    model_id: str
    version: int
    steps: int
    incarnation: int = 0
    buffered: int = 0
    running: int = 0
    reward_mean: float = 0.0
    reward_nonzero: float = 0.0
    wait_fraction: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness_min: int = 0
    version_span: int = 0
    produced: int = 0
    consumed: int = 0
    dropped: dict[str, int] = {}
    target_workers: int = 1
    metrics: dict[str, float] = {}
    data: dict[str, dict[str, float]] = {}
    finished: bool = False


class PolicyBalance(msgspec.Struct, frozen=True, kw_only=True):
    """Over the window: the share of its time that the policy's trainer waited for data, fresh sequences `produced` for
    it and `consumed` by it, replay aside."""

    model_id: str
    wait_fraction: float
    produced: int
    consumed: int
    training: bool


class PoolBalance(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's live workers: `size` and `target` are its GPUs, or its workers where it has none (`unit`). `target` is
    the largest of what the policies that still train want (`wanted_by`). `capacity` and `running` are samples."""

    pool: str
    unit: str
    size: float
    workers: int
    capacity: int
    running: int
    wanted_by: dict[str, int]
    target: int


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker now. `quarantine` says why it gets no tasks, where it does not."""

    worker_id: str
    pool: str
    capacity: int
    alive: bool
    running: int
    tokens_per_s: float
    versions: dict[str, int]
    silent_s: float
    pulled_full_bytes: int = 0
    pulled_delta_bytes: int = 0
    swap_pause_s: float = 0.0
    quarantine: str = ""
