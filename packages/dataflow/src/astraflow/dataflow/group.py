"""One policy's part of a rollout group, and the statistics that go with its samples.

Invariants: a trajectory counts once in its group's statistics, however many sequences it was split into; whoever
takes samples out of a group or changes their rewards does it by `keeping`, so that the statistics are always those of
the samples that are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from .interface import Prompt, TrainSample


class PolicyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """`rewards` has one entry per scored trajectory; `masked` counts sequences that cannot be trained (no reward, or
    no sampled token). A reward is that of `sample.sequence`."""

    prompt: Prompt
    samples: tuple[TrainSample, ...] = ()
    rewards: tuple[float, ...] = ()
    masked: int = 0

    @property
    def constant(self) -> bool:
        """The rewards are all equal, or there are none."""
        return not self.rewards or min(self.rewards) == max(self.rewards)

    @property
    def mean(self) -> float:
        """The mean reward over trajectories, 0 if none is scored."""
        return math.fsum(self.rewards) / len(self.rewards) if self.rewards else 0.0

    def keeping(self, samples: Iterable[TrainSample]) -> PolicyGroup:
        """The group with these samples alone and their statistics: a trajectory's reward is the mean of its sequences'
        rewards; mean and unbiased standard deviation are over trajectories, the deviation being 0 for a group of one
        and exactly 0 for equal rewards."""
        kept = tuple(samples)
        by_trajectory: dict[str, list[float]] = {}
        for sample in kept:
            by_trajectory.setdefault(trajectory_of(sample), []).append(reward_of(sample))
        rewards = tuple(math.fsum(parts) / len(parts) for parts in by_trajectory.values())
        mean, spread = mean_and_deviation(rewards)
        replace = msgspec.structs.replace
        changed = tuple(replace(s, group_mean=mean, group_std=spread, group_size=len(rewards)) for s in kept)
        return replace(self, samples=changed, rewards=rewards)


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the unbiased standard deviation; 0 of none, and the deviation exactly 0 of equal values."""
    mean = math.fsum(values) / len(values) if values else 0.0
    if len(values) < 2 or min(values) == max(values):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def trajectory_of(sample: TrainSample) -> str:
    """What the sequences of one trajectory share: the sample's id without the sequence's position in it."""
    return sample.sample_id.rpartition(".")[0]


def reward_of(sample: TrainSample) -> float:
    """Raises ValueError for a sample that was not scored: it must not have got into a group."""
    if sample.sequence.reward is None:
        raise ValueError(f"sample {sample.sample_id} has no reward")
    return sample.sequence.reward


def advantage_of(sample: TrainSample) -> float:
    """(reward - mean) / (std + 1e-5) within the group, 0 for a group of one (GRPO, arXiv:2402.03300)."""
    if sample.group_size < 2:
        return 0.0
    return (reward_of(sample) - sample.group_mean) / (sample.group_std + 1e-5)
