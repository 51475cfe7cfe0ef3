"""The trainer's end: compare with what was published last, write the change, move HEAD.

Invariants: HEAD moves when all of a version is durable, and only then does the snapshot advance. A crash or an error
before leaves the last version in place. Memory: the snapshot (one copy of the model) and a few frames.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import chain

import anyio
import anyio.from_thread
import anyio.to_thread
import blake3
import structlog
from msgspec.structs import asdict

from .codecs import Codec, known
from .frames import Made, Records, count_codecs, dense_digest, density, make
from .interface import Bytes, PublishReport, Retention, Store, Tensors, WeightSyncError
from .layout import (
    FRAME_BYTES,
    Frame,
    cut,
    dense_bytes,
    group_frames,
    safetensors_header,
)
from .manifest import (
    AnchorPart,
    DeltaPart,
    VersionRef,
    anchor_name,
    delta_name,
    part_key,
)
from .puller import Puller
from .retention import DEFAULT
from .seconds import Seconds
from .snapshot import Snapshot, SnapshotSink
from .sources import Source, open_source
from .stream import Stream
from .workers import in_order

log = structlog.get_logger(__name__)


class Publisher:
    """The one writer of a stream. Holds one host copy of the tensors.

    An anchor is written at its first version, every `anchor_every` versions, and where the tensors' names, dtypes or
    shapes change, or where `publish` is asked to. What is older than `retention` says is removed.
    `incarnation` fences: a later one takes the stream over, also at a lower version; an earlier one is then refused.
    `codec`: `auto` is the smallest; `l0` is a third larger and several times as cheap to decode, for links of about
    10 Gbit/s and more (see `astraflow.weightsync.codecs.encode`).

    A publisher that starts over a stream that exists reads its newest version back, so that its first version is a
    delta too, beside the anchor; where that version cannot be read, or has other tensors, it is an anchor alone.
    """

    def __init__(
        self,
        store: Store,
        *,
        stream: str,
        incarnation: int,
        anchor_every: int = 10,
        retention: Retention = DEFAULT,
        codec: Codec = "auto",
    ) -> None:
        self._store = store
        self._stream = Stream(store, stream, incarnation, anchor_every, retention)
        self._codec = known(codec)
        self._snapshot: Snapshot | None = None
        self._busy = anyio.Lock()

    async def publish(
        self, tensors: Tensors | str | os.PathLike[str], version: int, *, anchor: bool = False
    ) -> PublishReport:
        """Write `version`; when this returns it is durable and HEAD names it.

        `tensors`: by name, or the path of a safetensors file or of a Hugging Face directory; they must not change
        meanwhile. Tensors that share memory are published under each name. Versions of an incarnation ascend.
        `anchor`: write an anchor whether or not one is due, as where readers report a damaged delta. Raises
        StaleIncarnation if another publisher took the stream over, ValueError for a version that does not ascend or
        tensors that cannot be published, CorruptVersion if HEAD is damaged. Cancelling it leaves the last version in
        place, or this one if HEAD had moved.
        """
        async with self._busy:
            started = time.perf_counter()
            await anyio.to_thread.run_sync(self._stream.take_over, version)
            source = await anyio.to_thread.run_sync(open_source, tensors)
            try:
                if not dense_bytes(source.layout):
                    raise ValueError(f"version {version} has no tensors to publish")
                if self._snapshot is None or self._snapshot.root != self._stream.newest_root:
                    self._snapshot = None  # before there is another
                    self._snapshot = await self._read_back(source)
                return await anyio.to_thread.run_sync(self._publish, source, version, anchor, started)
            finally:
                source.close()

    async def _read_back(self, source: Source) -> Snapshot | None:
        if self._stream.head is None:
            return None
        sink = SnapshotSink(source.layout)
        try:
            await Puller(self._store, sink).pull()
        except (WeightSyncError, OSError) as error:
            log.warning("no delta from the last version", store=self._store.url, error=str(error))
            return None
        return sink.snapshot

    def _publish(self, source: Source, version: int, asked: bool, started: float) -> PublishReport:
        held = self._snapshot
        has_base = held is not None and held.layout == source.layout and held.root == self._stream.newest_root
        if held is None or not has_base:
            self._snapshot = held = None  # before there is another
            held = Snapshot(source.layout)
        work = _Version(source, held, self._codec, has_base=has_base)
        anchor = asked or not has_base or self._stream.wants_anchor()
        with work.seconds.of("write"):
            ref = self._write(work, version, anchor)
        anyio.from_thread.check_cancelled()
        self._stream.move(ref)
        self._snapshot = None  # until it has all of the new bytes
        work.advance(ref.root)
        self._snapshot = held
        self._stream.remove_old()
        report = PublishReport(
            version=version,
            digest=ref.root,
            anchor=anchor,
            dense_bytes=dense_bytes(source.layout),
            delta_bytes=ref.delta_bytes,
            anchor_bytes=ref.anchor_bytes,
            density=density(source.layout, work.records.frames) if has_base else 1.0,
            codecs=count_codecs(work.records.frames),
            seconds=time.perf_counter() - started,
            diff_s=work.seconds["diff"],
            encode_s=work.seconds["encode"],
            write_s=work.seconds["write"] - work.seconds["wait"],
        )
        log.info("published", store=self._store.url, ratio=round(report.ratio, 1), **asdict(report))
        return report

    def _write(self, work: _Version, version: int, anchor: bool) -> VersionRef:
        """Make payloads and manifest durable."""
        layout, incarnation = work.layout, self._stream.incarnation
        deltas, anchors = [], []
        if work.has_base:
            self._store.put(part_key(incarnation, version, delta_name()), work.payloads())
            deltas.append(DeltaPart(delta_name(), work.records.size))
        if anchor:
            header = safetensors_header(layout)
            self._store.put(part_key(incarnation, version, anchor_name()), chain([header], work.dense()))
            anchors.append(AnchorPart(anchor_name(), len(header), tuple(range(len(layout)))))
        return self._stream.describe(version, layout, FRAME_BYTES, work.records.frames, deltas, anchors)


class _Version:
    """One version being made from a source, frame by frame; `snapshot` has the base's bytes, or none yet.

    `seconds` counts diff and encode in the workers, and how long their results were waited for.
    """

    def __init__(self, source: Source, snapshot: Snapshot, codec: Codec, *, has_base: bool) -> None:
        self.layout = source.layout
        self.has_base = has_base
        self.records = Records()
        self.seconds = Seconds()
        self._codec: Codec = codec
        self._source = source
        self._snapshot = snapshot
        self._frames = cut(source.layout, FRAME_BYTES)
        self._groups = group_frames(self._frames, FRAME_BYTES)

    def payloads(self) -> Iterator[bytes | memoryview]:
        """The delta, and on the way the frames' records."""
        for group in self.seconds.waiting(in_order(self._encode, self._groups)):
            anyio.from_thread.check_cancelled()
            for made in group:
                self.records.add(made)
                yield made.delta.payload

    def dense(self) -> Iterator[memoryview]:
        """The anchor's dense bytes, and on the way what the frames' records say of it."""
        digests: list[bytes] = []
        for group in self.seconds.waiting(in_order(self._name, self._groups)):
            anyio.from_thread.check_cancelled()
            for made, digest, data in group:
                if not self.has_base:
                    self.records.add(made)
                self._check(len(digests), made.dense)
                digests.append(digest)
                yield data.data
        self.records.name_anchor(digests)

    def advance(self, root: str) -> None:
        """The snapshot's bytes become those of the version. Raises WeightSyncError if the tensors are no longer those
        that were published."""
        self._snapshot.root = ""
        for _ in in_order(self._copy, self._groups):
            pass
        self._snapshot.root = root

    def _encode(self, group: range) -> list[Made]:
        return [self._make(frame, self._source.read(*frame), self._snapshot.frame(frame)) for frame in self._of(group)]

    def _name(self, group: range) -> list[tuple[Made, bytes, Bytes]]:
        read = [(frame, self._source.read(*frame)) for frame in self._of(group)]
        return [(self._make(frame, data, None), blake3.blake3(data.data).digest(), data) for frame, data in read]

    def _make(self, frame: Frame, data: Bytes, base: Bytes | None) -> Made:
        return make(data, base, self.layout[frame.tensor].dtype, self._codec, self.seconds)

    def _copy(self, group: range) -> None:
        for position, frame in zip(group, self._of(group), strict=True):
            if self.records.frames[position].changed or not self.has_base:
                copy = self._snapshot.frame(frame)
                copy[:] = self._source.read(*frame)
                self._check(position, dense_digest(copy))

    def _of(self, group: range) -> list[Frame]:
        return self._frames[group.start : group.stop]

    def _check(self, position: int, dense: bytes) -> None:
        if dense != self.records.frames[position].dense:
            name = self.layout[self._frames[position].tensor].name
            raise WeightSyncError(f"tensor {name!r} changed while it was published")
