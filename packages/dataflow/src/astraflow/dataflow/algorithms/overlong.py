"""Soft over-long punishment (DAPO, arXiv:2503.14476, eq. 13): answers that near their budget lose reward."""

from __future__ import annotations

from typing import Any

import msgspec

from ..group import PolicyGroup
from ..interface import TrainSample
from .bounds import trained_tokens
from .filter import Filter
from .stage import read_state


class OverlongState(msgspec.Struct, frozen=True, kw_only=True):
    seen: int
    punished: int


class OverlongPenalty(Filter):
    """Adds a penalty to a sequence's reward by its number of trained tokens: 0 up to `longest` - `cushion`, then
    falling linearly to -`penalty` at `longest` and beyond. Later filters and the trainer see the shaped reward."""

    def __init__(self, longest: int, cushion: int, penalty: float = 1.0) -> None:
        if not 0 < cushion <= longest:
            raise ValueError(f"cushion is {cushion}: it must be positive and at most longest ({longest})")
        self._longest, self._cushion, self._penalty = longest, cushion, penalty
        self._seen = 0
        self._punished = 0

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        penalties = [self.penalty(trained_tokens(sample)) for sample in group.samples]
        self._seen += len(penalties)
        self._punished += sum(penalty < 0 for penalty in penalties)
        if not any(penalties):
            return group
        return group.keeping(_shaped(s, penalty) for s, penalty in zip(group.samples, penalties, strict=True))

    def penalty(self, tokens: int) -> float:
        """What is added to the reward of an answer of this length."""
        over = tokens - (self._longest - self._cushion)
        return -self._penalty * min(max(over / self._cushion, 0.0), 1.0)

    def state(self) -> OverlongState:
        return OverlongState(seen=self._seen, punished=self._punished)

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, OverlongState)
        self._seen, self._punished = kept.seen, kept.punished

    def stats(self) -> dict[str, float]:
        return {"punished": self._punished / self._seen if self._seen else 0.0}


def _shaped(sample: TrainSample, penalty: float) -> TrainSample:
    reward = (sample.sequence.reward or 0.0) + penalty
    return msgspec.structs.replace(sample, sequence=msgspec.structs.replace(sample.sequence, reward=reward))
