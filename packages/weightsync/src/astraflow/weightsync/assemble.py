"""One frame on its way from store to sink: read, verify, decode, apply, verify again. Nothing is written here.

A payload is decoded only when it has the blake3 that the manifest says, and what it makes is handed on only when it
has the xxh3-128 of the dense frame.
"""

from __future__ import annotations

from typing import NamedTuple

import blake3
import numpy as np
import xxhash

from .codecs import Change, apply, changed_elements, sparse_is_smaller
from .interface import Bytes, CorruptVersion, Store, WeightSyncError, WrongBase
from .layout import ITEMSIZE, cut, elements
from .manifest import FrameRecord, Manifest, VersionRef, decode_manifest, manifest_key, part_key
from .plan import Path


class Span(NamedTuple):
    """Bytes of a delta part from `start` on."""

    start: int
    data: memoryview


Spans = dict[int, Span]
"""By the position of the part."""


class Assembler:
    """Makes the frames of a path's target. Immutable once made: frames can be assembled in several threads.

    Reads the path's manifests when made. Raises CorruptVersion, or FileNotFoundError where retention was faster.
    """

    def __init__(self, store: Store, path: Path) -> None:
        manifests = {ref: _load(store, ref) for ref in {path.target, *path.deltas, path.anchor} if ref is not None}
        self.target = manifests[path.target]
        self.layout = self.target.layout
        self.frames = cut(self.layout, self.target.frame_bytes)
        self._store = store
        self._anchor = manifests[path.anchor] if path.anchor is not None else None
        self._deltas = [manifests[ref] for ref in path.deltas]
        self._placed = _placed(self._anchor) if self._anchor is not None else {}
        for manifest in manifests.values():
            if manifest.layout != self.layout or manifest.frame_bytes != self.target.frame_bytes:
                raise CorruptVersion(f"version {manifest.version} has another layout than {self.target.version}")

    @property
    def from_anchor(self) -> bool:
        return self._anchor is not None

    def spans(self, group: range) -> list[Spans]:
        """The payloads of the frames in `group`, one read per part of each delta."""
        return [_read_spans(self._store, manifest, group) for manifest in self._deltas]

    def change(self, position: int, spans: list[Spans], base: Bytes | None, scratch: Bytes) -> Change | None:
        """The frame at `position`; None if the sink's stays as it is.

        `base` uint8 is the sink's frame, None where the path starts from an anchor. `scratch` uint8 has room for a
        frame; nothing that is returned lies in it. Raises CorruptVersion, WrongBase.
        """
        if self._anchor is not None:
            start = self._anchor_frame(position)
            current, _ = self._follow(position, spans, start, self._anchor.frames[position].dense, scratch)
            return Change(None, current if current is start else current.copy())
        assert base is not None
        current, only = self._follow(position, spans, base, b"", scratch)
        if current is base:
            return None
        itemsize = ITEMSIZE[self._dtype(position)]
        if only is not None and only.at is not None and sparse_is_smaller(len(only.at), itemsize, len(base)):
            return only
        index = changed_elements(base, current, itemsize)
        if sparse_is_smaller(len(index), itemsize, len(base)):
            return Change(index, elements(current, itemsize)[index].view(np.uint8))
        return Change(None, current.copy())

    def _follow(
        self, position: int, spans: list[Spans], start: Bytes, verified: bytes, scratch: Bytes
    ) -> tuple[Bytes, Change | None]:
        """`start` (whose digest is `verified`, if known) through the deltas, into `scratch` where one changes it.

        Also that change, where it is the only one.
        """
        current, changes = start, []
        for manifest, span in zip(self._deltas, spans, strict=True):
            record = manifest.frames[position]
            if record.size:
                if current is start:
                    current = scratch[: len(start)]
                    current[:] = start
                payload = _payload(manifest, record, span)
                try:
                    changes.append(apply(record.codec, record.changed, payload, current, self._dtype(position)))
                except CorruptVersion as error:  # the payload is the publisher's, so it is the base that is not
                    raise self._mismatch(position, manifest) from error
            elif record.dense == verified:
                continue
            self._verify(current, record, position, manifest)
            verified = record.dense
        if not verified:
            self._verify(current, self.target.frames[position], position, self.target)
        return current, changes[0] if len(changes) == 1 else None

    def _dtype(self, position: int) -> str:
        return self.layout[self.frames[position].tensor].dtype

    def _anchor_frame(self, position: int) -> Bytes:
        manifest, frame = self._anchor, self.frames[position]
        assert manifest is not None
        name, start = self._placed[frame.tensor]
        key = part_key(manifest.incarnation, manifest.version, name)
        data = self._store.read(key, start + frame.offset, frame.length)
        if len(data) != frame.length or blake3.blake3(data).digest() != manifest.frames[position].anchor:
            raise CorruptVersion(f"{self._store.url}/{key} is damaged at tensor {self.layout[frame.tensor].name!r}")
        dense = np.frombuffer(data, np.uint8)
        self._verify(dense, manifest.frames[position], position, manifest)
        return dense

    def _verify(self, dense: Bytes, record: FrameRecord, position: int, manifest: Manifest) -> None:
        if xxhash.xxh3_128_digest(dense.data) != record.dense:
            raise self._mismatch(position, manifest)

    def _mismatch(self, position: int, manifest: Manifest) -> WeightSyncError:
        name = self.layout[self.frames[position].tensor].name
        if self._anchor is None:
            return WrongBase(
                f"tensor {name!r} is not what version {manifest.version} starts from; the next pull is full"
            )
        return CorruptVersion(f"tensor {name!r} of version {manifest.version} does not have the digest it should")


def _load(store: Store, ref: VersionRef) -> Manifest:
    return decode_manifest(store.read(manifest_key(ref.incarnation, ref.version)), ref)


def _placed(anchor: Manifest) -> dict[int, tuple[str, int]]:
    """In which part each tensor is, and at which byte."""
    placed = {}
    for part in anchor.anchors:
        position = part.start
        for tensor in part.tensors:
            placed[tensor] = (part.name, position)
            position += anchor.layout[tensor].nbytes
    return placed


def _read_spans(store: Store, manifest: Manifest, group: range) -> Spans:
    records = [manifest.frames[position] for position in group if manifest.frames[position].size]
    spans = {}
    for part in {record.part for record in records}:
        start = min(record.position for record in records if record.part == part)
        end = max(record.position + record.size for record in records if record.part == part)
        key = part_key(manifest.incarnation, manifest.version, manifest.deltas[part].name)
        spans[part] = Span(start, memoryview(store.read(key, start, end - start)))
    return spans


def _payload(manifest: Manifest, record: FrameRecord, spans: Spans) -> memoryview:
    span = spans[record.part]
    start = record.position - span.start
    payload = span.data[start : start + record.size]
    if len(payload) != record.size or blake3.blake3(payload).digest() != record.payload:
        key = part_key(manifest.incarnation, manifest.version, manifest.deltas[record.part].name)
        raise CorruptVersion(f"{key} is damaged at bytes {record.position} to {record.position + record.size}")
    return payload
