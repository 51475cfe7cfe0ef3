"""One frame on its way from store to sink: read, verify, decode, apply, verify again. Nothing is written here.

A payload is decoded only when it has the blake3 that the manifest says, and what it makes is handed on only when it
has the xxh3-128 of the dense frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import blake3
import numpy as np

from .codecs import Change, decode, patch, sparse_is_smaller
from .frames import count_codecs, dense_digest, density
from .interface import Bytes, CorruptVersion, Payloads, Sink, Store, WeightSyncError, WrongBase
from .layout import ITEMSIZE, cut, elements
from .manifest import FrameRecord, Manifest, part_key, placed, read_manifest
from .plan import Path
from .seconds import Seconds
from .spool import Stretch


class Span(NamedTuple):
    """Bytes of a delta part from `start` on."""

    start: int
    data: memoryview


Spans = dict[int, Span]
"""By the position of the part."""


class Assembler:
    """Makes the frames of a path's target. Immutable once made: frames can be assembled in several threads. `seconds`
    counts transfer, verify, decode and apply.

    Reads the path's manifests when made. Raises CorruptVersion, or FileNotFoundError where retention was faster.
    """

    def __init__(self, store: Store, path: Path) -> None:
        manifests = {
            ref: read_manifest(store, ref) for ref in {path.target, *path.deltas, path.anchor} if ref is not None
        }
        self.target = manifests[path.target]
        self.layout = self.target.layout
        self.frames = cut(self.layout, self.target.frame_bytes)
        self.seconds = Seconds()
        self._store = store
        self._payloads: Payloads = store
        self._anchor = manifests[path.anchor] if path.anchor is not None else None
        self._deltas = [manifests[ref] for ref in path.deltas]
        self._placed = placed(self._anchor) if self._anchor is not None else {}
        for manifest in manifests.values():
            if manifest.layout != self.layout or manifest.frame_bytes != self.target.frame_bytes:
                raise CorruptVersion(f"version {manifest.version} has another layout than {self.target.version}")

    def reading(self, payloads: Payloads) -> Assembler:
        """The same, with payloads from elsewhere than the store."""
        other = copy(self)
        other._payloads = payloads
        return other

    def blobs(self) -> list[Stretch]:
        """All that `change` will read."""
        found = [
            Stretch(part_key(manifest.incarnation, manifest.version, part.name), 0, part.size)
            for manifest in self._deltas
            for part in manifest.deltas
        ]
        if (full := self._anchor) is not None:
            for anchor in full.anchors:
                size = sum(self.layout[tensor].nbytes for tensor in anchor.tensors)
                key = part_key(full.incarnation, full.version, anchor.name)
                found.append(Stretch(key, anchor.start, anchor.start + size))
        return [blob for blob in found if blob.stop > blob.start]

    @property
    def density(self) -> float:
        """The share of the values that the deltas change; 1.0 from an anchor."""
        return 1.0 if self._anchor is not None else density(self.layout, self._records)

    @property
    def codecs(self) -> dict[str, int]:
        """How many changed frames of the deltas are in which codec."""
        return count_codecs(self._records)

    @property
    def _records(self) -> Iterator[FrameRecord]:
        return (frame for manifest in self._deltas for frame in manifest.frames)

    def spans(self, group: range) -> list[Spans]:
        """The payloads of the frames in `group`, one read per part of each delta."""
        with self.seconds.of("transfer"):
            return [_read_spans(self._payloads, manifest, group) for manifest in self._deltas]

    def change(self, position: int, spans: list[Spans], sink: Sink, room: Bytes) -> Change | None:
        """The frame at `position`; None if the sink's stays as it is.

        `room` uint8 is of the frame's size and to be written in. What is returned lies in it where the sink wants whole
        frames, else never. Raises CorruptVersion, WrongBase.
        """
        if self._anchor is not None:
            start, verified = self._from_anchor(position), self._anchor.frames[position].dense
        else:
            start, verified = self._from_sink(position, sink, room), b""
        current, changes = self._follow(position, spans, start, verified, room)
        if self._anchor is not None:
            return Change(None, current.copy() if changes and not sink.whole_frames else current)
        if sink.whole_frames:
            return Change(None, current)
        return self._changed(position, changes, current) if changes else None

    def _changed(self, position: int, changes: list[Change], current: Bytes) -> Change:
        """What `changes` make of a frame, outside `current`."""
        itemsize = ITEMSIZE[self._dtype(position)]
        at = [change.at for change in changes if change.at is not None]
        if len(at) < len(changes) or not sparse_is_smaller(sum(map(len, at)), itemsize, len(current)):
            return Change(None, current.copy())
        if len(changes) == 1:
            return changes[0]
        touched = np.unique(np.concatenate(at))
        return Change(touched, elements(current, itemsize)[touched].view(np.uint8))

    def _follow(
        self, position: int, spans: list[Spans], start: Bytes, verified: bytes, room: Bytes
    ) -> tuple[Bytes, list[Change]]:
        """`start` (whose digest is `verified`, if known) through the deltas that change it, in `room`; and what they
        change."""
        current = start
        changes: list[Change] = []
        for manifest, span in zip(self._deltas, spans, strict=True):
            record = manifest.frames[position]
            if record.size:
                payload = self._payload(manifest, record, span)
                current = self._apply(position, manifest, payload, current, room, changes)
            elif record.dense != verified:
                self._verify(current, record, position, manifest)
            verified = record.dense
        if not verified:
            self._verify(current, self.target.frames[position], position, self.target)
        return current, changes

    def _apply(
        self, position: int, manifest: Manifest, payload: memoryview, current: Bytes, room: Bytes, changes: list[Change]
    ) -> Bytes:
        """`current` through one delta, verified."""
        record, dtype = manifest.frames[position], self._dtype(position)
        with self.seconds.of("decode"):
            try:
                change = decode(record.codec, record.changed, payload, current, dtype)
            except CorruptVersion as error:  # the payload is the publisher's, so it is the base that is not
                raise self._mismatch(position, manifest) from error
        changes.append(change)
        if change.at is None:
            self._verify(change.data, record, position, manifest)
            return change.data
        with self.seconds.of("apply"):
            intact = patch(change, current, room, dtype) == record.dense
        if not intact:
            raise self._mismatch(position, manifest)
        return room

    def _dtype(self, position: int) -> str:
        return self.layout[self.frames[position].tensor].dtype

    def _from_sink(self, position: int, sink: Sink, room: Bytes) -> Bytes:
        frame = self.frames[position]
        with self.seconds.of("apply"):
            return sink.read(self.layout[frame.tensor].name, frame.offset, room)

    def _from_anchor(self, position: int) -> Bytes:
        manifest, frame = self._anchor, self.frames[position]
        assert manifest is not None
        name, start = self._placed[frame.tensor]
        key = part_key(manifest.incarnation, manifest.version, name)
        with self.seconds.of("transfer"):
            data = self._payloads.read(key, start + frame.offset, frame.length)
        with self.seconds.of("verify"):
            intact = len(data) == frame.length and blake3.blake3(data).digest() == manifest.frames[position].anchor
        if not intact:
            raise CorruptVersion(f"{self._store.url}/{key} is damaged at tensor {self.layout[frame.tensor].name!r}")
        dense = np.frombuffer(data, np.uint8)
        self._verify(dense, manifest.frames[position], position, manifest)
        return dense

    def _payload(self, manifest: Manifest, record: FrameRecord, spans: Spans) -> memoryview:
        span = spans[record.part]
        start = record.position - span.start
        payload = span.data[start : start + record.size]
        with self.seconds.of("verify"):
            intact = len(payload) == record.size and blake3.blake3(payload).digest() == record.payload
        if not intact:
            key = part_key(manifest.incarnation, manifest.version, manifest.deltas[record.part].name)
            raise CorruptVersion(f"{key} is damaged at bytes {record.position} to {record.position + record.size}")
        return payload

    def _verify(self, dense: Bytes, record: FrameRecord, position: int, manifest: Manifest) -> None:
        with self.seconds.of("verify"):
            intact = dense_digest(dense) == record.dense
        if not intact:
            raise self._mismatch(position, manifest)

    def _mismatch(self, position: int, manifest: Manifest) -> WeightSyncError:
        name = self.layout[self.frames[position].tensor].name
        if self._anchor is None:
            return WrongBase(
                f"tensor {name!r} is not what version {manifest.version} starts from; the next pull is full"
            )
        return CorruptVersion(f"tensor {name!r} of version {manifest.version} does not have the digest it should")


def _read_spans(payloads: Payloads, manifest: Manifest, group: range) -> Spans:
    records = [manifest.frames[position] for position in group if manifest.frames[position].size]
    spans = {}
    for part in {record.part for record in records}:
        start = min(record.position for record in records if record.part == part)
        end = max(record.position + record.size for record in records if record.part == part)
        key = part_key(manifest.incarnation, manifest.version, manifest.deltas[part].name)
        spans[part] = Span(start, memoryview(payloads.read(key, start, end - start)))
    return spans
