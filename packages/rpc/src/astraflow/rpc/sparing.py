"""Log lines that strangers can cause, so that they cannot fill a disk with them."""

from __future__ import annotations

from time import monotonic
from typing import Any

import structlog

BURST = 20
EVERY = 1.0
"""Seconds in which one more line of a kind may be written, when there have been BURST."""


class SparingLog:
    """Of each kind of event a few lines at once, and then one a second; how many were left out the next one says."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("astraflow.rpc")
        self._spent: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warning(self, event: str, **fields: Any) -> None:
        """`event` is one of a few fixed texts, `fields` whatever the stranger made of them."""
        now = monotonic()
        spent = max(self._spent.get(event, 0.0), now - BURST * EVERY)  # when all lines so far are paid for
        if spent + EVERY > now:
            self._left_out[event] = self._left_out.get(event, 0) + 1
            return
        self._spent[event] = spent + EVERY
        if left_out := self._left_out.pop(event, 0):
            fields["left_out"] = left_out
        self._log.warning(event, **fields)
