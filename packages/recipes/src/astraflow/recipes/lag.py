"""How late the event loop is: a probe that sleeps 10 ms and records by how much it overslept."""

from __future__ import annotations

import time
from collections import deque

import anyio
import msgspec
import numpy as np

PERIOD_S = 0.01
WINDOW = 65536


class LoopLag(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds the loop was late, over the last `WINDOW` probes (max: over all)."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    probes: int


class LagProbe:
    """Run `run` as a task; read `summary` at any time."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=WINDOW)
        self._max = 0.0
        self._probes = 0

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + PERIOD_S
            await anyio.sleep(PERIOD_S)
            late = max(0.0, time.perf_counter() - due)
            self._late.append(late)
            self._max = max(self._max, late)
            self._probes += 1

    def summary(self) -> LoopLag:
        late = np.array(self._late or [0.0]) * 1e3
        p50, p99 = (float(x) for x in np.percentile(late, [50, 99]))
        return LoopLag(p50_ms=p50, p99_ms=p99, max_ms=self._max * 1e3, probes=self._probes)
