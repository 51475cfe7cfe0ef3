"""What a store holds, from `HEAD` and the manifests alone: no payload is read."""

from __future__ import annotations

import anyio.to_thread
import msgspec

from .frames import count_codecs, density
from .interface import Store
from .layout import dense_bytes
from .manifest import HEAD, Head, Manifest, VersionRef, decode_head, read_manifest
from .workers import run_all


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One version. `density` is the share of values that its delta changes, `codecs` how many changed frames are in
    which codec, `chain` the deltas to follow from the nearest anchor (0: it has one itself, -1: none leads here)."""

    incarnation: int
    version: int
    root: str
    tensors: int
    dense_bytes: int
    frames: int
    changed_frames: int
    anchor_bytes: int
    delta_bytes: int
    density: float
    codecs: dict[str, int]
    parts: int
    chain: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A store's stream; `versions` newest first, as far as they can be pulled. `total_bytes` are their payloads'."""

    url: str
    stream: str
    total_bytes: int
    versions: tuple[VersionInfo, ...]


async def inspect(store: Store) -> Inspection:
    """Raises FileNotFoundError if nothing was published, CorruptVersion for a damaged HEAD or manifest."""
    head = await anyio.to_thread.run_sync(read_head, store)
    manifests = await run_all(lambda ref: read_manifest(store, ref), head.versions)
    return Inspection(
        url=store.url,
        stream=head.stream,
        total_bytes=sum(ref.delta_bytes + ref.anchor_bytes for ref in head.versions),
        versions=tuple(
            _describe(ref, manifest, distance)
            for ref, manifest, distance in zip(head.versions, manifests, chain_lengths(head), strict=True)
        ),
    )


def read_head(store: Store) -> Head:
    """Raises FileNotFoundError, CorruptVersion."""
    try:
        return decode_head(store.read(HEAD))
    except FileNotFoundError:
        raise FileNotFoundError(f"{store.url}: nothing has been published there, it has no HEAD") from None


def chain_lengths(head: Head) -> list[int]:
    """For each version the deltas from the nearest anchor to it; -1 where none leads there."""
    lengths: list[int] = []
    for older, ref in zip((None, *reversed(head.versions)), reversed(head.versions), strict=False):
        linked = older is not None and ref.base_root == older.root and lengths[-1] >= 0
        lengths.append(0 if ref.anchor_bytes else lengths[-1] + 1 if linked else -1)
    return lengths[::-1]


def _describe(ref: VersionRef, manifest: Manifest, chain: int) -> VersionInfo:
    return VersionInfo(
        incarnation=ref.incarnation,
        version=ref.version,
        root=ref.root,
        tensors=len(manifest.layout),
        dense_bytes=dense_bytes(manifest.layout),
        frames=len(manifest.frames),
        changed_frames=sum(1 for frame in manifest.frames if frame.size),
        anchor_bytes=ref.anchor_bytes,
        delta_bytes=ref.delta_bytes,
        density=density(manifest.layout, manifest.frames) if manifest.deltas else 1.0,
        codecs=count_codecs(manifest.frames),
        parts=len(manifest.deltas) + len(manifest.anchors),
        chain=chain,
    )
