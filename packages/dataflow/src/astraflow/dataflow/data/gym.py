"""Prompts of the reasoning-gym library: the one place that imports it.

That pulls in all of its task families and takes seconds: call these where a thread or a process can afford it, never
first on an event loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec

from ..algorithms.stage import Context
from ..interface import Message, Prompt
from ..sources import ListSource
from .stream import StreamSource
from .wrapped import WrappedSource

ENDLESS = 1 << 31


def gym_dataset(name: str, *, size: int, seed: int, **params: Any) -> Any:
    """The reasoning-gym data set `name`: `size` items (question, answer, metadata) of which item i depends on
    `seed` + i alone, so space the seeds of disjoint sets by at least `size`. Needs the extra `[data]`.

    Raises:
        ValueError: there is no such data set, or a parameter is wrong.
    """
    with warnings.catch_warnings():
        # One of its dependencies compares strings with `is`; the compiler says so on the first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning-gym data set {name!r}: {error}") from error


class GymSource(WrappedSource):
    """`gym`: problems of a reasoning-gym data set. `size` 0 makes new ones for ever; otherwise there are so many, and
    `epochs` 0 repeats them for ever. `seed` decides which, apart from the run's own seed, which decides their order:
    give held-out problems another, further away than `size`.

    A prompt's metadata holds what the library's scorer needs: `dataset`, and its `entry` as JSON.
    """

    def __init__(
        self,
        context: Context,
        dataset: str,
        size: int = 1000,
        seed: int = 0,
        params: dict[str, Any] | None = None,
        system: str = "",
        epochs: int = 0,
    ) -> None:
        self._dataset, self._system, self._name = dataset, system, context.source or dataset
        self._items = gym_dataset(dataset, size=size or ENDLESS, seed=seed, **(params or {}))
        if size:
            self._source = ListSource([self._prompt(index) for index in range(size)], context.seed, epochs or None)
        else:
            self._source = StreamSource(self._read)

    def _read(self, epoch: int) -> Iterator[Prompt]:
        return map(self._prompt, count())

    def _prompt(self, index: int) -> Prompt:
        item = self._items[index]
        system = (Message("system", self._system),) if self._system else ()
        return Prompt(
            id=str(index),
            source=self._name,
            messages=(*system, Message("user", str(item["question"]))),
            reference=str(item["answer"]),
            metadata={"dataset": self._dataset, "entry": msgspec.json.encode(item["metadata"], enc_hook=str).decode()},
        )
