"""How many workers a policy's training wants, from who waited for whom (AstraFlow, arXiv:2605.15565)."""

from __future__ import annotations

import math
from collections.abc import Sequence

HIGH_WAIT = 0.10
LOW_WAIT = 0.05
MAX_WAIT = 0.95
HEADROOM = 1.10


def wait_fraction(steps: Sequence[tuple[float, float]]) -> float:
    """Waiting over whole step time, from (wait_s, step_s) of the steps in the window; at most 0.95, 0 of no steps."""
    waited = sum(wait for wait, _ in steps)
    total = waited + sum(step for _, step in steps)
    return min(MAX_WAIT, waited / total) if total > 0 else 0.0


def pool_target(size: float, wait: float, produced: int, consumed: int, minimum: int = 1) -> int:
    """The pool size wanted: `size` is its GPUs, or its workers where there are none.

    A trainer that waits more than a tenth of its time wants more; one that hardly waits can do with what it consumes
    plus a tenth. `produced` and `consumed` are fresh sequences over the window. With several policies the shared
    pool's target is the largest of those still training.
    """
    target = math.ceil(size)
    if wait > HIGH_WAIT:
        target = math.ceil(round(size / (1 - min(wait, MAX_WAIT)), 9))
    elif wait < LOW_WAIT and produced > 0 and consumed > 0:
        target = min(target, math.ceil(round(size * (consumed / produced) * HEADROOM, 9)))
    return max(minimum, target)
