"""Cool-down: a prompt that was just rolled out rests for some versions of the policy."""

from __future__ import annotations

from typing import Any

import msgspec

from ..interface import Prompt
from .selector import Selector, prompt_key
from .stage import read_state
from .table import PromptTable


class CoolDownState(msgspec.Struct, frozen=True, kw_only=True):
    last: dict[str, int]
    version: int


class CoolDown(Selector):
    """Submits a prompt when the policy is at least `versions` versions beyond the one at which it was last rolled
    out. After a rollback it rests until the trainer has come that far again."""

    def __init__(self, versions: int = 4) -> None:
        if versions < 1:
            raise ValueError(f"versions is {versions}: it must be at least 1")
        self._versions = versions
        self._version = 0
        self._last: PromptTable[int] = PromptTable()

    def admits(self, prompt: Prompt, /) -> bool:
        last = self._last.get(prompt_key(prompt))
        return last is None or self._version - last >= self._versions

    def chosen(self, prompt: Prompt, /) -> None:
        self._last.set(prompt_key(prompt), self._version)

    def advance(self, version: int, epoch: int, /) -> None:
        self._version = version

    def state(self) -> CoolDownState:
        return CoolDownState(last=self._last.copy(), version=self._version)

    def restore(self, state: Any, /) -> None:
        kept = read_state(state, CoolDownState)
        self._last, self._version = PromptTable(kept.last), kept.version

    def stats(self) -> dict[str, float]:
        return {"known": float(len(self._last))}
