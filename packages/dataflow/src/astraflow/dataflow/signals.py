"""Waking those who wait, without polling.

Invariant: a waiter that looked at the state before `wait` and missed a change is never left asleep, because on one
event loop nothing runs between its look and its wait.
"""

from __future__ import annotations

import anyio


class Signal:
    """A broadcast: `notify` wakes everyone who waits now; each looks again and waits on if need be."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def notify(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, seconds: float) -> None:
        """Return at the next `notify`, or after `seconds`."""
        if self._event is None:
            self._event = anyio.Event()
        event = self._event
        with anyio.move_on_after(max(0.0, seconds)):
            await event.wait()
