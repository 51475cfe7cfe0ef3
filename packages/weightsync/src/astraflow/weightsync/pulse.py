"""What several tasks of one event loop wait for, again and again."""

from __future__ import annotations

import anyio


class Pulse:
    """Wakes all who wait for it at this moment. Look before you wait: a beat is not remembered."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()
