"""Calling a service that may be away for a while."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import structlog

from astraflow.rpc import Unavailable

T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

log = structlog.get_logger(__name__)


async def persist(name: str, call: Callable[[], Awaitable[T]], *, timeout_s: float, patience_s: float) -> T:
    """Call until it answers, each try ending within `timeout_s`; only for calls that may be repeated.

    The patience counts from the first failure, so a process that stood still (a debugger, a suspended machine) tries
    again before it gives up.

    Raises:
        Unavailable, TimeoutError: the last try's, when the service was away for `patience_s` seconds.
    """
    failed_at: float | None = None
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            with anyio.fail_after(timeout_s):
                answer = await call()
        except (Unavailable, TimeoutError) as error:
            now = anyio.current_time()
            if failed_at is None:
                failed_at = now
                log.warning("dataflow_unavailable", call=name, error=f"{type(error).__name__}: {error}")
            elif now - failed_at >= patience_s:
                error.add_note(f"{name}: no answer for {now - failed_at:.1f} s (patience {patience_s:g} s); giving up")
                raise
        else:
            if failed_at is not None:
                log.info("dataflow_back", call=name, away_s=round(anyio.current_time() - failed_at, 1))
            return answer
        await anyio.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
