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
    the body's deadlines out of `main`. If `main` failed, its exception surfaces at the end of the body.
    """
    task = asyncio.create_task(main())
    try:
        yield task
    finally:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
    if not task.cancelled():
        task.result()
