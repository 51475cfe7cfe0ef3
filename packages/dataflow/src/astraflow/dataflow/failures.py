"""What becomes of samples that fail, of the workers that they fail on, and of a run in which nearly all of them do.

Invariants: a failed sample is run again, left out or takes its group with it, as the policy says, and is never waited
for; a worker is set aside only while another one does better, so that what fails everywhere is not blamed on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

MIN_RESULTS = 16
"""Results a worker must have brought before it is judged."""

BETTER = 0.5
"""Another worker does better if it fails at most this share as often."""


class FailurePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of failed samples and of those they fail on."""

    retries: int = 0
    """How often a failed sample is run again; one that ran out of time only if it had not begun (else the short answers
    would be chosen)."""
    min_samples: int = 1
    """Samples that a group needs to be used without the failed ones; with fewer it is dropped."""
    quarantine_share: float = 0.75
    """A worker of whose last samples this share failed, while others do better, gets no tasks for a while."""
    quarantine_results: int = 32
    """How many samples of a worker are looked at."""
    quarantine_s: float = 60.0
    """Seconds for which it gets none; twice as long the next time."""
    max_error_share: float = 0.98
    """The run fails when this share of the last samples of all workers failed."""
    error_results: int = 512
    """How many samples of all workers are looked at."""

    def __post_init__(self) -> None:
        if self.retries < 0 or self.min_samples < 1:
            raise ValueError(f"retries {self.retries} must be at least 0, min_samples {self.min_samples} at least 1")
        if self.quarantine_results < MIN_RESULTS or self.error_results < MIN_RESULTS:
            raise ValueError(f"quarantine_results and error_results must be at least {MIN_RESULTS}")
        for name in ("quarantine_share", "max_error_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0 and at most 1")


class Outcomes:
    """The last results of somebody: how many failed, and the first error among them."""

    def __init__(self, limit: int) -> None:
        self._errors: deque[str | None] = deque(maxlen=limit)
        self._failed = 0

    def __len__(self) -> int:
        return len(self._errors)

    def add(self, error: str | None) -> None:
        """`error` None: it went well."""
        if len(self._errors) == self._errors.maxlen and self._errors[0] is not None:
            self._failed -= 1
        self._errors.append(error)
        self._failed += error is not None

    def clear(self) -> None:
        self._errors.clear()
        self._failed = 0

    @property
    def full(self) -> bool:
        return len(self._errors) == self._errors.maxlen

    @property
    def share(self) -> float:
        """The share that failed; 0 of nothing."""
        return self._failed / len(self._errors) if self._errors else 0.0

    @property
    def first_error(self) -> str:
        return next((error for error in self._errors if error is not None), "")

    def __str__(self) -> str:
        text = f"{self._failed} of the last {len(self._errors)} samples failed"
        return f"{text}; first error: {self.first_error}" if self._failed else text


class Record:
    """One worker's results and whether it is set aside for them."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.outcomes = Outcomes(policy.quarantine_results)
        self.until = float("-inf")
        self.reason = ""
        self._policy = policy
        self._seconds = policy.quarantine_s

    def judge(self, others: Iterable[Outcomes], now: float) -> bool:
        """Set the worker aside if it fails often and one of the others, live and not set aside, does better or is not
        known yet. Returns whether that happened now."""
        share = self.outcomes.share
        if len(self.outcomes) < MIN_RESULTS or share < self._policy.quarantine_share or now < self.until:
            return False
        if not any(len(other) < MIN_RESULTS or other.share <= BETTER * share for other in others):
            return False
        self.until = now + self._seconds
        self.reason = f"{self.outcomes}; no tasks for {self._seconds:g} s"
        self._seconds *= 2
        self.outcomes.clear()
        return True

    def set_aside(self, now: float) -> bool:
        return now < self.until
