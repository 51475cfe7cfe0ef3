"""A task with an owner: it lives exactly as long as the `async with` around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio


@asynccontextmanager
async def background(main: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `main` beside the body, cancel it after the body and wait for its end.

    Unlike a task group it leaves the body's exception as it is, may be entered and left in different tasks, and keeps
    the body's deadlines out of `main`. If `main` fails the body is cancelled, and `main`'s exception raised in place of
    the cancellation.
    """
    task = asyncio.create_task(main())
    interruption = _Interruption(task)
    try:
        yield task
    except asyncio.CancelledError:
        if not interruption.take_back():
            raise
    finally:
        interruption.take_back()  # from a body that did not heed it
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
    if not task.cancelled():
        task.result()


class _Interruption:
    """Cancels the task in which it was made when another one fails."""

    def __init__(self, watched: asyncio.Task[None]) -> None:
        self._owner = asyncio.current_task()
        self._watched = watched
        self._requested = False
        watched.add_done_callback(self._ended)

    def _ended(self, watched: asyncio.Task[None]) -> None:
        if self._owner is not None and not watched.cancelled() and watched.exception() is not None:
            self._requested = self._owner.cancel()

    def take_back(self) -> bool:
        """Interrupt no more; whether there was an interruption of ours, and of nobody else."""
        self._watched.remove_done_callback(self._ended)
        requested, self._requested = self._requested, False
        return requested and self._owner is not None and self._owner.uncancel() == 0
