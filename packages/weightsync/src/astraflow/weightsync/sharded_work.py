"""One rank's part of a version that several ranks make: its frames, and what it sends for those of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import blake3
import msgspec
import numpy as np
from msgspec.structs import replace

from .channel import Channel, RankLost
from .codecs import Codec, apply
from .frames import Made, Records, dense_digest, make
from .interface import Bytes, CorruptVersion, OffsetStore, Store, WeightSyncError
from .layout import FRAME_BYTES, cut, dense_bytes, offsets, safetensors_header
from .manifest import AnchorPart, FrameRecord, anchor_name, delta_name, part_key
from .seconds import Seconds
from .shards import Assigned, Extent, Held, Piece, assign, extents_of, files_of, held, layout_of, rounds_of
from .sources import read_bytes
from .workers import in_order


class Share(msgspec.Struct, frozen=True):
    """What a rank made: its frames' records in the order of its part, and the (dense, anchor) digests of the frames it
    wrote to a file of an anchor."""

    frames: tuple[FrameRecord, ...] = ()
    size: int = 0
    anchored: tuple[tuple[bytes, bytes], ...] = ()


class Plan:
    """What follows from the ranks' holdings: the same on every rank."""

    def __init__(self, ranks: Sequence[Sequence[Held]]) -> None:
        self.layout = layout_of(ranks)
        if not dense_bytes(self.layout):
            raise ValueError("there are no tensors to publish")
        frames, extents = cut(self.layout, FRAME_BYTES), extents_of(self.layout, ranks)
        self.assigned = assign(self.layout, frames, extents, len(ranks))
        self.rounds = rounds_of(self.assigned, len(ranks), FRAME_BYTES)
        in_files = assign(self.layout, frames, extents, len(ranks), whole_tensors=True)
        self.file_rounds = rounds_of(in_files, len(ranks), FRAME_BYTES)
        self._files = files_of(self.layout, len(ranks))

    def dtype(self, item: Assigned) -> str:
        return self.layout[item.frame.tensor].dtype

    def anchor(self, *, one_file: bool) -> dict[int, tuple[AnchorPart, bytes]]:
        """The files of an anchor and what precedes the dense bytes in them, by the rank that writes this."""
        files = {0: tuple(range(len(self.layout)))} if one_file else self._files
        parts = {}
        for number, (rank, tensors) in enumerate(files.items()):
            header = safetensors_header([self.layout[tensor] for tensor in tensors])
            parts[rank] = (AnchorPart(anchor_name(number, len(files)), len(header), tensors), header)
        return parts


def _of(rank: int, rounds: Sequence[Sequence[Sequence[Assigned]]]) -> list[Assigned]:
    """The frames of a rank in the order in which it makes them."""
    return [item for groups in rounds for item in groups[rank]]


class Work:
    """One rank's part of one version."""

    def __init__(
        self,
        store: Store,
        channel: Channel,
        plan: Plan,
        pieces: Sequence[Piece],
        snapshot: dict[int, Bytes],
        *,
        incarnation: int,
        version: int,
        has_base: bool,
        anchor: bool,
        codec: Codec,
    ) -> None:
        self.plan = plan
        self.seconds = Seconds()
        self._codec: Codec = codec
        self._store = store
        self._channel = channel
        self._rank = channel.rank
        self._snapshot = snapshot
        self._where = (incarnation, version)
        self._has_base = has_base
        self._offsets = isinstance(store, OffsetStore)
        self._anchor = plan.anchor(one_file=self._offsets) if anchor else {}
        self._starts = offsets(plan.layout)
        self._delta_key = part_key(incarnation, version, delta_name(channel.rank, channel.world_size))
        position = {spec.name: at for at, spec in enumerate(plan.layout)}
        self._pieces: dict[int, list[tuple[Held, Piece]]] = {}
        for piece in pieces:
            self._pieces.setdefault(position[piece.name], []).append((held(piece), piece))

    def make(self) -> Share:
        """Make this rank's frames and write its parts. If it fails, the other ranks still get what they wait for."""
        rounds = self._rounds(self.plan.rounds)
        file_rounds = self._rounds(self.plan.file_rounds if self._anchor and not self._offsets else [])
        try:
            with self.seconds.of("write"):
                return self._write(rounds, file_rounds)
        except RankLost:
            raise
        except Exception:
            for _ in chain(rounds, file_rounds):
                pass
            raise

    def _write(self, rounds: Iterator[list[_Parts]], file_rounds: Iterator[list[_Parts]]) -> Share:
        records, digests = Records(self._rank), list[bytes]()
        if self._has_base:
            self._store.put(self._delta_key, self._payloads(rounds, records, digests))
        else:
            for _ in self._payloads(rounds, records, digests):
                pass
        if self._offsets and self._anchor:
            records.name_anchor(digests)
        anchored = self._write_file(file_rounds)
        return Share(tuple(records.frames), records.size, anchored)

    def advance(self, share: Share) -> None:
        """Bring this rank's part of the snapshot to the version, by what it wrote. Raises OSError, CorruptVersion."""
        if self._has_base:
            changed = [
                (item, record)
                for item, record in zip(_of(self._rank, self.plan.rounds), share.frames, strict=True)
                if record.size
            ]
            for _ in in_order(self._apply, changed):
                pass

    def _apply(self, change: tuple[Assigned, FrameRecord]) -> None:
        item, record = change
        frame = self._snapshot[item.position]
        payload = self._store.read(self._delta_key, record.position, record.size)
        if blake3.blake3(payload).digest() != record.payload:
            raise CorruptVersion(f"{self._store.url}/{self._delta_key} does not hold what was written to it")
        apply(record.codec, record.changed, payload, frame, self.plan.dtype(item))
        if dense_digest(frame) != record.dense:
            raise CorruptVersion(
                f"a tensor changed while it was published: {self.plan.layout[item.frame.tensor].name!r}"
            )

    def _payloads(
        self, rounds: Iterator[list[_Parts]], records: Records, digests: list[bytes]
    ) -> Iterator[bytes | memoryview]:
        if self._offsets and self._rank in self._anchor:
            self._write_at([(0, self._anchor[self._rank][1])])
        for group in self.seconds.waiting(in_order(self._encode, rounds)):
            for made, digest in group:
                records.add(made)
                digests.append(digest)
                yield made.delta.payload

    def _encode(self, group: list[_Parts]) -> list[tuple[Made, bytes]]:
        result = []
        for parts in group:
            item, dense = parts.item, self._joined(parts)
            base = self._snapshot[item.position] if self._has_base else None
            made = make(dense, base, self.plan.dtype(item), self._codec, self.seconds)
            digest = b""
            if base is None:
                self._snapshot[item.position] = np.array(dense)
            if self._anchor and self._offsets:
                digest = blake3.blake3(dense.data).digest()
                start = len(self._anchor[0][1]) + self._starts[item.frame.tensor]
                self._write_at([(start + item.frame.offset, dense.data)])
            result.append((made, digest))
        return result

    def _write_at(self, pieces: list[tuple[int, bytes | memoryview]]) -> None:
        assert isinstance(self._store, OffsetStore)
        part, header = self._anchor[0]
        self._store.put_at(part_key(*self._where, part.name), len(header) + dense_bytes(self.plan.layout), pieces)

    def _write_file(self, rounds: Iterator[list[_Parts]]) -> tuple[tuple[bytes, bytes], ...]:
        """This rank's file of an anchor; the digests of its frames."""
        digests: list[tuple[bytes, bytes]] = []

        def dense() -> Iterator[bytes | memoryview]:
            for group in self.seconds.waiting(in_order(self._name, rounds)):
                for made, digest, data in group:
                    digests.append((made, digest))
                    yield data.data

        mine = self._anchor.get(self._rank)
        if mine is not None and not self._offsets:
            part, header = mine
            self._store.put(part_key(*self._where, part.name), chain([header], dense()))
        for _ in rounds:  # a rank without a file still sends
            pass
        return tuple(digests)

    def _name(self, group: list[_Parts]) -> list[tuple[bytes, bytes, Bytes]]:
        read = [self._joined(parts) for parts in group]
        return [(dense_digest(data), blake3.blake3(data.data).digest(), data) for data in read]

    def _rounds(self, rounds: Sequence[Sequence[Sequence[Assigned]]]) -> Iterator[list[_Parts]]:
        """What this rank makes in each round, with what the others sent of it."""
        rank = self._rank
        for groups in rounds:
            outgoing: dict[int, list[bytes | memoryview]] = {}
            for to, group in enumerate(groups):
                for item in group:
                    for extent in item.extents:
                        if extent.rank == rank != to:
                            outgoing.setdefault(to, []).append(self._local(item, extent).data)
            sources = sorted({extent.rank for item in groups[rank] for extent in item.extents} - {rank})
            received = self._channel.exchange(outgoing, sources) if outgoing or sources else {}
            rest = {source: memoryview(data) for source, data in received.items()}
            parts = []
            for item in groups[rank]:
                sent: list[memoryview | None] = []
                for extent in item.extents:
                    sent.append(None)
                    if extent.rank != rank:
                        length = extent.stop - extent.start
                        sent[-1], rest[extent.rank] = rest[extent.rank][:length], rest[extent.rank][length:]
                parts.append(_Parts(item, sent))
            yield parts

    def _joined(self, parts: _Parts) -> Bytes:
        """The frame's bytes: a view where one rank holds it."""
        buffers = [
            self._local(parts.item, extent) if sent is None else np.frombuffer(sent, np.uint8)
            for extent, sent in zip(parts.item.extents, parts.sent, strict=True)
        ]
        return buffers[0] if len(buffers) == 1 else np.concatenate(buffers)

    def _local(self, item: Assigned, extent: Extent) -> Bytes:
        for kept, piece in self._pieces[item.frame.tensor]:
            if kept.start <= extent.start and extent.stop <= kept.stop:
                return read_bytes(piece.data, extent.start - kept.start, extent.stop - extent.start)
        raise AssertionError(f"{extent} was never held")


class _Parts(NamedTuple):
    """A frame and, for each of its extents, what another rank sent of it; None: it is here."""

    item: Assigned
    sent: list[memoryview | None]


def merged(plan: Plan, shares: Sequence[Share]) -> list[FrameRecord]:
    """All frames' records in order. Raises WeightSyncError where an anchor's bytes are others than the frames'."""
    frames: dict[int, FrameRecord] = {}
    for rank, share in enumerate(shares):
        for item, record in zip(_of(rank, plan.rounds), share.frames, strict=True):
            frames[item.position] = record
    for rank, share in enumerate(shares):
        for item, (dense, anchor) in zip(_of(rank, plan.file_rounds), share.anchored, strict=False):
            record = frames[item.position]
            if record.dense != dense:
                name = plan.layout[item.frame.tensor].name
                raise WeightSyncError(f"tensor {name!r} changed while it was published")
            frames[item.position] = replace(record, anchor=anchor)
    return [frames[position] for position in range(len(frames))]
