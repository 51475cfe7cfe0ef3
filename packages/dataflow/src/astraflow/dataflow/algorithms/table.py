"""A number of things known per prompt, bounded: a stream of prompts has no end.

Invariant: at most `limit` prompts are known; the one not set for longest is forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

V = TypeVar("V")

LIMIT = 1 << 17


class PromptTable(Generic[V]):
    """Prompt key -> what is known."""

    def __init__(self, known: Mapping[str, V] | None = None, limit: int = LIMIT) -> None:
        self._known = dict(known or {})
        self._limit = limit

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> V | None:
        return self._known.get(key)

    def set(self, key: str, value: V) -> None:
        self._known.pop(key, None)
        self._known[key] = value
        if len(self._known) > self._limit:
            del self._known[next(iter(self._known))]

    def forget(self, key: str) -> None:
        self._known.pop(key, None)

    def values(self) -> Iterator[V]:
        return iter(self._known.values())

    def copy(self) -> dict[str, V]:
        return dict(self._known)
