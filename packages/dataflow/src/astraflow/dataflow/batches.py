"""A policy's batches that may be served again.

Invariant: the contents of at most `IN_MEMORY` of them are held where a journal has them all; without a journal the
newest `UNCOMMITTED` are all there are, and older ones are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .interface import TrainBatch

IN_MEMORY = 8
UNCOMMITTED = 64


class Served(msgspec.Struct, frozen=True):
    """A batch by its name; `fresh` counts the units in it that were trained for the first time. `batch` is None if
    its content is in the journal only."""

    batch_id: str
    fresh: int
    batch: TrainBatch | None = None


class Batches:
    """By the version they are trained at. `journaled`: their contents can be had from a journal."""

    def __init__(self, journaled: bool) -> None:
        self._journaled = journaled
        self._served: dict[int, Served] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._served

    def get(self, version: int) -> Served | None:
        return self._served.get(version)

    def add(self, version: int, served: Served) -> None:
        self._served[version] = served
        held = [at for at, old in self._served.items() if old.batch is not None and at != version]
        for at in sorted(held)[: len(held) + 1 - (IN_MEMORY if self._journaled else UNCOMMITTED)]:
            if self._journaled:
                self._served[at] = Served(self._served[at].batch_id, self._served[at].fresh)
            else:
                del self._served[at]

    def restore(self, served: Iterable[tuple[int, Served]]) -> None:
        self._served = dict(served)

    def forget(self, floor: int) -> bool:
        """Those below `floor` will not be served again. Was there any?"""
        below = [version for version in self._served if version < floor]
        for version in below:
            del self._served[version]
        return bool(below)

    def next(self, version: int) -> int:
        """The first version from `version` on of which there is none."""
        while version in self._served:
            version += 1
        return version

    def fresh(self, versions: Iterable[int]) -> int:
        """Fresh units in the batches of these versions."""
        return sum(self._served[version].fresh for version in versions)

    @property
    def names(self) -> dict[int, str]:
        """Batch ids by version."""
        return {version: served.batch_id for version, served in self._served.items()}
