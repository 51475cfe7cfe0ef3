"""Workers that wait for work, one behind the other.

Invariants: news of work wakes the first in line, and whoever could take some wakes the next, so that work is handed
out in one pass and a thousand waiting workers cost no more than those that get something; a waiter that leaves, by
whatever way, takes no news with it; while anybody waits, one of them looks when something is due.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import anyio


class Line:
    """First come, first served. Used on one event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, anyio.Event] = OrderedDict()
        self._tickets = 0
        self._round = 0
        self._keeper: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def notify(self) -> None:
        """There may be work: each of those who wait now may look once."""
        self._round = len(self._waiting)
        self.pass_on()

    def notify_all(self) -> None:
        """Something changed for everybody."""
        self._round = 0
        for event in self._waiting.values():
            event.set()
        self._waiting.clear()

    def pass_on(self) -> None:
        """There may be more work: the next in line may look, if it has not in this round."""
        if self._round > 0 and self._waiting:
            self._round -= 1
            self._waiting.popitem(last=False)[1].set()

    async def wait(self, seconds: float, due_s: float) -> None:
        """Return when it is this waiter's turn to look, or after `seconds`; the one that keeps the time for all of
        them returns after `due_s`."""
        self._tickets += 1
        ticket, event = self._tickets, anyio.Event()
        self._waiting[ticket] = event
        if self._keeper is None:
            self._keeper = ticket
        limit = min(seconds, due_s) if self._keeper == ticket else seconds
        try:
            with anyio.move_on_after(max(0.0, limit) if limit < math.inf else None):
                await event.wait()
        except BaseException:
            if self._waiting.pop(ticket, None) is None:
                self.pass_on()
            raise
        finally:
            self._waiting.pop(ticket, None)
            if self._keeper == ticket:
                self._keeper = None
                self._appoint()

    def _appoint(self) -> None:
        """Another waiter is to keep the time: it looks, and then waits with the clock in view."""
        if self._waiting:
            self._waiting.popitem(last=False)[1].set()
