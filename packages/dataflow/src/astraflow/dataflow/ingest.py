"""From what workers submit to what trainers can use: validation, and statistics of a (task, policy) group.

Invariants: nothing malformed gets past here; a sample without a usable reward is masked, never scored 0; a
trajectory counts once in its group's statistics, however many sequences it was split into.
"""

from __future__ import annotations

import math
import statistics

import msgspec

from .interface import RolloutGroup, SampleResult, Sequence, TrainSample, Trajectory


class PolicyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's part of a rollout group. `rewards` has one entry per scored trajectory; `masked` counts sequences
    that cannot be trained (no reward, or no sampled token). `constant`: the rewards are all equal."""

    samples: tuple[TrainSample, ...]
    rewards: tuple[float, ...]
    masked: int

    @property
    def constant(self) -> bool:
        return not self.rewards or min(self.rewards) == max(self.rewards)


def malformed(result: SampleResult) -> str | None:
    """Why this result cannot be taken, or None. It names the task and sample."""
    where = f"task {result.task_id} sample {result.sample_index} from {result.worker_id}"
    for name, value in result.trajectory.metrics.items():
        if not math.isfinite(value):
            return f"{where}: metric {name!r} is {value}"
    for index, sequence in enumerate(result.trajectory.sequences):
        try:
            sequence.check()
        except ValueError as error:
            return f"{where}, sequence {index} of {sequence.model_id!r}: {error}"
    return None


def policy_group(group: RolloutGroup, model_id: str) -> PolicyGroup:
    """One policy's sequences of a group with its reward statistics over trajectories.

    A trajectory's reward is the mean of its sequences' rewards; mean and unbiased standard deviation are taken over
    the trajectories that have one, the deviation being 0 for a group of one.
    """
    rewards: list[float] = []
    usable: list[tuple[str, Sequence]] = []
    masked = 0
    for index, trajectory in enumerate(group.trajectories):
        if trajectory is None:
            continue
        scored = [part for part in _parts(trajectory, model_id) if part[1].reward is not None]
        masked += sum(sequence.model_id == model_id for sequence in trajectory.sequences) - len(scored)
        if scored:
            rewards.append(statistics.fmean(part[1].reward or 0.0 for part in scored))
        usable.extend((f"{group.task.task_id}/{index}.{position}", sequence) for position, sequence in scored)
    mean = statistics.fmean(rewards) if rewards else 0.0
    spread = statistics.stdev(rewards) if len(rewards) > 1 and min(rewards) != max(rewards) else 0.0
    samples = tuple(
        TrainSample(
            sequence=sequence,
            sample_id=sample_id,
            group_id=group.task.task_id,
            group_mean=mean,
            group_std=spread,
            group_size=len(rewards),
        )
        for sample_id, sequence in usable
    )
    return PolicyGroup(samples=samples, rewards=tuple(rewards), masked=masked)


def _parts(trajectory: Trajectory, model_id: str) -> list[tuple[int, Sequence]]:
    """The sequences of a policy that have something to train, with their position in the trajectory."""
    return [
        (position, sequence)
        for position, sequence in enumerate(trajectory.sequences)
        if sequence.model_id == model_id and bool(sequence.loss_mask.numpy().any())
    ]
