"""Notices that nothing goes on while somebody waits: first said, then an error.

Invariant: whoever waits hears within `fail_s` seconds of the last progress that there is none. Time is an argument.
"""

from __future__ import annotations

WARN_SHARE = 1 / 6
"""Share of the time until the error after which it is said."""


class Watchdog:
    """`fail_s` seconds without progress are an error."""

    def __init__(self, fail_s: float, now: float) -> None:
        self._fail_s = fail_s
        self._since = now
        self._said = False

    def progress(self, now: float) -> None:
        """A sample came in, tokens were sampled, a batch was cut, weights were published."""
        self._since = now
        self._said = False

    def idle_s(self, now: float) -> float:
        """Seconds without progress."""
        return now - self._since

    def slow(self, now: float) -> bool:
        return self.idle_s(now) > WARN_SHARE * self._fail_s

    def failed(self, now: float) -> bool:
        return self.idle_s(now) > self._fail_s

    def look(self, now: float, *, waited_for: bool) -> bool:
        """Is it time to say that nothing goes on? Once for each time it does not; without anybody waiting the clock
        does not run."""
        if not waited_for:
            self.progress(now)
        first = self.slow(now) and not self._said
        self._said = self._said or first
        return first
