"""Bounds: groups by their mean reward, samples by their length."""

from __future__ import annotations

import math

from ..group import PolicyGroup
from ..interface import TrainSample
from .filter import Filter


class RewardBounds(Filter):
    """Keeps a group whose mean reward is in [low, high]: neither hopeless nor mastered."""

    def __init__(self, low: float = -math.inf, high: float = math.inf) -> None:
        if low > high:
            raise ValueError(f"low {low} is above high {high}: nothing would be kept")
        self._low, self._high = low, high

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        return group if self._low <= group.mean <= self._high else group.keeping(())


class LengthBounds(Filter):
    """Keeps sequences of which `least` to `most` tokens are trained; statistics are over the rest."""

    def __init__(self, least: int = 1, most: int = 1 << 30) -> None:
        if least > most:
            raise ValueError(f"least {least} is above most {most}: nothing would be kept")
        self._least, self._most = least, most

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        kept = [sample for sample in group.samples if self._least <= trained_tokens(sample) <= self._most]
        return group if len(kept) == len(group.samples) else group.keeping(kept)


def trained_tokens(sample: TrainSample) -> int:
    """The number of tokens that the policy sampled and that are trained."""
    return int(sample.sequence.loss_mask.numpy().sum())
