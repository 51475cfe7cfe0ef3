"""How much may be under way: the rule that keeps a policy fed without making data that will be too stale to train.

A sequence that starts now is trained after everything before it: what is buffered, what running groups will give and
the batch that was cut but not yet trained. It is young enough iff fewer than (max_staleness + 1) batches precede it.
"""

from __future__ import annotations

SMOOTHING = 0.1


class YieldAverage:
    """Moving average of the sequences that a group gives one policy's buffer, filters included.

    It starts at one per sample, and a group never counts as less than one sequence: groups that are filtered away let
    more of them run, but not without bound.
    """

    def __init__(self, n_samples: int) -> None:
        self._average = float(n_samples)

    def add(self, sequences: int) -> None:
        self._average += SMOOTHING * (sequences - self._average)

    def state(self) -> float:
        return self._average

    def restore(self, average: float) -> None:
        self._average = average

    @property
    def value(self) -> float:
        return max(1.0, self._average)


def has_room(*, running: int, average: float, buffered: int, cut: int, horizon: int) -> bool:
    """May another group start for this policy?

    `running` groups give `average` sequences each; `buffered` and `cut` (served, its version not yet published) are
    sequences; `horizon` is (max_staleness + 1) * batch_size, or one batch in synchronous mode. After the rule of AReaL
    (arXiv:2505.24298, section 5.1), counted in sequences.
    """
    return running * average + buffered + cut < horizon
