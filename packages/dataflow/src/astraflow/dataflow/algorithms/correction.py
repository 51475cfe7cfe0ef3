"""Staleness at serving: what is too old to train, and how what is old counts.

Staleness of a sequence is the version it is trained at minus the oldest version of its trained tokens.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from ..interface import TrainSample
from .stage import Stage


@runtime_checkable
class StalenessCorrection(Stage, Protocol):
    """A policy's rule for stale samples; `max_staleness` is the policy's bound, in versions."""

    def limit(self, max_staleness: int, /) -> int:
        """Staleness above which a sample is dropped: at least `max_staleness`."""
        ...

    def correct(self, sample: TrainSample, staleness: int, max_staleness: int, /) -> TrainSample:
        """The sample as it is served at this staleness, which is not above `limit`."""
        ...


class DropStale(StalenessCorrection):
    """Drops what exceeds the bound; the rest counts in full."""

    def limit(self, max_staleness: int, /) -> int:
        return max_staleness

    def correct(self, sample: TrainSample, staleness: int, max_staleness: int, /) -> TrainSample:
        return sample


class KeepStale(StalenessCorrection):
    """Keeps samples up to `beyond` versions over the bound, each version over it multiplying their weight by `decay`.
    Their importance ratio may move within [low, high] only, which the trainer lays over its own range."""

    def __init__(self, beyond: int = 8, decay: float = 0.8, low: float = 0.8, high: float = 1.2) -> None:
        if beyond < 0 or not 0 < decay <= 1:
            raise ValueError(f"beyond is {beyond}, decay {decay}: wanted at least 0, and above 0 up to 1")
        if not 0 <= low <= 1 <= high:
            raise ValueError(f"low is {low}, high {high}: the range of the importance ratio must contain 1")
        self._beyond, self._decay, self._low, self._high = beyond, decay, low, high

    def limit(self, max_staleness: int, /) -> int:
        return max_staleness + self._beyond

    def correct(self, sample: TrainSample, staleness: int, max_staleness: int, /) -> TrainSample:
        over = staleness - max_staleness
        if over <= 0:
            return sample
        weight = sample.weight * self._decay**over
        return msgspec.structs.replace(sample, weight=weight, ratio_range=(self._low, self._high))
