"""Weights as a safetensors file that an inference server loads: `DIR/current/model.safetensors`.

Two copies, `a` and `b`, take turns: a version is made in the one that is not current, synced, and published by
renaming the symbolic link `current`. A crash at any point leaves `current` whole. A file that was once current is
never written to again, only unlinked, so who has it mapped keeps reading one version.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from .files import sync_directory, write_all, write_atomically
from .interface import Bytes, CorruptVersion, SinkState, TensorSpec
from .layout import check_layout, dense_bytes, offsets, safetensors_header

_MODEL = "model.safetensors"
_STATE = "state.msgpack"


class _Record(msgspec.Struct, frozen=True):
    """What a copy holds, beside it."""

    state: SinkState
    layout: tuple[TensorSpec, ...]


class _Copy:
    """One of the two files, and where its tensors are."""

    def __init__(self, directory: Path, layout: Sequence[TensorSpec]) -> None:
        self.directory = directory
        self.layout = tuple(layout)
        self.header = safetensors_header(layout)
        self.bytes = len(self.header) + dense_bytes(layout)
        self._starts = dict(zip((spec.name for spec in layout), offsets(layout), strict=True))

    @property
    def path(self) -> Path:
        return self.directory / _MODEL

    def where(self, name: str, offset: int = 0) -> int:
        return len(self.header) + self._starts[name] + offset


class SafetensorsSink:
    """`directory/current/model.safetensors`, and what it holds in `state.msgpack` beside it. One writer a directory.

    Takes any layout. Survives a restart: what was committed last is what it holds.
    """

    whole_frames = True

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)
        self._link = self._root / "current"
        self._state = SinkState()
        self._current: _Copy | None = None
        self._staged: _Copy | None = None
        self._descriptor = -1
        if self._link.is_symlink():
            self._load(self._root / self._link.readlink())

    def state(self) -> SinkState:
        return self._state

    def read(self, name: str, offset: int, into: Bytes) -> Bytes:
        if self._current is None or self._staged is None:
            raise CorruptVersion(f"{self._root} holds no weights that a delta could start from")
        if os.preadv(self._descriptor, [into.data], self._staged.where(name, offset)) != len(into):
            raise CorruptVersion(f"{self._staged.path} is shorter than its tensors")
        return into

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        self.abort()
        used = self._current is not None and self._current.directory.name == "a"
        staged = _Copy(self._root / ("b" if used else "a"), layout)
        shutil.rmtree(staged.directory, ignore_errors=True)
        staged.directory.mkdir()
        self._descriptor = os.open(staged.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._staged = staged
        if self._current is not None and self._current.layout == staged.layout:
            shutil.copyfile(self._current.path, staged.path)
        else:
            os.truncate(self._descriptor, staged.bytes)
            write_all(self._descriptor, staged.header, 0)

    def stage_dense(self, name: str, offset: int, data: Bytes) -> None:
        assert self._staged is not None
        write_all(self._descriptor, data.data, self._staged.where(name, offset))

    def stage_sparse(self, name: str, offset: int, itemsize: int, index: NDArray[np.int64], data: Bytes) -> None:
        raise AssertionError("this sink is given whole frames")

    def commit(self, state: SinkState) -> None:
        staged = self._staged
        assert staged is not None
        os.fsync(self._descriptor)
        write_atomically(staged.directory / _STATE, [msgspec.msgpack.encode(_Record(state, staged.layout))])
        temporary = self._root / ".current.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(staged.directory.name)
        os.rename(temporary, self._link)
        os.close(self._descriptor)
        self._current, self._state, self._staged, self._descriptor = staged, state, None, -1
        sync_directory(self._root)

    def abort(self) -> None:
        """What was staged stays on disk, unnamed, until the next `begin`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._staged, self._descriptor = None, -1

    def _load(self, directory: Path) -> None:
        """Raises CorruptVersion if what `current` names is not what this class wrote."""
        try:
            record = msgspec.msgpack.decode((directory / _STATE).read_bytes(), type=_Record)
            check_layout(record.layout)
            copy = _Copy(directory, record.layout)
            size = copy.path.stat().st_size
        except (FileNotFoundError, msgspec.DecodeError) as error:
            raise CorruptVersion(f"{self._link} holds no weights of ours ({error}); remove it to pull anew") from error
        if size != copy.bytes:
            raise CorruptVersion(f"{copy.path} has {size} bytes instead of {copy.bytes}; remove {self._link}")
        self._current, self._state = copy, record.state
