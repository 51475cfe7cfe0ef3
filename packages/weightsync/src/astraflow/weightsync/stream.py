"""HEAD of a stream, as its one writer moves it.

Order of things, which is what keeps readers safe: payloads and manifest are durable, then HEAD moves by
compare-and-set, then old versions go. A crash before HEAD moved leaves the last version in place, and files nobody
names, which a later publish removes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import structlog

from .interface import Retention, StaleIncarnation, Store, TensorSpec
from .layout import layout_digest, root_digest
from .leases import remove_old
from .manifest import (
    HEAD,
    AnchorPart,
    DeltaPart,
    FrameRecord,
    Head,
    Manifest,
    VersionRef,
    decode_head,
    encode_head,
    encode_manifest,
    manifest_key,
)
from .retention import retained

log = structlog.get_logger(__name__)


class Stream:
    """A stream and the incarnation of the publisher that writes it. Methods block; one call at a time.

    `head` is HEAD as this publisher wrote or found it; None: the stream has no version yet.
    """

    def __init__(self, store: Store, name: str, incarnation: int, anchor_every: int, retention: Retention) -> None:
        if anchor_every < 1 or incarnation < 0:
            raise ValueError("anchor_every is at least 1, incarnation at least 0")
        self.name = name
        self.incarnation = incarnation
        self.head: Head | None = None
        self._store = store
        self._anchor_every = anchor_every
        self._retention = retention
        self._seen: bytes | None = None
        self._tried = b""
        self._wrote = False

    def take_over(self, version: int) -> None:
        """Read HEAD before `version` is made. Raises StaleIncarnation if the stream is another's, ValueError if
        `version` is too low, CorruptVersion if HEAD is damaged."""
        try:
            self._seen = bytes(self._store.read(HEAD))
        except FileNotFoundError:
            self._seen, self.head, self._wrote = None, None, False
            return
        head = decode_head(self._seen)
        if head.stream != self.name:
            raise ValueError(f"{self._store.url} holds the stream {head.stream!r}, not {self.name!r}")
        newest = head.newest
        if self._seen == self._tried:
            self.head, self._wrote = head, True
        replaced = newest.incarnation == self.incarnation and self._wrote and head != self.head
        if newest.incarnation > self.incarnation or replaced:
            raise StaleIncarnation(
                f"{self._store.url}: incarnation {newest.incarnation} published version {newest.version}; "
                f"this publisher is incarnation {self.incarnation} and has been replaced"
            )
        if newest.incarnation == self.incarnation and version <= newest.version:
            raise ValueError(f"version {version} does not ascend: incarnation {self.incarnation} has {newest.version}")
        self.head = head

    @property
    def newest_root(self) -> str:
        return self.head.newest.root if self.head else ""

    def wants_anchor(self) -> bool:
        """At this publisher's first version, and every `anchor_every` versions."""
        versions = self.head.versions if self.head and self._wrote else ()
        since = next((behind for behind, ref in enumerate(versions) if ref.anchor_bytes), None)
        return since is None or since + 1 >= self._anchor_every

    def describe(
        self,
        version: int,
        layout: Sequence[TensorSpec],
        frame_bytes: int,
        frames: Iterable[FrameRecord],
        deltas: Sequence[DeltaPart],
        anchors: Sequence[AnchorPart],
    ) -> VersionRef:
        """Make the manifest durable; with `deltas`, the base is the version that HEAD names."""
        base = self.head.newest if deltas and self.head else None
        frames = tuple(frames)
        manifest = Manifest(
            stream=self.name,
            incarnation=self.incarnation,
            version=version,
            parent=base.manifest if base else "",
            base_root=base.root if base else "",
            root=root_digest(layout_digest(layout, frame_bytes), (frame.dense for frame in frames)),
            layout=tuple(layout),
            frame_bytes=frame_bytes,
            frames=frames,
            deltas=tuple(deltas),
            anchors=tuple(anchors),
        )
        data, digest = encode_manifest(manifest)
        self._store.put(manifest_key(self.incarnation, version), [data])
        return VersionRef(
            self.incarnation,
            version,
            digest,
            manifest.root,
            manifest.base_root,
            manifest.delta_bytes,
            manifest.anchor_bytes,
        )

    def move(self, ref: VersionRef) -> None:
        """HEAD names `ref`. Raises StaleIncarnation if another moved it since `take_over`, OSError if that HEAD moved
        cannot be told; the next `take_over` then can."""
        earlier = self.head.versions if self.head else ()
        head = Head(stream=self.name, versions=retained((ref, *earlier), self._retention))
        self._tried = encode_head(head)
        try:
            moved = self._store.swap(HEAD, self._seen, self._tried)
        except OSError:
            if not self._holds(self._tried):
                raise
        else:
            if not moved and not self._holds(self._tried):  # a store that tries twice can meet its own first try
                raise StaleIncarnation(
                    f"{self._store.url}: another publisher moved HEAD while version {ref.version} was made"
                )
        self.head, self._wrote = head, True

    def _holds(self, data: bytes) -> bool:
        try:
            return bytes(self._store.read(HEAD)) == data
        except FileNotFoundError:
            return False

    def remove_old(self) -> None:
        """Remove what HEAD no longer names and no reader has leased, of this and of earlier incarnations; never of a
        later one."""
        if self.head is None:
            return
        try:
            remove_old(self._store, self.head.versions, self.head.newest)
        except OSError as error:  # the version is published: that space is not freed must not undo it
            log.warning("old versions not removed", store=self._store.url, stream=self.name, error=str(error))
