"""The trainer's end: compare with what was published last, write the change, move HEAD.

Order of things, which is what keeps readers safe: payloads and manifest are durable, then HEAD moves by
compare-and-set, then the snapshot advances, then old versions go. A crash or an error before HEAD moved leaves the
last version in place and files nobody names, which a later publish removes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import anyio
import anyio.to_thread
import blake3
import structlog
import xxhash

from .codecs import Encoded, encode
from .interface import (
    Bytes,
    PublishReport,
    StaleIncarnation,
    Store,
    Tensors,
    TensorSpec,
    WeightSyncError,
)
from .layout import (
    FRAME_BYTES,
    ITEMSIZE,
    Frame,
    cut,
    dense_bytes,
    group_frames,
    layout_digest,
    root_digest,
    safetensors_header,
)
from .manifest import (
    HEAD,
    AnchorPart,
    DeltaPart,
    FrameRecord,
    Head,
    Manifest,
    VersionRef,
    anchor_name,
    decode_head,
    delta_name,
    encode_head,
    encode_manifest,
    manifest_key,
    part_key,
)
from .plan import retained
from .tensors import HostTensors
from .workers import run_all

log = structlog.get_logger(__name__)


class _Snapshot(NamedTuple):
    """A host copy of the bytes of the version that HEAD names, to compare with."""

    layout: tuple[TensorSpec, ...]
    views: list[Bytes]


class _Frame(NamedTuple):
    """One frame of a version being made."""

    dense: bytes
    anchor: bytes
    delta: Encoded
    payload_digest: bytes


class Publisher:
    """The one writer of a stream. Holds one host copy of the tensors.

    An anchor is written at its first version, every `anchor_every` versions, and where the tensors' names, dtypes or
    shapes change. Each of the last `keep` versions stays reachable from an anchor; older ones are removed.
    `incarnation` fences: a later one takes the stream over, also at a lower version; an earlier one is then refused.
    """

    def __init__(self, store: Store, *, stream: str, incarnation: int, anchor_every: int = 10, keep: int = 4) -> None:
        if min(anchor_every, keep) < 1 or incarnation < 0:
            raise ValueError("anchor_every and keep are at least 1, incarnation at least 0")
        self._store = store
        self._stream = stream
        self._incarnation = incarnation
        self._anchor_every = anchor_every
        self._keep = keep
        self._snapshot: _Snapshot | None = None
        self._head: Head | None = None
        self._busy = anyio.Lock()

    async def publish(self, tensors: Tensors, version: int) -> PublishReport:
        """Write `version`; when this returns it is durable and HEAD names it.

        `tensors` must not change meanwhile. Versions of an incarnation ascend. Raises StaleIncarnation if another
        publisher took the stream over, ValueError for a version that does not ascend or tensors that cannot be
        published, CorruptVersion if HEAD is damaged. Cancelling it leaves the last version in place, or this one if
        HEAD had moved.
        """
        async with self._busy:
            started = time.perf_counter()
            seen = await anyio.to_thread.run_sync(self._take_over, version)
            new = await anyio.to_thread.run_sync(HostTensors.of, tensors)
            if not dense_bytes(new.layout):
                raise ValueError(f"version {version} has no tensors to publish")
            base = self._snapshot if self._snapshot and self._snapshot.layout == new.layout else None
            anchor = base is None or self._since_anchor() + 1 >= self._anchor_every
            frames = cut(new.layout, FRAME_BYTES)
            groups = group_frames(frames, FRAME_BYTES, whole_tensors=False)
            job = partial(_encode_group, frames, new, base, anchor)
            made = [frame for group in await run_all(job, groups) for frame in group]
            ref = await anyio.to_thread.run_sync(self._write, new, made, version, base is not None, anchor)
            await anyio.to_thread.run_sync(self._finish, new, frames, made, ref, seen)
            await anyio.to_thread.run_sync(self._remove_old)
            return PublishReport(
                version=version,
                digest=ref.root,
                anchor=anchor,
                dense_bytes=dense_bytes(new.layout),
                delta_bytes=ref.delta_bytes,
                anchor_bytes=ref.anchor_bytes,
                density=_density(new, made) if base else 1.0,
                seconds=time.perf_counter() - started,
            )

    def _since_anchor(self) -> int:
        versions = self._head.versions if self._head else ()
        return next((behind for behind, ref in enumerate(versions) if ref.anchor_bytes), 0)

    def _take_over(self, version: int) -> bytes | None:
        """HEAD's bytes, to compare with when it moves. Raises if the stream is another's or `version` too low."""
        try:
            data = bytes(self._store.read(HEAD))
        except FileNotFoundError:
            self._forget()
            return None
        head = decode_head(data)
        if head.stream != self._stream:
            raise ValueError(f"{self._store.url} holds the stream {head.stream!r}, not {self._stream!r}")
        newest = head.newest
        replaced = newest.incarnation == self._incarnation and self._head is not None and head != self._head
        if newest.incarnation > self._incarnation or replaced:
            raise StaleIncarnation(
                f"{self._store.url}: incarnation {newest.incarnation} published version {newest.version}; "
                f"this publisher is incarnation {self._incarnation} and has been replaced"
            )
        if newest.incarnation == self._incarnation and version <= newest.version:
            raise ValueError(f"version {version} does not ascend: incarnation {self._incarnation} has {newest.version}")
        if head != self._head:
            self._forget()
        return data

    def _forget(self) -> None:
        """Start over with an anchor."""
        self._head = self._snapshot = None

    def _write(self, new: HostTensors, made: list[_Frame], version: int, has_base: bool, anchor: bool) -> VersionRef:
        """Make payloads and manifest durable."""
        where = (self._incarnation, version)
        base = self._head.newest if has_base and self._head else None
        delta = sum(len(frame.delta.payload) for frame in made)
        header = safetensors_header(new.layout)
        if base:
            self._store.put(part_key(*where, delta_name()), [frame.delta.payload for frame in made])
        if anchor:
            self._store.put(part_key(*where, anchor_name()), [header, *(view.data for view in new.views)])
        manifest = Manifest(
            stream=self._stream,
            incarnation=self._incarnation,
            version=version,
            parent=base.manifest if base else "",
            base_root=base.root if base else "",
            root=root_digest(layout_digest(new.layout, FRAME_BYTES), (frame.dense for frame in made)),
            layout=new.layout,
            frame_bytes=FRAME_BYTES,
            frames=tuple(_records(made)),
            deltas=(DeltaPart(delta_name(), delta),) if base else (),
            anchors=(AnchorPart(anchor_name(), len(header), tuple(range(len(new.layout)))),) if anchor else (),
        )
        data, digest = encode_manifest(manifest)
        self._store.put(manifest_key(*where), [data])
        anchor_size = len(header) + dense_bytes(new.layout) if anchor else 0
        return VersionRef(*where, digest, manifest.root, manifest.base_root, delta, anchor_size)

    def _finish(
        self, new: HostTensors, frames: list[Frame], made: list[_Frame], ref: VersionRef, seen: bytes | None
    ) -> None:
        """Move HEAD, then the snapshot; in one thread, so that a cancellation cannot come between."""
        earlier = self._head.versions if self._head else ()
        head = Head(stream=self._stream, versions=retained((ref, *earlier), self._keep))
        if not self._store.swap(HEAD, seen, encode_head(head)):
            raise StaleIncarnation(
                f"{self._store.url}: another publisher moved HEAD while version {ref.version} was made"
            )
        self._head = head
        before, self._snapshot = self._snapshot, None
        self._snapshot = _advance(before, new, frames, made)

    def _remove_old(self) -> None:
        """Remove what HEAD no longer names: old versions, and whatever earlier incarnations left.

        Files of a higher incarnation are never touched.
        """
        named = {ref.version for ref in self._head.versions} if self._head else set()
        try:
            for key in self._store.list(""):
                owner, _, rest = key.partition("/v/")
                version = rest.partition("/")[0]
                if not owner.isdecimal() or not version.isdecimal() or int(owner) > self._incarnation:
                    continue
                if int(owner) < self._incarnation or int(version) not in named:
                    self._store.delete(key)
        except OSError as error:  # the version is published: that space is not freed must not undo it
            log.warning("old versions not removed", store=self._store.url, stream=self._stream, error=str(error))


def _encode_group(
    frames: list[Frame], new: HostTensors, base: _Snapshot | None, anchor: bool, group: range
) -> list[_Frame]:
    return [_encode_frame(frames[position], new, base, anchor) for position in group]


def _encode_frame(frame: Frame, new: HostTensors, base: _Snapshot | None, anchor: bool) -> _Frame:
    where = slice(frame.offset, frame.offset + frame.length)
    dense = new.views[frame.tensor][where]
    delta = Encoded(0, 0, b"")
    if base:
        delta = encode(base.views[frame.tensor][where], dense, new.layout[frame.tensor].dtype)
    return _Frame(
        xxhash.xxh3_128_digest(dense.data),
        blake3.blake3(dense.data).digest() if anchor else b"",
        delta,
        blake3.blake3(delta.payload).digest() if delta.payload else b"",
    )


def _records(made: list[_Frame]) -> Iterator[FrameRecord]:
    position = 0
    for frame in made:
        size = len(frame.delta.payload)
        delta = frame.delta
        yield FrameRecord(
            frame.dense, delta.changed, delta.codec, 0, position, size, frame.payload_digest, frame.anchor
        )
        position += size


def _advance(before: _Snapshot | None, new: HostTensors, frames: list[Frame], made: list[_Frame]) -> _Snapshot:
    """The snapshot of the version just published: copies that are ours are kept as they are, else only frames that
    changed are copied. Raises WeightSyncError if the tensors are no longer those that were published."""
    same = before is not None and before.layout == new.layout
    old = before.views if before is not None and same else []
    views = [
        view if owned else old[tensor] if same else view.copy()
        for tensor, (view, owned) in enumerate(zip(new.views, new.owned, strict=True))
    ]
    for frame, record in zip(frames, made, strict=True):
        where = slice(frame.offset, frame.offset + frame.length)
        copy = views[frame.tensor][where]
        if same and record.delta.changed and not new.owned[frame.tensor]:
            copy[:] = new.views[frame.tensor][where]
        if xxhash.xxh3_128_digest(copy.data) != record.dense:
            name = new.layout[frame.tensor].name
            raise WeightSyncError(f"tensor {name!r} changed while it was published; the next version has no delta")
    return _Snapshot(new.layout, views)


def _density(new: HostTensors, made: list[_Frame]) -> float:
    count = sum(spec.nbytes // ITEMSIZE[spec.dtype] for spec in new.layout)
    return sum(frame.delta.changed for frame in made) / count
