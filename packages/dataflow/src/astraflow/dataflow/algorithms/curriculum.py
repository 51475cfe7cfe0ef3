"""Curriculum by recent success: prefer prompts that the policy gets right about as often as it should."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..group import PolicyGroup
from ..interface import Prompt
from ..window import mean
from .selector import ByProbability, prompt_key
from .stage import Context, Dice, read_state
from .table import PromptTable


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    rates: dict[str, float]
    drawn: int


class Curriculum(ByProbability):
    """Submits a prompt with probability max(floor, exp(-((rate - target) / width)^2 / 2)), where `rate` is its mean
    reward over recent results, each new one weighing 1 - `decay`. A prompt that was never tried is submitted.

    Groups of about the target rate carry most gradient: the variance of a reward of 0 or 1 is largest at 0.5.
    """

    def __init__(
        self, context: Context, target: float = 0.5, width: float = 0.25, floor: float = 0.05, decay: float = 0.5
    ) -> None:
        if width <= 0:
            raise ValueError(f"width is {width}: it must be positive")
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: it must be at least 0 and below 1")
        self._target, self._width, self._floor, self._decay = target, width, floor, decay
        self._rates: PromptTable[float] = PromptTable()
        self._dice = Dice(context.seed)

    def probability(self, prompt: Prompt) -> float:
        rate = self._rates.get(prompt_key(prompt))
        if rate is None:
            return 1.0
        return max(self._floor, math.exp(-(((rate - self._target) / self._width) ** 2) / 2))

    def outcome(self, group: PolicyGroup, /) -> None:
        key = prompt_key(group.prompt)
        before = self._rates.get(key)
        rate = group.mean if before is None else self._decay * before + (1 - self._decay) * group.mean
        self._rates.set(key, rate)

    def state(self) -> CurriculumState:
        return CurriculumState(rates=self._rates.copy(), drawn=self._dice.drawn)

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, CurriculumState)
        self._rates, self._dice.drawn = PromptTable(kept.rates), kept.drawn

    def stats(self) -> dict[str, float]:
        rates = list(self._rates.values())
        near = sum(abs(rate - self._target) <= self._width for rate in rates)
        return {"known": float(len(rates)), "rate_mean": mean(rates), "near_target": float(near)}
