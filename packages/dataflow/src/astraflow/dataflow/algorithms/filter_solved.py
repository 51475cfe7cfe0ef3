"""Filter-solved: stop rolling out prompts that the policy has learned."""

from __future__ import annotations

from typing import Any

import msgspec

from ..group import PolicyGroup
from ..interface import Prompt
from .selector import Selector, prompt_key
from .stage import read_state
from .table import PromptTable


class SolvedState(msgspec.Struct, frozen=True, kw_only=True):
    means: dict[str, float]


class FilterSolved(Selector):
    """Submits a prompt while its exponentially weighted mean reward is below `threshold`.

    The mean starts at 0 and keeps `decay` of itself at each result.
    """

    def __init__(self, decay: float = 0.9, threshold: float = 0.95) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: it must be at least 0 and below 1")
        self._decay, self._threshold = decay, threshold
        self._means: PromptTable[float] = PromptTable()

    def admits(self, prompt: Prompt, /) -> bool:
        return (self._means.get(prompt_key(prompt)) or 0.0) < self._threshold

    def outcome(self, group: PolicyGroup, /) -> None:
        key = prompt_key(group.prompt)
        before = self._means.get(key) or 0.0
        self._means.set(key, self._decay * before + (1 - self._decay) * group.mean)

    def state(self) -> SolvedState:
        return SolvedState(means=self._means.copy())

    def restore(self, state: Any, /) -> None:
        self._means = PromptTable(read_state(state, SolvedState).means)

    def stats(self) -> dict[str, float]:
        solved = sum(mean >= self._threshold for mean in self._means.values())
        return {"known": float(len(self._means)), "solved": float(solved)}
