"""What is written about a version: `HEAD` names the versions that can be pulled, a manifest describes one.

The chain of trust: `HEAD` carries its own digest, names each manifest by digest, a manifest names each payload by
digest, and the root is the name of the dense bytes they make. What does not match is a CorruptVersion.
"""

from __future__ import annotations

from typing import TypeVar

import blake3
import msgspec

from .interface import CorruptVersion, TensorSpec
from .layout import check_layout, dense_bytes, frame_count, layout_digest, root_digest

FORMAT = 1
HEAD = "HEAD"
MAX_FRAME_BYTES = 64 << 20


class VersionRef(msgspec.Struct, frozen=True, array_like=True):
    """One version as `HEAD` lists it: enough to choose a path without reading its manifest.

    `manifest` is the hex blake3 of the manifest's bytes; `root` names the dense bytes; `base_root` those its delta
    starts from ("": no delta); `anchor_bytes` 0: no anchor.
    """

    incarnation: int
    version: int
    manifest: str
    root: str
    base_root: str
    delta_bytes: int
    anchor_bytes: int


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of a stream that can be pulled, newest first; the last one has an anchor."""

    stream: str
    versions: tuple[VersionRef, ...]
    format: int = FORMAT

    @property
    def newest(self) -> VersionRef:
        return self.versions[0]


class FrameRecord(msgspec.Struct, frozen=True, array_like=True):
    """One frame. `dense` is the xxh3-128 [16] of its bytes in this version. Its delta is `changed` elements in
    `codec`, at [position, position + size) of the delta blob, blake3 `payload` [32]; size 0: unchanged, no payload.
    `anchor` is the blake3 [32] of its dense bytes where the version has an anchor, else empty."""

    dense: bytes
    changed: int
    codec: int
    position: int
    size: int
    payload: bytes
    anchor: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version. `parent` is the digest of the base's manifest ("" without a delta); `frames` are in the order that
    `cut(layout, frame_bytes)` makes; the anchor's dense bytes start at `anchor_start` of its blob."""

    format: int = FORMAT
    stream: str
    incarnation: int
    version: int
    parent: str
    base_root: str
    root: str
    layout: tuple[TensorSpec, ...]
    frame_bytes: int
    frames: tuple[FrameRecord, ...]
    delta_bytes: int
    anchor_start: int


Record = TypeVar("Record", Head, Manifest)


def delta_key(incarnation: int, version: int) -> str:
    return f"{incarnation}/v/{version}/delta.ws"


def anchor_key(incarnation: int, version: int) -> str:
    return f"{incarnation}/v/{version}/model.safetensors"


def manifest_key(incarnation: int, version: int) -> str:
    return f"{incarnation}/v/{version}/manifest.msgpack"


def encode_head(head: Head) -> bytes:
    body = msgspec.msgpack.encode(head)
    return blake3.blake3(body).digest() + body


def decode_head(data: bytes | memoryview) -> Head:
    """Raises CorruptVersion."""
    body = data[32:]
    if blake3.blake3(body).digest() != bytes(data[:32]):
        raise CorruptVersion("HEAD does not have the digest it should; remove it if no publisher writes it again")
    head = _decode(body, Head, "HEAD")
    if not head.versions or not head.versions[-1].anchor_bytes:
        raise CorruptVersion("HEAD names no version with an anchor")
    return head


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Its bytes and their hex blake3."""
    data = msgspec.msgpack.encode(manifest)
    return data, blake3.blake3(data).hexdigest()


def decode_manifest(data: bytes | memoryview, ref: VersionRef) -> Manifest:
    """The manifest that `ref` names. Raises CorruptVersion for any other, or one that contradicts itself."""
    name = f"the manifest of version {ref.version} (incarnation {ref.incarnation})"
    if blake3.blake3(data).hexdigest() != ref.manifest:
        raise CorruptVersion(f"{name} does not have the digest it should")
    manifest = _decode(data, Manifest, name)
    _check(manifest, ref, name)
    return manifest


def _check(manifest: Manifest, ref: VersionRef, name: str) -> None:
    check_layout(manifest.layout)
    if manifest.frame_bytes % 8 or not 0 < manifest.frame_bytes <= MAX_FRAME_BYTES:
        raise CorruptVersion(f"{name} has frames of {manifest.frame_bytes} bytes")
    if len(manifest.frames) != frame_count(manifest.layout, manifest.frame_bytes):
        raise CorruptVersion(f"{name} has {len(manifest.frames)} frames, its layout another number")
    for frame in manifest.frames:
        within = 0 <= frame.size <= manifest.frame_bytes and 0 <= frame.position <= manifest.delta_bytes - frame.size
        digests = len(frame.dense) == 16 and len(frame.payload) == (32 if frame.size else 0)
        if not within or not digests or len(frame.anchor) != (32 if ref.anchor_bytes else 0):
            raise CorruptVersion(f"{name} has a frame that contradicts it: {frame}")
    if ref.anchor_bytes and ref.anchor_bytes != manifest.anchor_start + dense_bytes(manifest.layout):
        raise CorruptVersion(f"{name} has an anchor of {ref.anchor_bytes} bytes, its layout another size")
    root = root_digest(layout_digest(manifest.layout, manifest.frame_bytes), (frame.dense for frame in manifest.frames))
    told = (manifest.incarnation, manifest.version, manifest.root, manifest.base_root, manifest.delta_bytes)
    if told != (ref.incarnation, ref.version, root, ref.base_root, ref.delta_bytes) or root != ref.root:
        raise CorruptVersion(f"{name} is of another version than HEAD says")


def _decode(data: bytes | memoryview, kind: type[Record], name: str) -> Record:
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptVersion(f"{name} cannot be read: {error}") from error
    if record.format != FORMAT:
        raise CorruptVersion(f"{name} has format {record.format}; this package reads {FORMAT}")
    return record
