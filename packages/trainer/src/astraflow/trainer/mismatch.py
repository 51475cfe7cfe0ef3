"""Whether engine and trainer agree on log-probabilities they computed with the same weights, and if not, likely why.

The tell-tale patterns: other weights or other token ids leave no correlation, a cut-off (top-p, top-k) raises every
log-probability, another temperature stretches them, other arithmetic is noise around zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BOUND = 0.2
"""A token whose log-probabilities differ by more is counted; bf16 kernels of different shapes stay far below."""

TOLERATED = 0.02
"""Share of tokens above `BOUND` that raises no warning."""

ENOUGH = 32
"""Fewer tokens say nothing about a cause."""


class Mismatch(NamedTuple):
    """|trainer - engine| over tokens of the current version; `share` above `BOUND`; `cause` "" where tolerated."""

    mean: float
    max: float
    share: float
    cause: str


def mismatch(trainer: NDArray[np.float32], engine: NDArray[np.float32]) -> Mismatch | None:
    """From log-probabilities [K] of the same tokens under the same weights; None without tokens."""
    if not len(trainer):
        return None
    difference = np.abs(trainer.astype(np.float64) - engine)
    share = float((difference > BOUND).mean())
    suspicious = share > TOLERATED and len(trainer) >= ENOUGH
    cause = likely_cause(trainer.astype(np.float64), engine.astype(np.float64)) if suspicious else ""
    return Mismatch(float(difference.mean()), float(difference.max()), share, cause)


def likely_cause(trainer: NDArray[np.float64], engine: NDArray[np.float64]) -> str:
    """One sentence for people."""
    spread = trainer.std() * engine.std()
    correlation = float(np.mean((trainer - trainer.mean()) * (engine - engine.mean())) / spread) if spread else 0.0
    if correlation < 0.7:
        return (
            "the engine's log-probabilities hardly correlate with the trainer's: it holds other weights than its "
            "version says, or the ids were tokenised again"
        )
    if float((engine - trainer > -0.01).mean()) > 0.995:
        return "the engine gives every token more: it renormalises after top-p, top-k or another cut-off"
    slope = float(np.polyfit(trainer, engine, 1)[0])
    if not 0.88 < slope < 1.1:
        return f"the engine's log-probabilities rise {slope:.2f} times as fast: another temperature than recorded"
    return "the two agree but for noise: other arithmetic (dtype, kernels, quantisation)"
