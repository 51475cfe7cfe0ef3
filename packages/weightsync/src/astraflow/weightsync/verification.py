"""Every digest of a store computed anew: manifests, payloads, anchors, and the dense frames that they make.

Each payload byte is read once. Memory is bounded by a few frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import anyio.to_thread
import blake3
import msgspec
import numpy as np

from .codecs import apply
from .contents import Extent, contents
from .frames import dense_digest
from .inspection import read_head
from .interface import Bytes, CorruptVersion, Store
from .layout import Frame, cut, group_frames
from .leases import lease
from .manifest import FrameRecord, Manifest, VersionRef, manifest_key, part_key, placed, read_manifest
from .progress import Counter, Progress
from .workers import run_all


class Damage(msgspec.Struct, frozen=True, order=True):
    """What is wrong with a version: `key` is the blob, `what` the fault in it."""

    incarnation: int
    version: int
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and `damage`, oldest version first; `unapplied` deltas start from a version that is no longer
    kept or is damaged, so that only their payloads could be checked."""

    url: str
    stream: str
    versions: int
    frames: int
    payload_bytes: int
    unapplied: int
    damage: tuple[Damage, ...]


class _Version(NamedTuple):
    """`placed` is where each tensor is in its anchor, `headers` what else is in that: (key, extent)."""

    ref: VersionRef
    manifest: Manifest
    placed: dict[int, tuple[str, int]]
    headers: tuple[tuple[str, Extent], ...]


class _Checked(NamedTuple):
    """Of some frames: dense frames verified, deltas that could not be applied, what is wrong."""

    frames: int
    unapplied: int
    damage: list[Damage]


async def verify(store: Store, progress: Progress | None = None) -> Verification:
    """Raises FileNotFoundError if nothing was published, CorruptVersion if HEAD is damaged, OSError where the store
    cannot be read. Holds a lease on what it reads, where the store takes one."""
    head = await anyio.to_thread.run_sync(read_head, store)
    async with lease(store, head.versions):
        counted = Counter(progress, sum(ref.delta_bytes + ref.anchor_bytes for ref in head.versions))
        loaded = await run_all(partial(_load, store), list(reversed(head.versions)))
        versions = [version for version in loaded if isinstance(version, _Version)]
        damage = [fault for fault in loaded if isinstance(fault, Damage)]
        frames = unapplied = 0
        for version in versions:
            damage += await anyio.to_thread.run_sync(_check_headers, store, version, counted)
        for run in _runs(versions):
            layout, size = run[0].manifest.layout, run[0].manifest.frame_bytes
            cuts = cut(layout, size)
            for checked in await run_all(partial(_check_group, store, run, counted, cuts), group_frames(cuts, size)):
                frames += checked.frames
                unapplied += checked.unapplied
                damage += checked.damage
        named = {(ref.incarnation, ref.version) for ref in (await anyio.to_thread.run_sync(read_head, store)).versions}
    return Verification(
        url=store.url,
        stream=head.stream,
        versions=len(head.versions),
        frames=frames,
        payload_bytes=counted.done,
        unapplied=unapplied,
        damage=tuple(sorted(fault for fault in set(damage) if (fault.incarnation, fault.version) in named)),
    )


def _load(store: Store, ref: VersionRef) -> _Version | Damage:
    try:
        manifest = read_manifest(store, ref)
        blobs = contents(ref, manifest)
    except FileNotFoundError:
        return Damage(ref.incarnation, ref.version, manifest_key(ref.incarnation, ref.version), "is missing")
    except CorruptVersion as error:
        return Damage(ref.incarnation, ref.version, manifest_key(ref.incarnation, ref.version), str(error))
    headers = tuple((blob.key, blob.extents[0]) for blob in blobs if blob.is_anchor)
    return _Version(ref, manifest, placed(manifest), headers)


def _check_headers(store: Store, version: _Version, counted: Counter) -> list[Damage]:
    """What precedes the tensors in an anchor, for those who open it as a safetensors file."""
    damage = []
    for key, header in version.headers:
        data = _read(store, version.ref, key, header)
        damage += [data] if isinstance(data, Damage) else []
        counted.add(header.stop)
    return damage


def _runs(versions: Sequence[_Version]) -> Iterator[list[_Version]]:
    """Consecutive versions, oldest first, with one layout."""
    run: list[_Version] = []
    for version in versions:
        same = run and (run[-1].manifest.layout, run[-1].manifest.frame_bytes) == (
            version.manifest.layout,
            version.manifest.frame_bytes,
        )
        if run and not same:
            yield run
            run = []
        run.append(version)
    if run:
        yield run


def _check_group(
    store: Store, run: Sequence[_Version], counted: Counter, frames: Sequence[Frame], group: range
) -> _Checked:
    parts = [_check_frame(store, run, counted, position, frames[position]) for position in group]
    return _Checked(
        sum(part.frames for part in parts),
        sum(part.unapplied for part in parts),
        [fault for part in parts for fault in part.damage],
    )


def _check_frame(store: Store, run: Sequence[_Version], counted: Counter, position: int, frame: Frame) -> _Checked:
    """One frame through all versions, as far as its bytes (`current`, those of the version `root`) are known."""
    damage: list[Damage] = []
    checked = unapplied = 0
    current: Bytes | None = None
    root, known = "", b""
    for version in run:
        ref, record = version.ref, version.manifest.frames[position]
        if ref.base_root != root:
            current = None
        found: list[Bytes | Damage | None] = []
        if record.size:
            payload = _read(store, ref, *_delta_extent(version, record, frame))
            counted.add(record.size)
            unapplied += current is None and not isinstance(payload, Damage)
            found.append(payload if isinstance(payload, Damage) else _applied(version, record, payload, current, frame))
        elif current is not None and known != record.dense:
            found.append(_wrong(version, frame, "is unchanged, but has another digest than before"))
        if ref.anchor_bytes:
            found.append(_from_anchor(store, version, record, frame))
            counted.add(frame.length)
        for result in found:
            if isinstance(result, Damage):
                damage.append(result)
            current = None if isinstance(result, Damage) else result
        checked += current is not None
        root, known = (ref.root, record.dense) if current is not None else ("", b"")
    return _Checked(checked, unapplied, damage)


def _delta_extent(version: _Version, record: FrameRecord, frame: Frame) -> tuple[str, Extent]:
    key = part_key(version.ref.incarnation, version.ref.version, version.manifest.deltas[record.part].name)
    name = version.manifest.layout[frame.tensor].name
    return key, Extent(record.position, record.position + record.size, record.payload, name)


def _applied(
    version: _Version, record: FrameRecord, payload: memoryview, current: Bytes | None, frame: Frame
) -> Bytes | Damage | None:
    """The frame after a delta; None where what it starts from is not known."""
    if current is None:
        return None
    try:
        apply(record.codec, record.changed, payload, current, version.manifest.layout[frame.tensor].dtype)
    except CorruptVersion as error:
        return _wrong(version, frame, f"has a delta that cannot be applied: {error}")
    if dense_digest(current) != record.dense:
        return _wrong(version, frame, "does not have the digest it should after its delta")
    return current


def _from_anchor(store: Store, version: _Version, record: FrameRecord, frame: Frame) -> Bytes | Damage:
    name, start = version.placed[frame.tensor]
    key = part_key(version.ref.incarnation, version.ref.version, name)
    first = start + frame.offset
    extent = Extent(first, first + frame.length, record.anchor, version.manifest.layout[frame.tensor].name)
    data = _read(store, version.ref, key, extent)
    if isinstance(data, Damage):
        return data
    dense = np.array(np.frombuffer(data, np.uint8))
    if dense_digest(dense) != record.dense:
        return _wrong(version, frame, "has two digests that contradict each other")
    return dense


def _read(store: Store, ref: VersionRef, key: str, extent: Extent) -> memoryview | Damage:
    """Bytes that have the digest they should."""
    start, stop, digest, name = extent
    try:
        data = memoryview(store.read(key, start, stop - start))
    except FileNotFoundError:
        return Damage(ref.incarnation, ref.version, key, "is missing")
    if len(data) < stop - start:
        return Damage(ref.incarnation, ref.version, key, f"ends before byte {stop}")
    if blake3.blake3(data).digest() != digest:
        return Damage(ref.incarnation, ref.version, key, f"is damaged at {name!r}, bytes {start} to {stop}")
    return data


def _wrong(version: _Version, frame: Frame, told: str) -> Damage:
    ref, name = version.ref, version.manifest.layout[frame.tensor].name
    where = f"tensor {name!r}, bytes {frame.offset} to {frame.offset + frame.length}, {told}"
    return Damage(ref.incarnation, ref.version, manifest_key(ref.incarnation, ref.version), where)
