from __future__ import annotations

from collections.abc import Callable
from typing import Any

import blake3
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from astraflow.weightsync import CorruptVersion, MemoryStore, Publisher
from astraflow.weightsync.manifest import (
    HEAD,
    AnchorPart,
    DeltaPart,
    Head,
    Manifest,
    VersionRef,
    decode_head,
    decode_manifest,
    encode_head,
    encode_manifest,
    manifest_key,
)

Pair = tuple[Manifest, VersionRef]


@pytest.fixture
async def pair(small_frames: int) -> Pair:
    """The second version of a stream: it has a delta and no anchor."""
    store = MemoryStore("manifest")
    try:
        publisher = Publisher(store, stream="s", incarnation=1)
        tensor = np.arange(5000, dtype=np.float32)
        await publisher.publish({"t": tensor}, 0)
        tensor[7] = 0
        await publisher.publish({"t": tensor}, 1)
        ref = decode_head(store.read(HEAD)).newest
        return decode_manifest(store.read(manifest_key(1, 1)), ref), ref
    finally:
        store.close()


async def test_any_flipped_bit_is_refused(pair: Pair) -> None:
    manifest, ref = pair
    rng = np.random.default_rng(0)
    cases: list[tuple[bytes, Callable[[bytes], Any]]] = [
        (encode_manifest(manifest)[0], lambda data: decode_manifest(data, ref)),
        (encode_head(Head(stream="s", versions=(replace(ref, anchor_bytes=9),))), decode_head),
    ]
    for whole, read in cases:
        read(whole)
        for position in rng.integers(0, len(whole), 200):
            bad = bytearray(whole)
            bad[position] ^= 1 << int(rng.integers(0, 8))
            with pytest.raises(CorruptVersion):
                read(bytes(bad))
        for length in (0, 1, 31, 32, len(whole) - 1):
            with pytest.raises(CorruptVersion):
                read(whole[:length])


@pytest.mark.parametrize("tensors", [(), (0, 0), (1,), (-1,)])
async def test_an_anchor_that_does_not_hold_every_tensor_once_is_refused(pair: Pair, tensors: tuple[int, ...]) -> None:
    manifest, ref = pair
    whole = sum(spec.nbytes for spec in manifest.layout)
    anchored = replace(
        manifest,
        frames=tuple(replace(frame, anchor=bytes(32)) for frame in manifest.frames),
        anchors=(AnchorPart("model.safetensors", 8, tensors),),
    )
    data, digest = encode_manifest(anchored)
    with pytest.raises(CorruptVersion, match="every tensor once"):
        decode_manifest(data, replace(ref, manifest=digest, anchor_bytes=8 + whole))
    good = replace(anchored, anchors=(AnchorPart("model.safetensors", 8, (0,)),))
    data, digest = encode_manifest(good)
    assert decode_manifest(data, replace(ref, manifest=digest, anchor_bytes=8 + whole)) == good


async def test_a_manifest_that_contradicts_itself_is_refused_though_its_digest_is_right(pair: Pair) -> None:
    manifest, ref = pair
    first, *rest = manifest.frames
    assert first.size > 0
    assert rest

    def frames(**fields: Any) -> Manifest:
        return replace(manifest, frames=(replace(first, **fields), *rest))

    bad = [
        frames(position=manifest.delta_bytes),
        frames(position=-1),
        frames(size=-1),
        frames(size=1 << 62),
        frames(dense=b"short"),
        frames(dense=bytes(16)),
        frames(payload=b""),
        frames(anchor=bytes(32)),
        frames(part=1),
        frames(part=-1),
        replace(manifest, deltas=()),
        replace(manifest, deltas=(DeltaPart("../delta.ws", manifest.delta_bytes),)),
        replace(manifest, deltas=(DeltaPart("delta.ws", manifest.delta_bytes + 1),)),
        replace(manifest, deltas=(*manifest.deltas, DeltaPart("delta.ws", 0))),
        replace(manifest, deltas=(*manifest.deltas, DeltaPart("more.ws", -1), DeltaPart("most.ws", 1))),
        replace(manifest, anchors=(AnchorPart("model.safetensors", 8, (0,)),)),
        replace(manifest, frames=tuple(rest)),
        replace(manifest, frame_bytes=0),
        replace(manifest, frame_bytes=4095),
        replace(manifest, frame_bytes=1 << 40),
        replace(manifest, version=7),
        replace(manifest, incarnation=7),
        replace(manifest, root="0" * 64),
        replace(manifest, base_root="0" * 64),
        replace(manifest, format=2),
        replace(manifest, layout=(replace(manifest.layout[0], nbytes=1 << 62),)),
        replace(manifest, layout=(replace(manifest.layout[0], name="other"),)),
    ]
    for case in bad:
        data, digest = encode_manifest(case)
        with pytest.raises(CorruptVersion):
            decode_manifest(data, replace(ref, manifest=digest))
    data = msgspec.msgpack.encode([1, 2, 3])
    with pytest.raises(CorruptVersion):
        decode_manifest(data, replace(ref, manifest=blake3.blake3(data).hexdigest()))
