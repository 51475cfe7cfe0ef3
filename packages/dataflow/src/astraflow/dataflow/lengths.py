"""How long answers are, and how long those were that ran out of time: whether time limits choose the short ones.

Invariant: every sample that came back counts once, in the range its sampled tokens fall into.
"""

from __future__ import annotations

from bisect import bisect_right

from .figures import LengthCount

BOUNDS = (0, 1, 64, 256, 1024, 4096, 16384, 65536)
"""First length of each range, in sampled tokens."""


class Lengths:
    """Samples by length."""

    def __init__(self) -> None:
        self._ended = [0] * len(BOUNDS)
        self._timed_out = [0] * len(BOUNDS)

    def add(self, tokens: int, *, timed_out: bool) -> None:
        counts = self._timed_out if timed_out else self._ended
        counts[bisect_right(BOUNDS, max(0, tokens)) - 1] += 1

    def report(self) -> tuple[LengthCount, ...]:
        """The ranges that have samples, the shortest first."""
        rows = zip(BOUNDS, self._ended, self._timed_out, strict=True)
        return tuple(LengthCount(least=least, ended=n, timed_out=out) for least, n, out in rows if n or out)
