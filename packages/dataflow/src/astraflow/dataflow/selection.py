"""Which prompts are rolled out: every trained policy's selectors on what the source gives.

Invariants: a prompt goes through if any policy that still trains wants it; a run of `FORCED_AFTER` refused prompts ends
with one that goes through anyway, so that selectors can slow a run but never stop it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import structlog

from .algorithms.catalogue import SELECTORS
from .algorithms.selector import Selector
from .algorithms.spec import labels
from .algorithms.stage import AlgorithmFailed, Stage, read_state
from .config import DataflowConfig
from .group import PolicyGroup
from .interface import Prompt

FORCED_AFTER = 256

log = structlog.get_logger(__name__)


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
        self._failure: AlgorithmFailed | None = None
        self._in_a_row = 0
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, Counter[str]] = {model_id: Counter() for model_id in self.chains}

    def admits(self, prompt: Prompt, policies: Collection[str]) -> bool:
        """Is the prompt rolled out, while these policies train?

        Raises:
            AlgorithmFailed: a selector raised, now or when it was told something before.
        """
        if self._failure is not None:
            raise self._failure
        self._counts["prompts"] += 1
        wanted = [self._wants(model_id, prompt) for model_id in policies]
        if not any(wanted):
            self._in_a_row += 1
            if self._in_a_row < FORCED_AFTER:
                self._counts["rejected"] += 1
                return False
            self._counts["forced"] += 1
        self._in_a_row = 0
        for model_id, chain in self.chains.items():
            for name, selector in chain.items():
                with _naming(model_id, name):
                    selector.chosen(prompt)
        return True

    def _wants(self, model_id: str, prompt: Prompt) -> bool:
        for name, selector in self.chains[model_id].items():
            with _naming(model_id, name):
                wanted = selector.admits(prompt)
            if not wanted:
                self._refused[model_id][name] += 1
                return False
        return True

    def outcome(self, model_id: str, group: PolicyGroup) -> None:
        """A policy's group came in; one without a reward says nothing about its prompt."""
        if group.rewards:
            self._tell(model_id, lambda selector: selector.outcome(group))

    def advance(self, model_id: str, version: int, epoch: int) -> None:
        """The policy has this version now; the source is in `epoch`."""
        self._tell(model_id, lambda selector: selector.advance(version, epoch))

    def _tell(self, model_id: str, what: Callable[[Selector], None]) -> None:
        """Whoever brings the news cannot help a selector that fails on it: the next draw says so."""
        try:
            for name, selector in self.chains[model_id].items():
                with _naming(model_id, name):
                    what(selector)
        except AlgorithmFailed as failure:
            self._failure = failure

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


@contextmanager
def _naming(model_id: str, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a user's selector may raise anything: the run says so, and the worker goes on
        log.error("selector_failed", policy=model_id, selector=name, exc_info=True)
        raise AlgorithmFailed(f"the selector {name} of policy {model_id!r} failed: {error!r}") from error
