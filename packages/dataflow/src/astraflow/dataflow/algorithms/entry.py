"""A sequence that waits to be served, or to be served again."""

from __future__ import annotations

import msgspec

from ..interface import TrainSample


class Entry(msgspec.Struct, gc=False, frozen=True):
    """A sequence with the version that counts for its staleness (see `PolicyBuffer.rebase`) and its arrival."""

    oldest: int
    arrival: int
    sample: TrainSample
