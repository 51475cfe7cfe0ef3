"""Which consumed samples are trained again: the choice within what replay allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np

from ..group import advantage_of
from .entry import Entry
from .stage import Context, Dice, Stage, read_state


@runtime_checkable
class Pick(Stage, Protocol):
    """Chooses among the units (a sample, or a group's samples) that may be trained again."""

    def pick(self, units: Sequence[Sequence[Entry]], count: int, /) -> list[int]:
        """The positions of `count` different units of `units`, which has at least so many, in order of arrival."""
        ...


class Latest(Pick):
    """The newest versions; among equals the last to arrive."""

    def pick(self, units: Sequence[Sequence[Entry]], count: int, /) -> list[int]:
        def age(index: int) -> tuple[int, int]:
            return min(entry.oldest for entry in units[index]), units[index][0].arrival

        return sorted(range(len(units)), key=age, reverse=True)[:count]


class DrawnState(msgspec.Struct, frozen=True, kw_only=True):
    drawn: int


class Random(Pick):
    """All alike, without replacement."""

    def __init__(self, context: Context) -> None:
        self._dice = Dice(context.seed)

    def pick(self, units: Sequence[Sequence[Entry]], count: int, /) -> list[int]:
        left = list(range(len(units)))
        chosen = []
        for _ in range(count):
            at = int(self._dice.roll() * len(left))
            left[at], left[-1] = left[-1], left[at]
            chosen.append(left.pop())
        return chosen

    def state(self) -> DrawnState:
        return DrawnState(drawn=self._dice.drawn)

    def restore(self, state: Any, /) -> None:
        self._dice.drawn = read_state(state, DrawnState).drawn


class Prioritised(Pick):
    """With probability proportional to |advantage|^`alpha`, a unit's mean, without replacement (prioritised replay,
    arXiv:1511.05952, with the advantage as priority; drawn by Efraimidis and Spirakis's exponential keys)."""

    def __init__(self, context: Context, alpha: float = 1.0) -> None:
        if alpha < 0:
            raise ValueError(f"alpha is {alpha}: it must be at least 0")
        self._alpha = alpha
        self._seed = context.seed
        self._drawn = 0

    def pick(self, units: Sequence[Sequence[Entry]], count: int, /) -> list[int]:
        sizes = [sum(abs(advantage_of(entry.sample)) for entry in unit) / len(unit) for unit in units]
        weights = np.power(np.asarray(sizes, np.float64), self._alpha)
        draws = np.random.default_rng((self._seed, self._drawn)).exponential(size=len(units))
        self._drawn += 1
        # Without an advantage there is nothing to learn: such a unit comes after all others.
        keys = np.divide(draws, weights, out=np.full(len(units), np.inf), where=weights > 0)
        return [int(index) for index in np.argsort(keys, kind="stable")[:count]]

    def state(self) -> DrawnState:
        return DrawnState(drawn=self._drawn)

    def restore(self, state: Any, /) -> None:
        self._drawn = read_state(state, DrawnState).drawn
