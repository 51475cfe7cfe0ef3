"""What is written about a version: `HEAD` names the versions that can be pulled, a manifest describes one.

The chain of trust: `HEAD` carries its own digest, names each manifest by digest, a manifest names each payload by
digest, and the root is the name of the dense bytes they make. What does not match is a CorruptVersion.
"""

from __future__ import annotations

import re
from typing import TypeVar

import blake3
import msgspec

from .interface import CorruptVersion, Store, TensorSpec
from .layout import check_layout, dense_bytes, frame_count, layout_digest, root_digest

FORMAT = 1
HEAD = "HEAD"
MAX_FRAME_BYTES = 64 << 20

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.(ws|safetensors)")


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


class DeltaPart(msgspec.Struct, frozen=True, array_like=True):
    """A blob of payloads, `size` bytes, written by one rank."""

    name: str
    size: int


class AnchorPart(msgspec.Struct, frozen=True, array_like=True):
    """A safetensors file with the tensors at these positions of the layout, in this order without gaps, their dense
    bytes from `start` on."""

    name: str
    start: int
    tensors: tuple[int, ...]


class FrameRecord(msgspec.Struct, frozen=True, array_like=True):
    """One frame. `dense` is the xxh3-128 [16] of its bytes in this version. Its delta is `changed` elements in
    `codec`, at [position, position + size) of the `part`-th delta part, blake3 `payload` [32]; size 0: unchanged, no
    payload. `anchor` is the blake3 [32] of its dense bytes where the version has an anchor, else empty."""

    dense: bytes
    changed: int
    codec: int
    part: int
    position: int
    size: int
    payload: bytes
    anchor: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One version. `parent` is the digest of the base's manifest ("" without a delta); `frames` are in the order that
    `cut(layout, frame_bytes)` makes. Its blobs are `deltas` and `anchors`: one of each from one writer, one a rank
    from several."""

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
    deltas: tuple[DeltaPart, ...]
    anchors: tuple[AnchorPart, ...]

    @property
    def delta_bytes(self) -> int:
        return sum(part.size for part in self.deltas)

    @property
    def anchor_bytes(self) -> int:
        return sum(part.start for part in self.anchors) + (dense_bytes(self.layout) if self.anchors else 0)


Record = TypeVar("Record", Head, Manifest)


def part_key(incarnation: int, version: int, name: str) -> str:
    """Where a part of a version is."""
    return f"{incarnation}/v/{version}/{name}"


def manifest_key(incarnation: int, version: int) -> str:
    return part_key(incarnation, version, "manifest.msgpack")


def delta_name(rank: int = 0, world_size: int = 1) -> str:
    return "delta.ws" if world_size == 1 else f"delta-{rank + 1:05d}-of-{world_size:05d}.ws"


def anchor_name(rank: int = 0, world_size: int = 1) -> str:
    """As Hugging Face names them."""
    return "model.safetensors" if world_size == 1 else f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors"


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


def read_manifest(store: Store, ref: VersionRef) -> Manifest:
    """As `decode_manifest`, from where a store has it. Raises FileNotFoundError too."""
    return decode_manifest(store.read(manifest_key(ref.incarnation, ref.version)), ref)


def placed(manifest: Manifest) -> dict[int, tuple[str, int]]:
    """In which part of its anchor each tensor is, and at which byte; empty without an anchor."""
    places = {}
    for part in manifest.anchors:
        position = part.start
        for tensor in part.tensors:
            places[tensor] = (part.name, position)
            position += manifest.layout[tensor].nbytes
    return places


def _check(manifest: Manifest, ref: VersionRef, name: str) -> None:
    check_layout(manifest.layout)
    if manifest.frame_bytes % 8 or not 0 < manifest.frame_bytes <= MAX_FRAME_BYTES:
        raise CorruptVersion(f"{name} has frames of {manifest.frame_bytes} bytes")
    if len(manifest.frames) != frame_count(manifest.layout, manifest.frame_bytes):
        raise CorruptVersion(f"{name} has {len(manifest.frames)} frames, its layout another number")
    _check_parts(manifest, name)
    for frame in manifest.frames:
        room = manifest.deltas[frame.part].size if 0 <= frame.part < len(manifest.deltas) else 0
        within = 0 <= frame.size <= manifest.frame_bytes and 0 <= frame.position <= room - frame.size
        digests = len(frame.dense) == 16 and len(frame.payload) == (32 if frame.size else 0)
        if (frame.size and not within) or not digests or len(frame.anchor) != (32 if ref.anchor_bytes else 0):
            raise CorruptVersion(f"{name} has a frame that contradicts it: {frame}")
    root = root_digest(layout_digest(manifest.layout, manifest.frame_bytes), (frame.dense for frame in manifest.frames))
    told = (manifest.incarnation, manifest.version, root, manifest.base_root)
    if told != (ref.incarnation, ref.version, ref.root, ref.base_root) or manifest.root != root:
        raise CorruptVersion(f"{name} is of another version than HEAD says")
    if (manifest.delta_bytes, manifest.anchor_bytes) != (ref.delta_bytes, ref.anchor_bytes):
        raise CorruptVersion(f"{name} has parts of other sizes than HEAD says")


def _check_parts(manifest: Manifest, name: str) -> None:
    """Names that stay in the version's directory, sizes that add up, every tensor in one part of an anchor."""
    names = [part.name for part in manifest.deltas] + [part.name for part in manifest.anchors]
    if len(set(names)) != len(names) or not all(map(_PART.fullmatch, names)):
        raise CorruptVersion(f"{name} has parts with names that repeat or cannot be")
    if min((part.size for part in manifest.deltas), default=0) < 0:
        raise CorruptVersion(f"{name} has a part of negative size")
    if min((part.start for part in manifest.anchors), default=0) < 0:
        raise CorruptVersion(f"{name} has a part that starts before it does")
    held = sorted(tensor for part in manifest.anchors for tensor in part.tensors)
    if manifest.anchors and held != list(range(len(manifest.layout))):
        raise CorruptVersion(f"{name} has an anchor that does not hold every tensor once")


def _decode(data: bytes | memoryview, kind: type[Record], name: str) -> Record:
    try:
        record = msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptVersion(f"{name} cannot be read: {error}") from error
    if record.format != FORMAT:
        raise CorruptVersion(f"{name} has format {record.format}; this package reads {FORMAT}")
    return record
