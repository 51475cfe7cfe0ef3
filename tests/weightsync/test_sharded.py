"""Several ranks publish one model: the same version as one publisher's, however the rows lie."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.weightsync import (
    DirectoryStore,
    Entry,
    LocalChannel,
    MemoryStore,
    Piece,
    Publisher,
    PublishReport,
    Puller,
    RankLost,
    SafetensorsSink,
    ShardedPublisher,
    StaleIncarnation,
    Store,
    WeightSyncError,
)
from astraflow.weightsync.layout import cut
from astraflow.weightsync.manifest import HEAD, Manifest, decode_head, read_manifest
from astraflow.weightsync.shards import assign, extents_of, held, layout_of, rounds_of
from astraflow.weightsync.tensors import spec_of

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Same = Callable[[Arrays, Arrays], bool]
Pulled = Callable[[Store, Arrays], Awaitable[Arrays]]


def shards(model: Arrays, world_size: int, rank: int, replicated: Sequence[str] = ("mask",)) -> list[Piece]:
    """As FSDP2 cuts: the first axis in chunks of ceil(rows / ranks), the last ones short or empty."""
    pieces = []
    for name, tensor in model.items():
        row, data = 0, tensor
        if tensor.ndim and name not in replicated:
            rows = -(-tensor.shape[0] // world_size)
            row = min(rank * rows, tensor.shape[0])
            data = tensor[row : row + rows]
        pieces.append(Piece(name, spec_of(name, tensor).dtype, tensor.shape, row, data))
    return pieces


class Ranks:
    """The ranks of one sharded publisher, as threads."""

    def __init__(self, stores: Sequence[Store], incarnation: int = 1, timeout_s: float = 60.0, **settings: Any) -> None:
        channels = LocalChannel.group(len(stores), timeout_s)
        self.publishers = [
            ShardedPublisher(store, channel, stream="s", incarnation=incarnation, **settings)
            for store, channel in zip(stores, channels, strict=True)
        ]

    async def publish(self, model: Arrays, version: int) -> list[PublishReport]:
        results = await self.outcomes([shards(model, len(self.publishers), rank) for rank in self.numbers], version)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, PublishReport)]

    @property
    def numbers(self) -> range:
        return range(len(self.publishers))

    async def outcomes(self, pieces: Sequence[Sequence[Piece]], version: int) -> list[PublishReport | BaseException]:
        jobs = [publisher.publish(mine, version) for publisher, mine in zip(self.publishers, pieces, strict=True)]
        return await asyncio.gather(*jobs, return_exceptions=True)


@pytest.fixture(autouse=True)
def small_sharded_frames(small_frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.weightsync.sharded.FRAME_BYTES", small_frames)
    monkeypatch.setattr("astraflow.weightsync.sharded_work.FRAME_BYTES", small_frames)


def newest(store: Store) -> Manifest:
    return read_manifest(store, decode_head(store.read(HEAD)).newest)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
async def test_the_version_is_that_of_one_publisher(
    store: Store, tmp_path: Path, model: Arrays, change: Change, same: Same, world_size: int, pulled: Pulled
) -> None:
    alone = DirectoryStore(tmp_path / "alone")
    publisher = Publisher(alone, stream="s", incarnation=1, anchor_every=3)
    ranks = Ranks([store] * world_size, anchor_every=3)
    served = Puller(store, SafetensorsSink(tmp_path / "served"))
    for version in range(5):
        one = await publisher.publish(model, version)
        reports = await ranks.publish(model, version)
        assert {report.digest for report in reports} == {one.digest}
        assert {(report.anchor, report.density) for report in reports} == {(one.anchor, one.density)}
        assert all(report.codecs == one.codecs for report in reports)
        mine, theirs = newest(store), newest(alone)
        assert [frame.dense for frame in mine.frames] == [frame.dense for frame in theirs.frames]
        assert [(frame.changed, frame.payload) for frame in mine.frames] == [
            (frame.changed, frame.payload) for frame in theirs.frames
        ]
        assert same(await pulled(store, model), model)
        report = await served.pull()
        assert report is not None
        assert report.kind == ("delta" if version else "full")
        assert same(safetensors.numpy.load_file(tmp_path / "served" / "current" / "model.safetensors"), model)
        change(model, version)


@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_an_anchor_is_a_hugging_face_directory(
    store: Store, tmp_path: Path, model: Arrays, same: Same, world_size: int, pulled: Pulled
) -> None:
    """One file where the store can be written at offsets, else one a rank and an index; other tools read both."""
    await Ranks([store] * world_size).publish(model, 0)
    names = {key.rpartition("/")[2] for key in store.list("1/v/0/") if "safetensors" in key}
    for name in names:
        (tmp_path / name).write_bytes(store.read(f"1/v/0/{name}"))
    if isinstance(store, DirectoryStore) or world_size == 1:
        assert names == {"model.safetensors"}
        assert same(safetensors.numpy.load_file(tmp_path / "model.safetensors"), model)
        return
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {f"model-{rank + 1:05d}-of-{world_size:05d}.safetensors" for rank in range(world_size)}
    assert names == files | {"model.safetensors.index.json"}
    assert set(index.values()) == files
    whole: Arrays = {}
    for file in files:
        held_here = safetensors.numpy.load_file(tmp_path / file)
        assert {name for name, where in index.items() if where == file} == held_here.keys()
        whole |= held_here
    assert same(whole, model)
    live = MemoryStore("again")  # and this package reads such a directory back
    try:
        await Publisher(live, stream="s", incarnation=1).publish(tmp_path, 0)
        assert same(await pulled(live, model), model)
    finally:
        live.close()


def test_a_rank_sends_no_more_than_the_frames_that_lie_on_several_need(model: Arrays) -> None:
    model = {"big": np.zeros((1000, 64), np.float32), **{f"small{n}": np.zeros((9, 11), np.float32) for n in range(99)}}
    for world_size in (2, 3, 8):
        ranks = [[held(piece) for piece in shards(model, world_size, rank)] for rank in range(world_size)]
        layout = layout_of(ranks)
        frames = cut(layout, 4096)
        assigned = assign(layout, frames, extents_of(layout, ranks), world_size)
        owned = [sum(item.frame.length for item in assigned if item.owner == rank) for rank in range(world_size)]
        assert max(owned) < 1.15 * sum(owned) / world_size
        big = [item for item in assigned if layout[item.frame.tensor].name == "big"]
        assert sum(len(item.extents) > 1 for item in big) <= world_size - 1
        for groups in rounds_of(assigned, world_size, 4096):
            assert all(sum(item.frame.length for item in group) <= 4096 for group in groups)
        assert [item.position for item in assigned] == list(range(len(frames)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_into_rows_is_covered(data: st.DataObject, model: Arrays) -> None:
    """Rows cut anywhere, held by one rank or several: every byte comes once, from one that holds it."""
    world_size = data.draw(st.integers(1, 4))
    rows = data.draw(st.integers(1, 40))
    tensor = np.arange(rows * 3, dtype=np.uint16).reshape(rows, 3)
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=6))})
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for start, stop in pairwise(cuts):
        for rank in data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            pieces[rank].append(Piece("t", "U16", tensor.shape, start, tensor[start:stop]))
    ranks = [[held(piece) for piece in mine] for mine in pieces]
    layout = layout_of(ranks)
    dense = tensor.reshape(-1).view(np.uint8)
    for whole_tensors in (False, True):
        extents = extents_of(layout, ranks)
        for item in assign(layout, cut(layout, 16), extents, world_size, whole_tensors=whole_tensors):
            position = item.frame.offset
            for extent in item.extents:
                assert extent.start == position < extent.stop
                assert any(h.start <= extent.start and extent.stop <= h.stop for h in ranks[extent.rank])
                position = extent.stop
            assert position == item.frame.offset + item.frame.length <= len(dense)


async def test_a_model_with_rows_that_nobody_holds_is_refused(store: Store, model: Arrays) -> None:
    ranks = Ranks([store] * 2)
    await ranks.publish(model, 0)
    gap = [shards(model, 3, rank) for rank in range(2)]
    for result in await ranks.outcomes(gap, 1):
        assert isinstance(result, ValueError)
        assert "no rank holds all the rows" in str(result)
    other = [shards(model, 2, 0), shards({**model, "half": model["half"].astype(np.float32)}, 2, 1)]
    for result in await ranks.outcomes(other, 1):
        assert isinstance(result, ValueError)
        assert "'half'" in str(result)
    bad = [shards(model, 2, 0), [Piece("embed", "F32", (100, 64), 90, model["embed"][:50])]]
    for result in await ranks.outcomes(bad, 1):
        assert isinstance(result, ValueError)
        assert "no piece of" in str(result)
    assert not (await ranks.publish(model, 1))[0].anchor  # nothing was lost by that


class Failing(MemoryStore):
    """One rank's view of a store that does not do what it should."""

    def __init__(self, store: Store) -> None:
        self._under = store
        self.fail = ""

    url = "failing:"

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.fail and self.fail in key:
            next(iter(chunks), None)
            raise OSError(28, "No space left on device")
        self._under.put(key, chunks)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> Any:
        if self.fail and self.fail in key + "?read":
            raise OSError(5, "Input/output error")
        return self._under.read(key, offset, length)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        if self.fail == "swap":
            raise OSError(5, "Input/output error")
        return self._under.swap(key, old, new)

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        return self._under.poll(key, seen)

    def list(self, prefix: str) -> list[str]:
        return self._under.list(prefix)

    def entries(self, prefix: str) -> Sequence[Entry]:
        return self._under.entries(prefix)

    def delete(self, key: str) -> None:
        self._under.delete(key)


@pytest.mark.parametrize(
    ("rank", "point"), [(0, "delta-"), (1, "delta-"), (2, "delta-"), (1, "model-"), (0, "manifest"), (0, "swap")]
)
async def test_a_rank_that_fails_fails_the_version_on_all_and_the_next_one_is_a_delta_again(
    memory: MemoryStore, model: Arrays, change: Change, same: Same, rank: int, point: str, pulled: Pulled
) -> None:
    views = [Failing(memory) for _ in range(3)]
    ranks = Ranks(views, anchor_every=2)
    await ranks.publish(model, 0)
    change(model, 1)
    await ranks.publish(model, 1)
    head = bytes(memory.read(HEAD))
    views[rank].fail = point
    change(model, 2)
    results = await ranks.outcomes([shards(model, 3, number) for number in ranks.numbers], 2)
    assert isinstance(results[rank], OSError)
    for number in set(ranks.numbers) - {rank}:
        assert isinstance(results[number], WeightSyncError)
        assert f"rank {rank}" in str(results[number])
    assert bytes(memory.read(HEAD)) == head
    views[rank].fail = ""
    change(model, 3)
    report, *_ = await ranks.publish(model, 3)
    assert report.delta_bytes > 0
    assert same(await pulled(memory, model), model)
    assert not [key for key in memory.list("") if "/v/2/" in key]


async def test_a_rank_that_cannot_advance_costs_the_next_version_its_delta(
    memory: MemoryStore, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    views = [Failing(memory) for _ in range(2)]
    ranks = Ranks(views)
    await ranks.publish(model, 0)
    change(model, 1)
    views[1].fail = "ws?read"
    await ranks.publish(model, 1)
    views[1].fail = ""
    change(model, 2)
    report, *_ = await ranks.publish(model, 2)
    assert (report.anchor, report.delta_bytes) == (True, 0)
    assert same(await pulled(memory, model), model)
    change(model, 3)
    assert not (await ranks.publish(model, 3))[0].anchor


async def test_a_rank_that_is_gone_is_told_and_new_ranks_go_on(
    store: Store, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    ranks = Ranks([store] * 3, timeout_s=0.3)
    await ranks.publish(model, 0)
    head = bytes(store.read(HEAD))
    alone = [publisher.publish(shards(model, 3, rank), 1) for rank, publisher in enumerate(ranks.publishers[:2])]
    assert all(isinstance(result, RankLost) for result in await asyncio.gather(*alone, return_exceptions=True))
    with pytest.raises(RankLost, match="anew"):
        await ranks.publishers[0].publish(shards(model, 3, 0), 1)
    assert bytes(store.read(HEAD)) == head
    change(model, 1)
    for world_size, version in ((2, 1), (3, 2)):  # also with another number of ranks
        again = Ranks([store] * world_size)
        assert (await again.publish(model, version))[0].anchor
        assert same(await pulled(store, model), model)


async def test_a_later_incarnation_fences_all_ranks(store: Store, model: Arrays, change: Change) -> None:
    old, new = Ranks([store] * 2), Ranks([store] * 2, incarnation=2)
    await old.publish(model, 5)
    await new.publish(model, 3)
    for result in await old.outcomes([shards(model, 2, rank) for rank in range(2)], 6):
        assert isinstance(result, StaleIncarnation)
    for result in await new.outcomes([shards(model, 2, rank) for rank in range(2)], 3):
        assert isinstance(result, ValueError)
    apart = await asyncio.gather(
        *(publisher.publish(shards(model, 2, rank), 4 + rank) for rank, publisher in enumerate(new.publishers)),
        return_exceptions=True,
    )
    assert all(isinstance(result, ValueError) and "rank 1 publishes" in str(result) for result in apart)
    change(model, 1)
    assert not (await new.publish(model, 4))[0].anchor


async def test_one_publisher_follows_several_ranks_and_the_other_way_round(
    store: Store, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    await Ranks([store] * 3).publish(model, 0)
    change(model, 1)
    one = await Publisher(store, stream="s", incarnation=2).publish(model, 1)
    assert one.delta_bytes > 0
    change(model, 2)
    many, *_ = await Ranks([store] * 2, incarnation=3).publish(model, 2)
    assert many.anchor
    assert same(await pulled(store, model), model)


async def test_tensors_that_change_between_a_frame_and_its_anchor_file_are_noticed(
    memory: MemoryStore, model: Arrays, change: Change
) -> None:
    class Meddling(Failing):
        def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
            if "model-" in key:
                model["embed"] += 1
            super().put(key, chunks)

    ranks = Ranks([Meddling(memory), memory])
    results = await ranks.outcomes([shards(model, 2, rank) for rank in range(2)], 0)
    assert all(isinstance(result, WeightSyncError) and "changed while" in str(result) for result in results)


async def test_ranks_publish_into_a_bucket(
    bucket: Store, model: Arrays, change: Change, same: Same, pulled: Pulled
) -> None:
    ranks = Ranks([bucket] * 2)
    for version in range(2):
        await ranks.publish(model, version)
        assert same(await pulled(bucket, model), model)
        change(model, version)
    assert "1/v/0/model.safetensors.index.json" in bucket.list("1/v/0/")
