"""Rejection of truncated samples: an answer that ran into its budget says nothing about where it was going."""

from __future__ import annotations

from ..group import PolicyGroup, trajectory_of
from .filter import Filter


class DropTruncated(Filter):
    """Drops the trajectories of which a sequence ended by its token budget; statistics are over the rest."""

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        cut = {trajectory_of(s) for s in group.samples if s.sequence.finish_reason == "length"}
        return group.keeping(s for s in group.samples if trajectory_of(s) not in cut) if cut else group
