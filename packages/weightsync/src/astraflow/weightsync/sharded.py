"""Publishing from several ranks at once, each the rows it holds; nobody gathers the model.

A version is made in one order on all ranks: agree on what to do, make frames round by round, tell rank 0, hear whether
HEAD moved, advance. Every rank encodes and writes the frames it owns (`astraflow.weightsync.shards`) and holds their
bytes as its part of the snapshot. Rank 0 writes the manifest and HEAD, after all digests are in.

Invariant: either HEAD names a version that every rank finished, or it names the last one. A rank that fails tells the
others, and all raise; one that dies leaves the others with a RankLost. In either case the snapshots of the ranks
are compared by digest before the next version, which has no delta where they are not all the version that HEAD names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import anyio
import anyio.to_thread
import blake3
import msgspec
import structlog

from .channel import Channel, RankLost, broadcast, gather
from .codecs import Codec, known
from .contents import anchor_index
from .frames import count_codecs, density
from .interface import (
    Bytes,
    CorruptVersion,
    OffsetStore,
    PublishReport,
    Retention,
    StaleIncarnation,
    Store,
    WeightSyncError,
)
from .layout import FRAME_BYTES, INDEX, dense_bytes
from .manifest import DeltaPart, delta_name, part_key
from .retention import DEFAULT
from .sharded_work import Plan, Share, Work, merged
from .shards import Held, Piece, held
from .stream import Stream

log = structlog.get_logger(__name__)

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (StaleIncarnation, CorruptVersion, WeightSyncError, ValueError, TypeError)
}


class _Failure(msgspec.Struct, frozen=True):
    """What went wrong on a rank, for the others."""

    rank: int
    kind: str
    text: str

    def error(self) -> Exception:
        return _ERRORS.get(self.kind, WeightSyncError)(f"rank {self.rank}: {self.text}")


class _Offer(msgspec.Struct, frozen=True):
    """What a rank would publish, and what its snapshot is: `root` of the version, `plan` by which frames are owned."""

    stream: str
    incarnation: int
    version: int
    held: tuple[Held, ...] = ()
    root: str = ""
    plan: str = ""
    failure: _Failure | None = None


class _Order(msgspec.Struct, frozen=True):
    """What rank 0 decides: every rank's holdings, and what to write."""

    held: tuple[tuple[Held, ...], ...] = ()
    plan: str = ""
    has_base: bool = False
    anchor: bool = False
    failure: _Failure | None = None


class _Done(msgspec.Struct, frozen=True):
    """What a rank made, or why not."""

    share: Share = Share()
    failure: _Failure | None = None


class _Outcome(msgspec.Struct, frozen=True):
    """What rank 0 published, or why not."""

    root: str = ""
    delta_bytes: int = 0
    anchor_bytes: int = 0
    density: float = 1.0
    codecs: dict[str, int] = {}
    failure: _Failure | None = None


Message = TypeVar("Message", _Offer, _Order, _Done, _Outcome)


class ShardedPublisher:
    """One rank's part of the one writer of a stream; `Publisher` for a model that lies on several ranks.

    All ranks are made alike and publish the same versions. Each holds its share of one host copy of the tensors. The
    versions are those that `Publisher` would write, but for being in several parts: one delta a rank; an anchor is one
    file where the store can be written at offsets (a directory), else a Hugging Face directory of one file a rank with
    its index. The first version is an anchor.
    """

    def __init__(
        self,
        store: Store,
        channel: Channel,
        *,
        stream: str,
        incarnation: int,
        anchor_every: int = 10,
        retention: Retention = DEFAULT,
        codec: Codec = "auto",
    ) -> None:
        self._codec = known(codec)
        self._store = store
        self._channel = channel
        self._stream = Stream(store, stream, incarnation, anchor_every, retention)
        self._root = ""
        self._plan_digest = ""
        self._snapshot: dict[int, Bytes] = {}
        self._plan: tuple[str, Plan] | None = None
        self._cause: Exception | None = None
        self._lost = False
        self._busy = anyio.Lock()

    async def publish(self, pieces: Sequence[Piece], version: int) -> PublishReport:
        """Write `version` together with the other ranks; when this returns it is durable and HEAD names it.

        `pieces` must not change meanwhile. Raises what `Publisher.publish` raises, on every rank; WeightSyncError where
        another rank failed, RankLost where one is gone. Once begun it is not cancelled: the other ranks wait for this
        one.
        """
        async with self._busy:
            return await anyio.to_thread.run_sync(self._publish, pieces, version)

    def _publish(self, pieces: Sequence[Piece], version: int) -> PublishReport:
        if self._lost:
            raise RankLost("a rank was lost before: make the publisher and its channel anew, on every rank")
        started = time.perf_counter()
        self._cause = None
        try:
            order = self._agree(pieces, version)
            self._check(order.failure)
            work = self._work(order, pieces, version)
            outcome, share = self._make(work, order, version)
            self._check(outcome.failure)
        except RankLost:
            self._lost = True
            raise
        self._advance(work, share, outcome.root, order.plan)
        if self._channel.rank == 0:
            self._stream.remove_old()
        seconds = work.seconds
        report = PublishReport(
            version=version,
            digest=outcome.root,
            anchor=order.anchor,
            dense_bytes=dense_bytes(work.plan.layout),
            delta_bytes=outcome.delta_bytes,
            anchor_bytes=outcome.anchor_bytes,
            density=outcome.density,
            codecs=outcome.codecs,
            seconds=time.perf_counter() - started,
            diff_s=seconds["diff"],
            encode_s=seconds["encode"],
            write_s=seconds["write"] - seconds["wait"],
        )
        log.info("published", store=self._store.url, rank=self._channel.rank, **msgspec.structs.asdict(report))
        return report

    def _agree(self, pieces: Sequence[Piece], version: int) -> _Order:
        where = (self._stream.name, self._stream.incarnation, version)
        try:
            offer = _Offer(*where, tuple(held(piece) for piece in pieces), self._root, self._plan_digest)
        except (TypeError, ValueError, AttributeError) as error:
            offer = _Offer(*where, failure=self._failure(error))
        offers = gather(self._channel, _encode(offer))
        order = _Order()
        if offers:
            try:
                order = self._order([_decode(data, _Offer) for data in offers])
            except Exception as error:
                order = _Order(failure=self._failure(error))
        return _decode(broadcast(self._channel, _encode(order)), _Order)

    def _order(self, offers: Sequence[_Offer]) -> _Order:
        for rank, offer in enumerate(offers):
            if offer.failure:
                return _Order(failure=offer.failure)
            told, mine = (offer.stream, offer.incarnation, offer.version), offers[0]
            if told != (mine.stream, mine.incarnation, mine.version):
                raise ValueError(f"rank {rank} publishes {told}, not {(mine.stream, mine.incarnation, mine.version)}")
        self._stream.take_over(offers[0].version)
        ranks = tuple(offer.held for offer in offers)
        digest = blake3.blake3(_encode(ranks)).hexdigest()
        self._planned(ranks, digest)
        newest = self._stream.newest_root
        has_base = bool(newest) and all((offer.root, offer.plan) == (newest, digest) for offer in offers)
        return _Order(ranks, digest, has_base, not has_base or self._stream.wants_anchor())

    def _planned(self, ranks: Sequence[Sequence[Held]], digest: str) -> Plan:
        """Raises ValueError for what cannot be published."""
        if self._plan is None or self._plan[0] != digest:
            self._plan = (digest, Plan(ranks))
        return self._plan[1]

    def _work(self, order: _Order, pieces: Sequence[Piece], version: int) -> Work:
        if not order.has_base:
            self._root, self._snapshot = "", {}
        return Work(
            self._store,
            self._channel,
            self._planned(order.held, order.plan),
            pieces,
            self._snapshot,
            incarnation=self._stream.incarnation,
            version=version,
            has_base=order.has_base,
            anchor=order.anchor,
            codec=self._codec,
        )

    def _make(self, work: Work, order: _Order, version: int) -> tuple[_Outcome, Share]:
        try:
            done = _Done(work.make())
        except RankLost:
            raise
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            done = _Done(failure=self._failure(error))
        shares = gather(self._channel, _encode(done))
        outcome = _Outcome()
        if shares:
            try:
                outcome = self._commit(work.plan, order, [_decode(data, _Done) for data in shares], version)
            except Exception as error:
                outcome = _Outcome(failure=self._failure(error))
        return _decode(broadcast(self._channel, _encode(outcome)), _Outcome), done.share

    def _commit(self, plan: Plan, order: _Order, done: Sequence[_Done], version: int) -> _Outcome:
        """Manifest and HEAD, on rank 0."""
        for rank in done:
            if rank.failure:
                return _Outcome(failure=rank.failure)
        shares = [rank.share for rank in done]
        frames = merged(plan, shares)
        deltas = [DeltaPart(delta_name(rank, len(shares)), share.size) for rank, share in enumerate(shares)]
        anchors = []
        if order.anchor:
            anchors = [part for part, _ in plan.anchor(one_file=isinstance(self._store, OffsetStore)).values()]
            if len(anchors) > 1:
                key = part_key(self._stream.incarnation, version, INDEX)
                self._store.put(key, [anchor_index(plan.layout, anchors)])
        ref = self._stream.describe(
            version, plan.layout, FRAME_BYTES, frames, deltas if order.has_base else (), anchors
        )
        self._stream.move(ref)
        changed = density(plan.layout, frames) if order.has_base else 1.0
        return _Outcome(ref.root, ref.delta_bytes, ref.anchor_bytes, changed, count_codecs(frames))

    def _advance(self, work: Work, share: Share, root: str, plan: str) -> None:
        self._root, self._plan_digest = "", plan  # until it has all of the new bytes
        try:
            work.advance(share)
        except (OSError, WeightSyncError) as error:  # the version is published
            log.warning("the next version has no delta", store=self._store.url, error=str(error))
            return
        self._root = root

    def _failure(self, error: Exception) -> _Failure:
        self._cause = error
        return _Failure(self._channel.rank, type(error).__name__, str(error))

    def _check(self, failure: _Failure | None) -> None:
        if failure:
            raise self._cause if self._cause and failure.rank == self._channel.rank else failure.error()


def _encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: type[Message]) -> Message:
    return msgspec.msgpack.decode(data, type=kind)
