"""A call in flight on the server: what ends it, and for a stream how far its client has read."""

from __future__ import annotations

import asyncio
from time import monotonic

import anyio

from . import frames
from .describe import Method


class Window:
    """How much of a stream the client has not yet consumed."""

    def __init__(self) -> None:
        self.outstanding = 0
        self._credited = asyncio.Event()

    def credit(self, amount: int) -> None:
        self.outstanding -= amount
        self._credited.set()

    async def wait(self) -> None:
        while self.outstanding >= frames.STREAM_WINDOW:
            self._credited.clear()
            await self._credited.wait()


class Running:
    """A call in flight. Its `scope` ends the handler, however deep in a wait, and keeps at it until it has ended."""

    __slots__ = ("arrived", "cancelled", "ended", "id", "method", "scope", "task", "trace", "window")

    def __init__(self, call: frames.Call, method: Method, deadline: float) -> None:
        self.id = call.id
        self.trace = call.trace
        self.method = method
        self.arrived = monotonic()
        self.scope = anyio.CancelScope(deadline=deadline)
        self.cancelled = False
        self.ended = False
        self.window = Window() if method.stream else None
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """The client wants it no more."""
        if not self.ended:
            self.cancelled = True
            self.scope.cancel()
