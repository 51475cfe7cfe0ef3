"""A policy's chain of filters: what of a group is trained, and why the rest is not.

Invariant: every sequence that goes in comes out or is counted once, under the name of the filter that took it out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import structlog

from .algorithms.catalogue import FILTERS
from .algorithms.filter import Filter
from .algorithms.spec import labels
from .algorithms.stage import AlgorithmFailed, Context
from .group import PolicyGroup

log = structlog.get_logger(__name__)


class FilterChain:
    """The filters that the `lines` of a configuration name, for the policy that `context` names."""

    def __init__(self, lines: Sequence[str], context: Context) -> None:
        self.stages: dict[str, Filter] = {
            name: FILTERS.build(line, context.within("filter", name))
            for name, line in zip(labels(lines), lines, strict=True)
        }
        self._seen: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def apply(self, group: PolicyGroup) -> tuple[PolicyGroup, dict[str, list[str]]]:
        """What is left of the group, and which sequences were dropped by which filter.

        Raises:
            AlgorithmFailed: a filter raised, or gave a reward that is not finite.
        """
        dropped: dict[str, list[str]] = {}
        for name, stage in self.stages.items():
            before = [sample.sample_id for sample in group.samples]
            if not before:
                break
            self._seen[name] += len(before)
            group = _applied(name, stage, group)
            left = {sample.sample_id for sample in group.samples}
            gone = [sample_id for sample_id in before if sample_id not in left]
            if gone:
                dropped[name] = gone
                self._dropped[name] += len(gone)
        return group, dropped

    def stats(self) -> dict[str, dict[str, float]]:
        """By filter: sequences seen and dropped, and its own figures."""
        return {
            name: {"seen": float(self._seen[name]), "dropped": float(self._dropped[name]), **stage.stats()}
            for name, stage in self.stages.items()
        }


def _applied(name: str, stage: Filter, group: PolicyGroup) -> PolicyGroup:
    try:
        left = stage.apply(group)
    except Exception as error:  # a user's filter may raise anything: the run says so, and the worker goes on
        log.error("filter_failed", filter=name, group=group.samples[0].group_id, exc_info=True)
        raise AlgorithmFailed(f"the filter {name} failed on group {group.samples[0].group_id}: {error!r}") from error
    if not all(map(math.isfinite, left.rewards)):
        raise AlgorithmFailed(f"the filter {name} gave group {group.samples[0].group_id} rewards {left.rewards}")
    return left
