"""One piece of work that goes on beside the training loop: the next batch's fetch, a publication, a checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio
import anyio.abc

T = TypeVar("T")


class Ahead(Generic[T]):
    """At most one at a time, in a task of `tasks`. What it raises is raised where its result is taken.

    So the loop ends what it does before it hears of an error, and no other piece of work is cancelled by it.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._done: anyio.Event | None = None
        self._result: list[T] = []
        self._failure: Exception | None = None

    def begin(self, work: Callable[[], Awaitable[T]]) -> None:
        """Start; what was begun before must have been taken."""
        assert self._done is None
        self._done = anyio.Event()
        self._tasks.start_soon(self._run, work, self._done)

    async def take(self) -> T | None:
        """Wait for what was begun and return its result; None if nothing was."""
        if self._done is None:
            return None
        await self._done.wait()
        self._done = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._result.pop()

    async def _run(self, work: Callable[[], Awaitable[T]], done: anyio.Event) -> None:
        try:
            self._result.append(await work())
        except Exception as error:
            self._failure = error
        done.set()
