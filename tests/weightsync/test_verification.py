"""`verify` computes every digest anew and names what is damaged; `inspect` says what a store holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    Publisher,
    Retention,
    Store,
    inspect,
    verify,
)
from astraflow.weightsync.inspection import chain_lengths
from astraflow.weightsync.manifest import Head, VersionRef

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
async def published(
    tmp_path: Path, model: Arrays, change: Callable[[Arrays, int], None], small_frames: int
) -> DirectoryStore:
    """Versions 0 to 4; 0 and 3 have anchors."""
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="policy", incarnation=1, anchor_every=3, retention=Retention(versions=5))
    for version in range(5):
        await publisher.publish(model, version)
        change(model, version)
    return store


def keys(store: Store) -> list[str]:
    return [key for key in store.list("1/") if key.endswith((".ws", ".safetensors", ".msgpack"))]


async def test_a_whole_store_is_whole(published: DirectoryStore) -> None:
    seen: list[tuple[int, int]] = []
    found = await verify(published, lambda done, total: seen.append((done, total)))
    inspected = await inspect(published)
    assert found.damage == ()
    assert (found.versions, found.unapplied) == (5, 0)
    assert found.frames == 5 * inspected.versions[0].frames
    assert found.payload_bytes == inspected.total_bytes
    assert seen[-1] == (inspected.total_bytes, inspected.total_bytes)
    assert published.list("leases/") == []


async def test_one_flipped_bit_anywhere_is_named(published: DirectoryStore, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for key in keys(published):
        path = tmp_path / "store" / key
        good = path.read_bytes()
        for position in {0, len(good) - 1, *rng.integers(0, len(good), 3).tolist()}:
            bad = bytearray(good)
            bad[position] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            found = await verify(published)
            assert found.damage, f"{key} at {position}"
            first = found.damage[0]
            assert (first.incarnation, first.version) == (1, int(key.split("/")[2]))
            assert first.key == key, str(first)
        path.write_bytes(good)
    assert (await verify(published)).damage == ()


@pytest.mark.parametrize("fault", ["missing", "short"])
async def test_what_is_missing_or_short_is_named(published: DirectoryStore, tmp_path: Path, fault: str) -> None:
    for key in keys(published):
        path = tmp_path / "store" / key
        good = path.read_bytes()
        if fault == "missing":
            path.unlink()
        else:
            path.write_bytes(good[:-1])
        found = await verify(published)
        assert [damage.key for damage in found.damage][:1] == [key]
        path.write_bytes(good)


async def test_a_damaged_delta_does_not_hide_what_comes_after_an_anchor(
    published: DirectoryStore, tmp_path: Path
) -> None:
    (tmp_path / "store/1/v/1/delta.ws").unlink()
    found = await verify(published)
    assert {damage.key for damage in found.damage} == {"1/v/1/delta.ws"}
    assert found.unapplied > 0, "the deltas of version 2 start from a version that is not known"
    (tmp_path / "store/1/v/4/delta.ws").unlink()
    assert {damage.key for damage in (await verify(published)).damage} == {"1/v/1/delta.ws", "1/v/4/delta.ws"}


async def test_a_store_without_head_or_with_a_damaged_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for look in (inspect, verify):
        with pytest.raises(FileNotFoundError, match="nothing has been published there"):
            await look(store)
    store.put("HEAD", [b"x" * 100])
    for look in (inspect, verify):
        with pytest.raises(CorruptVersion, match="HEAD does not have the digest"):
            await look(store)


async def test_inspect(published: DirectoryStore, model: Arrays) -> None:
    found = await inspect(published)
    assert found.stream == "policy"
    assert [info.version for info in found.versions] == [4, 3, 2, 1, 0]
    assert [info.chain for info in found.versions] == [1, 0, 2, 1, 0]
    assert [bool(info.anchor_bytes) for info in found.versions] == [False, True, False, False, True]
    newest = found.versions[0]
    assert newest.dense_bytes == sum(tensor.nbytes for tensor in model.values())
    assert newest.tensors == len(model)
    assert 0.005 < newest.density < 0.05
    assert sum(newest.codecs.values()) == newest.changed_frames <= newest.frames
    assert found.versions[-1].density == 1.0


def test_chain_lengths() -> None:
    def ref(version: int, base: int | None, anchor: bool) -> VersionRef:
        return VersionRef(1, version, "", f"r{version}", "" if base is None else f"r{base}", 1, int(anchor))

    versions = (ref(5, 3, False), ref(4, 3, False), ref(3, 2, False), ref(2, None, True), ref(1, 0, True))
    assert chain_lengths(Head("s", versions)) == [-1, 2, 1, 0, 0]
