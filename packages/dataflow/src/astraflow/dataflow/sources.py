"""Where prompts come from, for training and for evaluation.

Invariant: a source gives the same prompts in the same order for the same seed, each once an epoch, and goes on
after `restore(state())` as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from .algorithms.stage import Stage, read_state
from .interface import Prompt, Sampling


class SourceFailed(Exception):
    """No prompt can be had although the source has not ended; the message says why."""


@runtime_checkable
class PromptSource(Stage, Protocol):
    """A stream of prompts to roll out. Its calls return at once: what takes time is done before, or in a thread."""

    def next(self) -> Prompt | None:
        """The next prompt; None when the source has ended, and then for ever, or when it waits for more (`ended`
        tells which).

        Raises:
            SourceFailed: it cannot go on.
        """
        ...

    @property
    def ended(self) -> bool:
        """No prompt will come any more."""
        ...

    @property
    def epoch(self) -> int:
        """How often every prompt was given; 0 in the first epoch, and always for a source that has no end."""
        ...


class ListState(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    index: int
    size: int
    seed: int


class ListSource(PromptSource):
    """Prompts by number, shuffled anew each epoch by `seed`; `epochs` None repeats for ever."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, epochs: int | None = None) -> None:
        """Raises ValueError if there are no prompts or two share an id."""
        self._prompts = prompts
        if not self._prompts:
            raise ValueError("a prompt source needs at least one prompt")
        refuse_duplicates(self._prompts)
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._index = 0
        self._order = self._shuffled()

    def next(self) -> Prompt | None:
        if self.ended:
            return None
        if self._index == len(self._order):
            self._epoch += 1
            self._index = 0
            self._order = self._shuffled()
        prompt = self._prompts[int(self._order[self._index])]
        self._index += 1
        return prompt

    @property
    def ended(self) -> bool:
        return self._epochs is not None and self._epoch >= self._epochs - 1 and self._index == len(self._order)

    @property
    def epoch(self) -> int:
        return self._epoch

    def state(self) -> ListState:
        return ListState(epoch=self._epoch, index=self._index, size=len(self._prompts), seed=self._seed)

    def restore(self, state: Any, /) -> None:
        there = read_state(state, ListState)
        if (there.size, there.seed) != (len(self._prompts), self._seed):
            raise ValueError(
                f"the state is of another source: it has {there.size} prompts and seed {there.seed}, "
                f"this one {len(self._prompts)} and {self._seed}"
            )
        self._epoch, self._index = there.epoch, there.index
        self._order = self._shuffled()

    def stats(self) -> dict[str, float]:
        return {"epoch": float(self._epoch), "given": float(self._epoch * len(self._prompts) + self._index)}

    def _shuffled(self) -> NDArray[np.int64]:
        seed = (self._seed % (1 << 64), self._epoch)
        return np.random.default_rng(seed).permutation(len(self._prompts))


def refuse_duplicates(prompts: Iterable[Prompt]) -> None:
    """Raises ValueError if two prompts share an id."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"two prompts have the id {prompt.id!r}: ids must be unique within a source")
        seen.add(prompt.id)


class EvalSuite(msgspec.Struct, frozen=True, kw_only=True):
    """A named set of held-out prompts, each rolled out `n_samples` times by `workflow`.

    `sampling` names every policy the workflow asks; temperature 0 is greedy.
    """

    name: str
    prompts: tuple[Prompt, ...]
    workflow: str
    n_samples: int = 1
    sampling: dict[str, Sampling]

    def __post_init__(self) -> None:
        if not self.prompts or self.n_samples < 1:
            raise ValueError(f"suite {self.name!r}: {len(self.prompts)} prompts x {self.n_samples} samples is nothing")
