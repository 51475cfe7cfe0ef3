"""How the bytes of a set of tensors are ordered, cut into frames and named by a digest.

Everything here follows from the layout alone: two ends with the same `TensorSpec`s cut the same frames and lay out the
same safetensors file, so a manifest needs to carry no offset that a reader would have to trust.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import blake3
import msgspec
import numpy as np
from numpy.typing import NDArray

from .interface import CorruptVersion, TensorSpec

FRAME_BYTES = 16 << 20
"""Dense bytes of a frame: the unit of comparing, encoding, verifying and staging."""

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of an element, by safetensors' dtype name."""

INDEX = "model.safetensors.index.json"
"""The file that `safetensors_index` makes."""

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Frame(NamedTuple):
    """Bytes [offset, offset + length) of the tensor at position `tensor` of the layout; never empty."""

    tensor: int
    offset: int
    length: int


def elements(data: NDArray[np.uint8], itemsize: int) -> NDArray[np.unsignedinteger]:
    """A view of dense bytes [n * itemsize] as n unsigned integers, whatever their dtype means."""
    return data.view(_UNSIGNED[itemsize])


def canonical(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The order in which tensors are laid out: widest elements first, so that all are aligned; then by name."""
    return tuple(sorted(specs, key=lambda spec: (-ITEMSIZE[spec.dtype], spec.name)))


def check_layout(layout: Sequence[TensorSpec]) -> None:
    """Raises CorruptVersion unless dtypes, shapes and sizes agree and the order is canonical."""
    for spec in layout:
        if spec.dtype not in ITEMSIZE or min(spec.shape, default=0) < 0:
            raise CorruptVersion(f"tensor {spec.name!r} has dtype {spec.dtype!r} and shape {spec.shape}")
        if spec.nbytes != math.prod(spec.shape) * ITEMSIZE[spec.dtype]:
            raise CorruptVersion(f"tensor {spec.name!r} claims {spec.nbytes} bytes for {spec.dtype} {spec.shape}")
    if len({spec.name for spec in layout}) != len(layout) or canonical(layout) != tuple(layout):
        raise CorruptVersion("the layout repeats a name or is not in canonical order")


def frame_count(layout: Sequence[TensorSpec], frame_bytes: int) -> int:
    """The number of frames that `cut` makes."""
    return sum(-(-spec.nbytes // frame_bytes) for spec in layout)


def cut(layout: Sequence[TensorSpec], frame_bytes: int) -> list[Frame]:
    """The frames of a layout, in its order; a frame never crosses a tensor, an empty tensor has none."""
    return [
        Frame(tensor, offset, min(frame_bytes, spec.nbytes - offset))
        for tensor, spec in enumerate(layout)
        for offset in range(0, spec.nbytes, frame_bytes)
    ]


def group_frames(frames: Sequence[Frame], frame_bytes: int) -> list[range]:
    """Runs of consecutive frames of about `frame_bytes`, one worker's job each, so that small tensors share one."""
    groups: list[range] = []
    start = size = 0
    for position, frame in enumerate(frames):
        if size and size + frame.length > frame_bytes:
            groups.append(range(start, position))
            start, size = position, 0
        size += frame.length
    if start < len(frames):
        groups.append(range(start, len(frames)))
    return groups


def offsets(layout: Sequence[TensorSpec]) -> list[int]:
    """Where each tensor starts in the dense bytes (the body of a safetensors file)."""
    starts, position = [], 0
    for spec in layout:
        starts.append(position)
        position += spec.nbytes
    return starts


def dense_bytes(layout: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in layout)


def safetensors_header(layout: Sequence[TensorSpec]) -> bytes:
    """What precedes the dense bytes in a safetensors file: u64 length, JSON, padded to 8 bytes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for spec, start in zip(layout, offsets(layout), strict=True):
        fields[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": [start, start + spec.nbytes],
        }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def safetensors_index(layout: Sequence[TensorSpec], files: Mapping[str, str]) -> bytes:
    """What Hugging Face's loaders read where a model is in several files; `files`: tensor name -> file name."""
    index = {"metadata": {"total_size": dense_bytes(layout)}, "weight_map": dict(sorted(files.items()))}
    return json.dumps(index, indent=2).encode()


def layout_digest(layout: Sequence[TensorSpec], frame_bytes: int) -> bytes:
    """blake3 [32] of names, dtypes, shapes and the frame size."""
    return blake3.blake3(msgspec.msgpack.encode((frame_bytes, layout))).digest()


def root_digest(layout: bytes, dense: Iterable[bytes]) -> str:
    """The name of the content: hex blake3 over the layout digest and the frames' dense digests in order."""
    return blake3.blake3(layout + b"".join(dense)).hexdigest()
