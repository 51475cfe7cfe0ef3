"""A trace id travels with every call: the caller's if it has set one, else a new one.

In a handler `trace_id` holds it, so that the calls it makes in turn carry it on. The variable is one of structlog's
(`merge_contextvars` finds them by their prefix), so that every log line has it, for the price of setting one variable.
"""

from __future__ import annotations

import itertools
import secrets
from contextvars import ContextVar

from structlog.contextvars import STRUCTLOG_KEY_PREFIX

MAX_TRACE_ID = 128

trace_id: ContextVar[str] = ContextVar(f"{STRUCTLOG_KEY_PREFIX}trace_id", default="")
"""Set it around calls that belong together: `trace_id.set("…")`."""

# Unique by this process's random part; drawing a random number for each call would cost more than the rest of it.
_process = f"{secrets.token_hex(6)}-"
_number = itertools.count(1)


def outgoing_trace() -> str:
    """What to send with a call."""
    current = trace_id.get()
    if current and isinstance(current, str):  # structlog's clear_contextvars() leaves Ellipsis
        return current
    return _process + str(next(_number))


def enter_trace(received: str) -> None:
    """In a call's own context: be part of the caller's trace. A peer that sends none gets one of ours."""
    trace_id.set(received[:MAX_TRACE_ID] or _process + str(next(_number)))
