"""Where prompts come from, for training and for evaluation.

Invariant: a source gives the same prompts in the same order for the same seed, each once an epoch, and goes on
after `restore(state())` as if it had never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from .interface import Prompt, Sampling


class PromptSource(Protocol):
    """A stream of prompts to roll out."""

    def next(self) -> Prompt | None:
        """The next prompt; None when the source has ended, and then for ever."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the source stands, as plain values."""
        ...

    def restore(self, state: Mapping[str, Any], /) -> None:
        """Go on from `state`. Raises ValueError if it is another source's."""
        ...


class ListSource:
    """Prompts in memory, shuffled anew each epoch by `seed`; `epochs` None repeats for ever."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, epochs: int | None = None) -> None:
        """Raises ValueError if there are no prompts or two share an id."""
        self._prompts = tuple(prompts)
        if not self._prompts:
            raise ValueError("a prompt source needs at least one prompt")
        seen: set[str] = set()
        for prompt in self._prompts:
            if prompt.id in seen:
                raise ValueError(f"two prompts have the id {prompt.id!r}: ids must be unique within a source")
            seen.add(prompt.id)
        self._seed = seed
        self._epochs = epochs
        self._epoch = 0
        self._index = 0
        self._order = self._shuffled()

    def next(self) -> Prompt | None:
        if self._index == len(self._order):
            self._epoch += 1
            self._index = 0
            self._order = self._shuffled()
        if self._epochs is not None and self._epoch >= self._epochs:
            self._index = len(self._order)
            self._epoch = self._epochs - 1
            return None
        prompt = self._prompts[self._order[self._index]]
        self._index += 1
        return prompt

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "index": self._index, "size": len(self._prompts), "seed": self._seed}

    def restore(self, state: Mapping[str, Any], /) -> None:
        here = {"size": len(self._prompts), "seed": self._seed}
        there = {key: state[key] for key in here}
        if there != here:
            raise ValueError(f"the state is of another source: it has {there}, this one {here}")
        self._epoch = int(state["epoch"])
        self._index = int(state["index"])
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order


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


def reasoning_gym_items(dataset: str, params: Mapping[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """`size` items of a reasoning-gym data set: question, answer, metadata (needs the extra `[data]`).

    Item i is made from Random(seed + i): space the seeds of disjoint sets by at least `size`.
    """
    import reasoning_gym

    made = reasoning_gym.create_dataset(dataset, size=size, seed=seed, **params)
    return [made[index] for index in range(size)]
