"""Where a publisher's bytes come from: tensors in memory, or a safetensors file or directory; read frame by frame.

Invariant: no more than a few frames are ever copied. What is contiguous on the CPU is read as a view.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from .files import read_into
from .interface import Bytes, CorruptVersion, Tensors, TensorSpec
from .layout import INDEX, ITEMSIZE, canonical, check_layout
from .manifest import anchor_name
from .tensors import is_torch, spec_of

_MAX_HEADER = 100 << 20
"""What the safetensors library accepts."""


class Source(Protocol):
    """A set of tensors in canonical order."""

    layout: tuple[TensorSpec, ...]

    def read(self, tensor: int, offset: int, length: int) -> Bytes:
        """Bytes [offset, offset + length) of the tensor at this position; a view or a copy. From any thread."""
        ...

    def close(self) -> None: ...


def open_source(tensors: Tensors | str | os.PathLike[str]) -> Source:
    """Raises TypeError or ValueError for what cannot be published, FileNotFoundError for a path that is not there."""
    if isinstance(tensors, Mapping):
        return TensorSource(tensors)
    if isinstance(tensors, str | os.PathLike):
        return SafetensorsSource(Path(tensors))
    raise TypeError(f"expected tensors by name or the path of a safetensors file, got {type(tensors).__name__}")


class TensorSource:
    """Torch tensors (any device, any strides) and numpy arrays."""

    def __init__(self, tensors: Tensors) -> None:
        self.layout = canonical(spec_of(name, tensor) for name, tensor in tensors.items())
        self._tensors = [tensors[spec.name] for spec in self.layout]

    def read(self, tensor: int, offset: int, length: int) -> Bytes:
        return read_bytes(self._tensors[tensor], offset, length)

    def close(self) -> None:
        self._tensors = []


def read_bytes(tensor: Any, offset: int, length: int) -> Bytes:
    """Bytes [offset, offset + length) of a tensor in row-major order: a view where it is contiguous on the CPU, else a
    copy of the rows they lie in."""
    torch_tensor = is_torch(tensor)
    contiguous = tensor.is_contiguous() if torch_tensor else tensor.flags.c_contiguous
    itemsize = tensor.element_size() if torch_tensor else tensor.itemsize
    if torch_tensor:
        tensor = tensor.detach()
    if contiguous:
        flat, row = tensor.reshape(-1), itemsize
    else:
        while tensor.shape[0] == 1:  # a transposed matrix with a leading axis of one is cut along the next
            tensor = tensor[0]
        flat, row = tensor, itemsize * int(np.prod(tensor.shape[1:], dtype=np.int64))
    first, last = offset // row, -(-(offset + length) // row)
    rows = flat[first:last]
    if torch_tensor:
        import torch

        dense: Bytes = rows.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    else:
        dense = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return dense[offset - first * row :][:length]


class _Place(NamedTuple):
    """Where a tensor's bytes are: an open file, and the first byte in it."""

    descriptor: int
    start: int


class SafetensorsSource:
    """A safetensors file, or a Hugging Face directory: `model.safetensors`, or shards and their index.

    The files must stay as they are until the version is published.
    """

    def __init__(self, path: Path) -> None:
        found: dict[str, tuple[TensorSpec, _Place]] = {}
        with ExitStack() as stack:
            for file in _files(path):
                descriptor = os.open(file, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                for spec, start in _header(file, descriptor):
                    if spec.name in found:
                        raise ValueError(f"tensor {spec.name!r} is in {file} and in another file of {path}")
                    found[spec.name] = (spec, _Place(descriptor, start))
            self.layout = canonical(spec for spec, _ in found.values())
            self._places = [found[spec.name][1] for spec in self.layout]
            self._open = stack.pop_all()

    def read(self, tensor: int, offset: int, length: int) -> Bytes:
        place = self._places[tensor]
        data = np.empty(length, np.uint8)
        if read_into(place.descriptor, data.data, place.start + offset) != length:
            raise ValueError(f"the file of tensor {self.layout[tensor].name!r} was cut off while it was published")
        return data

    def close(self) -> None:
        self._open.close()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        return [path / anchor_name()]
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors files: {error}") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ValueError(f"{index} names files outside its directory")
    return [path / name for name in sorted(names)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _header(file: Path, descriptor: int) -> list[tuple[TensorSpec, int]]:
    """The tensors of a safetensors file and where in it each one starts. Raises ValueError."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ValueError(f"{file} is no safetensors file")
    try:
        raw = msgspec.json.decode(os.pread(descriptor, length, 8), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} has a header that is not that of a safetensors file: {error}") from error
    found = []
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if entry.dtype not in ITEMSIZE or not 0 <= start <= stop <= size - 8 - length:
            raise ValueError(f"{file}: tensor {name!r} has dtype {entry.dtype} at bytes {start} to {stop}")
        found.append(
            (TensorSpec(name=name, dtype=entry.dtype, shape=entry.shape, nbytes=stop - start), 8 + length + start)
        )
    try:
        check_layout(canonical(spec for spec, _ in found))
    except CorruptVersion as error:
        raise ValueError(f"{file}: {error}") from error
    return found
