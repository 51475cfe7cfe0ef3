"""Before rollout: which prompts are worth generating for.

A selector belongs to one policy; a prompt is rolled out if the selectors of any policy that still trains want it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from ..group import PolicyGroup
from ..interface import Prompt
from .stage import Dice, Stage


@runtime_checkable
class Selector(Stage, Protocol):
    """Decides on a prompt that the source has given, by what became of it before."""

    def admits(self, prompt: Prompt, /) -> bool:
        """Is this prompt worth a rollout for this policy now?"""
        ...

    def chosen(self, prompt: Prompt, /) -> None:
        """The prompt is being rolled out (for whichever policy wanted it)."""
        return

    def outcome(self, group: PolicyGroup, /) -> None:
        """A prompt's result, as it was scored: before any filter, with at least one reward."""
        return

    def advance(self, version: int, epoch: int, /) -> None:
        """The policy has a new version (a smaller one after a rollback); the source is in `epoch`, 0 the first."""
        return


class FunctionSelector(Selector):
    """A function from a prompt to whether it is wanted."""

    def __init__(self, function: Callable[[Prompt], bool]) -> None:
        self._function = function

    def admits(self, prompt: Prompt, /) -> bool:
        return self._function(prompt)


class AcceptAll(Selector):
    """Every prompt."""

    def admits(self, prompt: Prompt, /) -> bool:
        return True


class ByProbability(Selector, Protocol):
    """One that submits a prompt with a probability; `_dice` is the subclass's to make, and its state to keep."""

    _dice: Dice

    def probability(self, prompt: Prompt) -> float:
        """With which the prompt is submitted now."""
        ...

    def admits(self, prompt: Prompt, /) -> bool:
        probability = self.probability(prompt)
        return probability >= 1 or self._dice.roll() < probability


def prompt_key(prompt: Prompt) -> str:
    """What identifies a prompt among all sources."""
    return f"{prompt.source}\n{prompt.id}"
