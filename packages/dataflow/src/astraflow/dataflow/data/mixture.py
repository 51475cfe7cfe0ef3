"""Several prompt sources as one.

Invariant: a source that has ended is left out and the others go on in their shares; the mixture ends when all have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..algorithms.stage import Context, Dice, read_state
from ..interface import Prompt
from ..sources import PromptSource

MixBy = Literal["weight", "ratio"]


class MixtureState(msgspec.Struct, frozen=True, kw_only=True):
    sources: dict[str, Any]
    given: dict[str, int]
    credit: dict[str, float]
    drawn: int


class MixtureSource(PromptSource):
    """Prompts of `sources` in proportion to `weights` (1 where none is given).

    By "weight" each prompt is drawn from a source at random with that probability; by "ratio" the sources take turns,
    so that after n prompts each has given its share of n to within one.
    """

    def __init__(
        self, context: Context, sources: Mapping[str, PromptSource], weights: Mapping[str, float], by: MixBy = "weight"
    ) -> None:
        """Raises ValueError for a weight that is not positive or is for no source."""
        if not sources:
            raise ValueError("a mixture needs at least one source")
        unknown = [name for name in weights if name not in sources]
        if unknown:
            raise ValueError(f"weights name {unknown}; the sources are {list(sources)}")
        self._weights = {name: float(weights.get(name, 1.0)) for name in sources}
        wrong = {name: weight for name, weight in self._weights.items() if not weight > 0}
        if wrong:
            raise ValueError(f"weights {wrong} are not positive")
        self._sources = dict(sources)
        self._by = by
        self._given = dict.fromkeys(sources, 0)
        self._credit = dict.fromkeys(sources, 0.0)
        self._dice = Dice(context.seed)

    def next(self) -> Prompt | None:
        left = {name: self._weights[name] for name, source in self._sources.items() if not source.ended}
        # A source that waits for more itself gives way to the others.
        while left:
            name = self._draw(left) if self._by == "weight" else self._most_behind(left)
            prompt = self._sources[name].next()
            if prompt is not None:
                self._give(name, left)
                return prompt
            del left[name]
        return None

    def _draw(self, left: Mapping[str, float]) -> str:
        at = self._dice.roll() * sum(left.values())
        for name, weight in left.items():
            at -= weight
            if at < 0:
                return name
        return name

    def _most_behind(self, left: Mapping[str, float]) -> str:
        total = sum(left.values())
        # Rounded, so that equal credits are equal and the first in the configuration goes first.
        return max(left, key=lambda name: round(self._credit[name] + left[name] / total, 9))

    def _give(self, name: str, left: Mapping[str, float]) -> None:
        """Smooth weighted round robin: all earn their share, the one that gave pays for it."""
        total = sum(left.values())
        for other, weight in left.items():
            self._credit[other] += weight / total
        self._credit[name] -= 1.0
        self._given[name] += 1

    @property
    def ended(self) -> bool:
        return all(source.ended for source in self._sources.values())

    @property
    def epoch(self) -> int:
        return min(source.epoch for source in self._sources.values())

    def state(self) -> MixtureState:
        return MixtureState(
            sources={name: source.state() for name, source in self._sources.items()},
            given=dict(self._given),
            credit=dict(self._credit),
            drawn=self._dice.drawn,
        )

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, MixtureState)
        if kept.sources.keys() != self._sources.keys():
            raise ValueError(f"the state is of a mixture of {list(kept.sources)}, this one is of {list(self._sources)}")
        for name, source in self._sources.items():
            source.restore(kept.sources[name])
        self._given, self._credit, self._dice.drawn = dict(kept.given), dict(kept.credit), kept.drawn

    def stats(self) -> dict[str, float]:
        return {"epoch": float(self.epoch), **{f"given_{name}": float(n) for name, n in self._given.items()}}
