"""Which prompts are rolled out: every trained policy's selectors on what the source gives.

Invariants: a prompt goes through if any policy that still trains wants it; a run of `FORCED_AFTER` refused prompts ends
with one that goes through anyway, so that selectors can slow a run but never stop it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import msgspec

from .algorithms.catalogue import SELECTORS
from .algorithms.selector import Selector
from .algorithms.spec import labels
from .algorithms.stage import Stage, read_state
from .config import DataflowConfig
from .group import PolicyGroup
from .interface import Prompt

FORCED_AFTER = 256


class SelectionState(msgspec.Struct, frozen=True, kw_only=True):
    in_a_row: int
    counts: dict[str, int]


class Selection(Stage):
    """The selectors that a configuration names, once for each policy."""

    def __init__(self, config: DataflowConfig) -> None:
        named = list(zip(labels(config.selectors), config.selectors, strict=True))
        self.chains: dict[str, dict[str, Selector]] = {}
        for feed in config.policies:
            context = config.context(feed.model_id)
            chain = {name: SELECTORS.build(line, context.within("selector", name)) for name, line in named}
            self.chains[feed.model_id] = chain
        self._in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, Counter[str]] = {model_id: Counter() for model_id in self.chains}

    def admits(self, prompt: Prompt, policies: Collection[str]) -> bool:
        """Is the prompt rolled out, while these policies train?"""
        self._counts["prompts"] += 1
        wanted = [self._wants(model_id, prompt) for model_id in policies]
        if not any(wanted):
            self._in_a_row += 1
            if self._in_a_row < FORCED_AFTER:
                self._counts["rejected"] += 1
                return False
            self._counts["forced"] += 1
        self._in_a_row = 0
        for chain in self.chains.values():
            for selector in chain.values():
                selector.chosen(prompt)
        return True

    def _wants(self, model_id: str, prompt: Prompt) -> bool:
        for name, selector in self.chains[model_id].items():
            if not selector.admits(prompt):
                self._refused[model_id][name] += 1
                return False
        return True

    def outcome(self, model_id: str, group: PolicyGroup) -> None:
        """A policy's group came in; one without a reward says nothing about its prompt."""
        if group.rewards:
            for selector in self.chains[model_id].values():
                selector.outcome(group)

    def advance(self, model_id: str, version: int, epoch: int) -> None:
        """The policy has this version now; the source is in `epoch`."""
        for selector in self.chains[model_id].values():
            selector.advance(version, epoch)

    def state(self) -> SelectionState:
        return SelectionState(in_a_row=self._in_a_row, counts=dict(self._counts))

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, SelectionState)
        self._in_a_row, self._counts = kept.in_a_row, Counter(kept.counts)

    def stats(self) -> dict[str, float]:
        """Prompts the source gave, and of these rejected, and forced through."""
        return {name: float(self._counts[name]) for name in ("prompts", "rejected", "forced")}

    def stats_of(self, model_id: str) -> dict[str, dict[str, float]]:
        """By selector of one policy: prompts it refused, and its own figures."""
        return {
            name: {"refused": float(self._refused[model_id][name]), **selector.stats()}
            for name, selector in self.chains[model_id].items()
        }
