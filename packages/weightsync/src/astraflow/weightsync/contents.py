"""What a version consists of: its payload blobs, and the digest that every stretch of them must have.

A manifest says it all, so who has the manifest can fetch, keep and check a version in any order, without trusting who
delivers it. Every byte of a payload blob lies in exactly one extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import blake3

from .interface import CorruptVersion, TensorSpec
from .layout import INDEX, Frame, cut, dense_bytes, offsets, safetensors_header, safetensors_index
from .manifest import AnchorPart, Manifest, VersionRef, part_key


class Extent(NamedTuple):
    """Bytes [start, stop) of a blob have this blake3; `what` names them to a person."""

    start: int
    stop: int
    digest: bytes
    what: str


class Blob(NamedTuple):
    """A payload of `size` bytes; its extents ascend without a gap."""

    key: str
    size: int
    extents: tuple[Extent, ...]
    is_anchor: bool


def contents(ref: VersionRef, manifest: Manifest) -> tuple[Blob, ...]:
    """The parts of a version, deltas first, and the index of an anchor in several files; a delta of no change is empty.
    Raises CorruptVersion where a part has bytes that no digest covers."""
    frames = cut(manifest.layout, manifest.frame_bytes)
    deltas: list[list[Extent]] = [[] for _ in manifest.deltas]
    dense: list[list[tuple[Frame, bytes]]] = [[] for _ in manifest.layout]
    for frame, record in zip(frames, manifest.frames, strict=True):
        name = manifest.layout[frame.tensor].name
        if record.size:
            stop = record.position + record.size
            deltas[record.part].append(Extent(record.position, stop, record.payload, name))
        dense[frame.tensor].append((frame, record.anchor))
    blobs = [
        _whole(part_key(ref.incarnation, ref.version, part.name), part.size, extents, is_anchor=False)
        for part, extents in zip(manifest.deltas, deltas, strict=True)
    ]
    for part in manifest.anchors:
        specs = [manifest.layout[tensor] for tensor in part.tensors]
        header = safetensors_header(specs)
        extents = [Extent(0, part.start, blake3.blake3(header).digest(), "the header")]
        for tensor, spec, start in zip(part.tensors, specs, offsets(specs), strict=True):
            for frame, digest in dense[tensor]:
                first = part.start + start + frame.offset
                extents.append(Extent(first, first + frame.length, digest, spec.name))
        key = part_key(ref.incarnation, ref.version, part.name)
        blobs.append(_whole(key, part.start + dense_bytes(specs), extents, is_anchor=True))
    if len(manifest.anchors) > 1:
        index = anchor_index(manifest.layout, manifest.anchors)
        whole = [Extent(0, len(index), blake3.blake3(index).digest(), "the index")]
        blobs.append(_whole(part_key(ref.incarnation, ref.version, INDEX), len(index), whole, is_anchor=True))
    return tuple(blobs)


def anchor_index(layout: Sequence[TensorSpec], anchors: Sequence[AnchorPart]) -> bytes:
    """What lies beside an anchor in several files, so that Hugging Face's loaders find the tensors."""
    return safetensors_index(layout, {layout[tensor].name: part.name for part in anchors for tensor in part.tensors})


def _whole(key: str, size: int, extents: list[Extent], *, is_anchor: bool) -> Blob:
    ordered = sorted(extents)
    ends = [(0, 0), *((extent.start, extent.stop) for extent in ordered), (size, size)]
    for (_, stop), (start, _) in pairwise(ends):
        if stop != start:
            raise CorruptVersion(f"{key}: its manifest leaves bytes {stop} to {start} without a digest, or names two")
    return Blob(key, size, tuple(ordered), is_anchor)
