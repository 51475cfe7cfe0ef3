"""How far a stream may run ahead of its reader."""

from __future__ import annotations

import asyncio

from . import frames


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
