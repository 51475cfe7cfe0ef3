"""A prompt source that another one does the work for."""

from __future__ import annotations

from typing import Any

from ..interface import Prompt
from ..sources import PromptSource


class WrappedSource(PromptSource):
    """Gives what `_source` gives, which a subclass makes."""

    _source: PromptSource

    def next(self) -> Prompt | None:
        return self._source.next()

    @property
    def ended(self) -> bool:
        return self._source.ended

    @property
    def epoch(self) -> int:
        return self._source.epoch

    def state(self) -> Any:
        return self._source.state()

    def restore(self, state: Any, /) -> None:
        self._source.restore(state)

    def stats(self) -> dict[str, float]:
        return self._source.stats()
