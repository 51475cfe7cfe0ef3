"""A host copy of the version that HEAD names: what the next one is compared with. A publisher holds one, no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .interface import Bytes, CorruptVersion, SinkState, TensorSpec
from .layout import Frame


class Snapshot:
    """Bytes of `layout`; `root` names them, "" while they are not those of a version."""

    def __init__(self, layout: Sequence[TensorSpec]) -> None:
        self.layout = tuple(layout)
        self.root = ""
        self._dense = [np.empty(spec.nbytes, np.uint8) for spec in self.layout]

    def frame(self, frame: Frame) -> Bytes:
        """A view."""
        return self._dense[frame.tensor][frame.offset : frame.offset + frame.length]


class SnapshotSink:
    """Pulls a version into a new snapshot: what a publisher that starts again compares with.

    For one full pull; nobody reads the snapshot meanwhile, so what is staged is written at once.
    """

    whole_frames = True

    def __init__(self, layout: Sequence[TensorSpec]) -> None:
        self.snapshot = Snapshot(layout)
        self._tensor = {spec.name: position for position, spec in enumerate(layout)}

    def state(self) -> SinkState:
        return SinkState()

    def read(self, name: str, offset: int, into: Bytes) -> Bytes:
        return self._at(name, offset, len(into))

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        if tuple(layout) != self.snapshot.layout:
            raise CorruptVersion("the tensors of the stream are not those to publish")

    def room(self, name: str, offset: int, length: int) -> Bytes | None:
        return None

    def stage_dense(self, name: str, offset: int, data: Bytes) -> None:
        self._at(name, offset, len(data))[:] = data

    def stage_sparse(self, name: str, offset: int, itemsize: int, index: NDArray[np.int64], data: Bytes) -> None:
        raise AssertionError("this sink is given whole frames")

    def seal(self) -> None:
        pass

    def commit(self, state: SinkState) -> None:
        self.snapshot.root = state.digest

    def abort(self) -> None:
        pass

    def _at(self, name: str, offset: int, length: int) -> Bytes:
        return self.snapshot.frame(Frame(self._tensor[name], offset, length))
