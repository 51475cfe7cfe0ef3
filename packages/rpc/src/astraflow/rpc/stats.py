"""Figures per method, counted where the frames pass."""

from __future__ import annotations

import msgspec


class MethodStats(msgspec.Struct):
    """Since the start: calls begun, those that ended in an error, payload bytes either way; `in_flight` is of now."""

    calls: int = 0
    failures: int = 0
    in_flight: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
