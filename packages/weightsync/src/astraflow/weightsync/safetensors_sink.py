"""Weights as a Hugging Face directory that an inference server loads: `DIR/current`.

Two copies, `a` and `b`, take turns: a version is made in `.next`, synced, becomes the one that is not current, and is
published by renaming the symbolic link `current`. A crash at any point leaves `current` whole.

A published file is never written to while anybody has it. The file of the version before the current one is written
anew for the next, which saves the allocation of its pages, but only where the system says that nobody has it open or
mapped; else a new file is made. What is reused leaves its directory first, so that nobody can open it meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from .files import sync_directory, write_atomically
from .interface import Bytes, CorruptVersion, SinkState, TensorSpec
from .layout import INDEX, check_layout
from .open_file import OpenFile
from .safetensors_files import Files, split

_STATE = "state.msgpack"


class _Record(msgspec.Struct, frozen=True):
    """What a copy holds, beside it; `parts`: the tensors of each of its files."""

    state: SinkState
    layout: tuple[TensorSpec, ...]
    parts: tuple[tuple[int, ...], ...]


class SafetensorsSink:
    """`directory/current/model.safetensors`, or shards of at most `file_bytes` and their index, and what they hold in
    `state.msgpack` beside them. One writer a directory.

    `beside`: a directory whose other files (configuration, tokenizer) are copied in, so that `current` is all that a
    server loads. A server that opens several files resolves `current` once, and opens them under what it got.

    Takes any layout. Survives a restart: what was committed last is what it holds. Needs no memory of the model's size.
    """

    whole_frames = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        file_bytes: int = 5 << 30,
        beside: str | os.PathLike[str] | None = None,
    ) -> None:
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)
        self._link = self._root / "current"
        self._next = self._root / ".next"
        self._file_bytes = file_bytes
        self._beside = Path(beside) if beside is not None else None
        self._state = SinkState()
        self._current: Files | None = None
        self._staged: Files | None = None
        self._reading: list[OpenFile] = []
        self._writing: list[OpenFile] = []
        if self._link.is_symlink():
            self._load(self._root / self._link.readlink())

    def state(self) -> SinkState:
        return self._state

    def read(self, name: str, offset: int, into: Bytes) -> Bytes:
        if self._current is None or not self._reading:
            raise CorruptVersion(f"{self._root} holds no weights that a delta could start from")
        number, position = self._current.where(name, offset)
        try:
            return self._reading[number].read(position, into)
        except EOFError as error:
            raise CorruptVersion(f"{self._current.paths[number]} is shorter than its tensors") from error

    def room(self, name: str, offset: int, length: int) -> Bytes | None:
        assert self._staged is not None
        number, position = self._staged.where(name, offset)
        return self._writing[number].room(position, length)

    def begin(self, layout: Sequence[TensorSpec]) -> None:
        self.abort()
        if self._current is not None and self._current.layout == tuple(layout):
            parts: Sequence[Sequence[int]] = self._current.parts
            self._read_current(self._current)
        else:
            parts = split(layout, self._file_bytes)
            self._reading = _closed(self._reading)
        staged = Files(self._next, layout, parts)
        self._clear()
        older, self._writing = self._writing, []
        for path, header, size in zip(staged.paths, staged.headers, staged.sizes, strict=True):
            file = self._open(path, size, older)
            self._writing.append(file)
            file.write(0, np.frombuffer(header, np.uint8))
        _closed(file for file in older if file not in self._writing)
        if len(staged.paths) > 1:
            write_atomically(self._next / INDEX, [staged.index()])
        self._copy_beside()
        self._staged = staged

    def stage_dense(self, name: str, offset: int, data: Bytes) -> None:
        assert self._staged is not None
        number, position = self._staged.where(name, offset)
        self._writing[number].write(position, data)

    def stage_sparse(self, name: str, offset: int, itemsize: int, index: NDArray[np.int64], data: Bytes) -> None:
        raise AssertionError("this sink is given whole frames")

    def seal(self) -> None:
        for file in self._writing:
            file.sync()

    def commit(self, state: SinkState) -> None:
        staged = self._staged
        assert staged is not None
        self.seal()
        record = _Record(state, staged.layout, staged.parts)
        write_atomically(self._next / _STATE, [msgspec.msgpack.encode(record)])
        other = self._root / self._other()
        os.rename(self._next, other)
        sync_directory(self._root)
        temporary = self._root / ".current.tmp"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(other.name)
        os.rename(temporary, self._link)
        self._current, self._state = Files(other, staged.layout, staged.parts), state
        self._reading, self._writing = self._writing, self._reading
        self.abort()
        with suppress(OSError):  # it is published; that a power cut could take it back is no reason to say otherwise
            sync_directory(self._root)

    def abort(self) -> None:
        """What was staged stays on disk, unnamed, and open, until the next `begin`."""
        self._staged = None

    def _read_current(self, current: Files) -> None:
        """The files of the served version are open."""
        if len(self._reading) != len(current.paths):
            _closed(self._reading)
            self._reading = [OpenFile(path, size) for path, size in zip(current.paths, current.sizes, strict=True)]
        for file in self._reading:
            file.map()

    def _other(self) -> str:
        return "b" if self._current is not None and self._current.directory.name == "a" else "a"

    def _clear(self) -> None:
        """`.next` is there, with files of the copy before last to be written anew, if any, and nothing else."""
        other = self._root / self._other()
        if self._next.exists() and other.exists():
            shutil.rmtree(self._next)
        self._next.mkdir(exist_ok=True)
        if other.exists():
            for path in other.glob("*.safetensors"):
                os.rename(path, self._next / path.name)
            shutil.rmtree(other)
        for path in self._next.iterdir():
            if path.suffix != ".safetensors":
                path.unlink()

    def _open(self, path: Path, size: int, older: Sequence[OpenFile]) -> OpenFile:
        """For writing: the file that is there, if it is of this size and nobody else has it, else a new one."""
        if path.exists():
            file = next((file for file in older if file.is_at(path)), None) or OpenFile(path, size)
            if file.is_free(size):
                file.map()
                return file
            file.close()
            path.unlink()
        return OpenFile(path, size, new=True)

    def _copy_beside(self) -> None:
        if self._beside is not None:
            for path in self._beside.iterdir():
                if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
                    shutil.copyfile(path, self._next / path.name)

    def _load(self, directory: Path) -> None:
        """Raises CorruptVersion if what `current` names is not what this class wrote."""
        try:
            record = msgspec.msgpack.decode((directory / _STATE).read_bytes(), type=_Record)
            check_layout(record.layout)
            held = Files(directory, record.layout, record.parts)
            for path, header, size in zip(held.paths, held.headers, held.sizes, strict=True):
                if path.stat().st_size != size:
                    raise CorruptVersion(
                        f"{path} has {path.stat().st_size} bytes instead of {size}; remove {self._link}"
                    )
                with path.open("rb") as file:
                    if file.read(len(header)) != header:
                        raise CorruptVersion(f"{path} has another header than was written; remove {self._link}")
        except (FileNotFoundError, msgspec.DecodeError, IndexError) as error:
            raise CorruptVersion(f"{self._link} holds no weights of ours ({error}); remove it to pull anew") from error
        self._current, self._state = held, record.state


def _closed(files: Iterable[OpenFile]) -> list[OpenFile]:
    """None of them."""
    for file in files:
        file.close()
    return []
