"""Curriculum by stages: harder prompts when the easier ones are mastered."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from ..group import PolicyGroup
from ..interface import Prompt, Scalar
from ..window import mean
from .selector import Selector
from .stage import read_state


class StagesState(msgspec.Struct, frozen=True, kw_only=True):
    stage: int
    recent: list[float]


class Stages(Selector):
    """Submits prompts whose metadata `field` is one of the `levels` up to the current stage.

    The stage rises by one when the last `window` groups of its own level have a mean reward of at least `threshold`;
    it never falls. Prompts of a level that is not named are refused.
    """

    def __init__(self, levels: list[Scalar], field: str = "level", threshold: float = 0.7, window: int = 64) -> None:
        if not levels or len(set(levels)) != len(levels):
            raise ValueError(f"levels are {levels}: name each level once, the easiest first")
        if window < 1:
            raise ValueError(f"window is {window}: it must be at least 1")
        self._levels: Sequence[Scalar] = tuple(levels)
        self._field, self._threshold = field, threshold
        self._stage = 0
        self._recent: deque[float] = deque(maxlen=window)

    def admits(self, prompt: Prompt, /) -> bool:
        return prompt.metadata.get(self._field) in self._levels[: self._stage + 1]

    def outcome(self, group: PolicyGroup, /) -> None:
        if group.prompt.metadata.get(self._field) != self._levels[self._stage]:
            return
        self._recent.append(group.mean)
        full = len(self._recent) == self._recent.maxlen
        if full and self._rate >= self._threshold and self._stage + 1 < len(self._levels):
            self._stage += 1
            self._recent.clear()

    @property
    def _rate(self) -> float:
        return mean(self._recent)

    def state(self) -> StagesState:
        return StagesState(stage=self._stage, recent=list(self._recent))

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, StagesState)
        if kept.stage >= len(self._levels):
            raise ValueError(f"the state is at stage {kept.stage}, there are {len(self._levels)}")
        self._stage = kept.stage
        self._recent.clear()
        self._recent.extend(kept.recent)

    def stats(self) -> dict[str, float]:
        return {"stage": float(self._stage), "rate": self._rate}
