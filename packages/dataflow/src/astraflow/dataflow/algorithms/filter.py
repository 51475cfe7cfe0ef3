"""After rollout: what of a policy's group is worth training, and for what reward.

Filters run in the order of the configuration, each on what the one before left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ..group import PolicyGroup
from .stage import Stage


@runtime_checkable
class Filter(Stage, Protocol):
    """Looks at one (task, policy) group at a time; what it takes out is counted under its name."""

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        """The group to go on with: itself, fewer samples, or other rewards (by `group.keeping`).

        It has at least one sample; one without samples drops it.
        """
        ...


class FunctionFilter(Filter):
    """A function from a group to whether it is kept, or to what is kept of it."""

    def __init__(self, function: Callable[[PolicyGroup], PolicyGroup | bool]) -> None:
        self._function = function

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        kept = self._function(group)
        if isinstance(kept, PolicyGroup):
            return kept
        return group if kept else group.keeping(())


class KeepAll(Filter):
    """Everything."""

    def apply(self, group: PolicyGroup, /) -> PolicyGroup:
        return group
