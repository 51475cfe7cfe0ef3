"""A mirror fetches each byte once, names what it may, and keeps what its source keeps."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from astraflow.weightsync import (
    LocalChannel,
    Mirror,
    Piece,
    Publisher,
    Puller,
    Retention,
    ShardedPublisher,
    Store,
    TensorSink,
    WeightSyncError,
    verify,
)
from astraflow.weightsync.leases import lease
from astraflow.weightsync.manifest import decode_head

Arrays = dict[str, np.ndarray[Any, Any]]
Same = Callable[[Arrays, Arrays], bool]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Pulled = Callable[[Store, Arrays], Awaitable[Arrays]]
Zeros = Callable[[Arrays], Arrays]
Step = Callable[[Arrays], None]


@pytest.mark.parametrize("cut_through", [False, True])
async def test_each_byte_crosses_once_however_many_pull(
    source: Any,
    publisher: Publisher,
    tensors: Arrays,
    tmp_path: Path,
    cut_through: bool,
    same: Same,
    until: Until,
    zeros: Zeros,
    step: Step,
) -> None:
    async with Mirror(source, tmp_path, cut_through=cut_through, interval=0.01) as mirror:
        lives = [zeros(tensors) for _ in range(4)]
        pullers = [Puller(mirror, TensorSink(live)) for live in lives]
        published = 0
        for version in range(5):
            report = await publisher.publish(tensors, version)
            published += report.delta_bytes + report.anchor_bytes
            mirror.notice()
            await until(lambda wanted=version: mirror.status.version == wanted)  # type: ignore[misc]
            async with anyio.create_task_group() as group:
                for puller in pullers:
                    group.start_soon(puller.pull)
            assert all(same(live, tensors) for live in lives)
            step(tensors)
        status = await mirror.caught_up()
        assert source.sent == published == status.arrived_bytes
        assert status.missing_bytes == 0
        assert status.fault == ""
        assert mirror.list("") == source.named()
        assert all(mirror.read(key) == source.read(key) for key in mirror.list(""))


async def test_a_range_is_read_while_the_rest_is_still_arriving(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, pulled: Pulled
) -> None:
    await publisher.publish(tensors, 0)
    size = len(source.read("1/v/0/model.safetensors"))
    source.hold_at = size // 2
    async with Mirror(source, tmp_path, cut_through=True, connections=2) as mirror:
        await until(lambda: mirror.status.version == 0)
        read = anyio.to_thread.run_sync
        early = await read(mirror.read, "1/v/0/model.safetensors", 0, 16)
        assert early == source.read("1/v/0/model.safetensors", 0, 16)
        assert mirror.status.missing_bytes > 0
        with anyio.move_on_after(0.1) as waited:
            await anyio.to_thread.run_sync(mirror.read, "1/v/0/model.safetensors", size - 8, 8, abandon_on_cancel=True)
        assert waited.cancelled_caught
        source.released.set()
        live = await pulled(mirror, tensors)
        assert (live["w"] == tensors["w"]).all()


async def test_head_moves_only_when_all_of_a_version_is_here(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, zeros: Zeros, step: Step
) -> None:
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        await publisher.publish(tensors, 0)
        await until(lambda: mirror.status.version == 0)
        step(tensors)
        source.hold_at = 0
        await publisher.publish(tensors, 1)
        await until(lambda: mirror.status.source_version == 1)
        await anyio.sleep(0.05)
        assert mirror.status.version == 0
        report = await Puller(mirror, TensorSink(zeros(tensors))).pull()
        assert report is not None
        assert report.version == 0
        source.released.set()
        await until(lambda: mirror.status.version == 1)


async def test_requests_for_one_range_share_one_fetch(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
) -> None:
    await publisher.publish(tensors, 0)
    key, size = "1/v/0/model.safetensors", source.sizes()
    source.hold_at = 0
    got: list[bytes] = []

    async def ask(offset: int) -> None:
        got.append(await anyio.to_thread.run_sync(mirror.read, key, offset, 100_000))

    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(ask, size // 2)
            await anyio.sleep(0.02)
            source.released.set()
        await mirror.caught_up()
    assert got == [bytes(source.read(key, size // 2, 100_000))] * 8
    assert source.sent == size


async def test_what_a_reader_waits_for_comes_first(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, step: Step
) -> None:
    for version in range(4):
        await publisher.publish(tensors, version)
        step(tensors)
    asked: list[str] = []
    stream = source.stream

    async def watched(key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        await source.released.wait()
        asked.append(key)
        async for chunk in stream(key, start, stop):
            yield chunk

    source.stream = watched
    async with Mirror(source, tmp_path, cut_through=True, connections=1) as mirror:
        await until(lambda: mirror.status.version == 3)
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, mirror.read, "1/v/0/model.safetensors", 0, 8)
            await anyio.sleep(0.05)
            source.released.set()
        await mirror.caught_up()
    order = [key for key, _ in itertools.groupby(asked)]
    assert order[1] == "1/v/0/model.safetensors", "by itself it comes last: the anchor before the newest"
    assert asked[-1] == "1/v/0/model.safetensors"


async def test_it_keeps_what_its_source_keeps(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, step: Step
) -> None:
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        for version in range(12):
            await publisher.publish(tensors, version)
            step(tensors)
        mirror.notice()
        await until(lambda: mirror.status.version == 11)
        await mirror.caught_up()
        assert mirror.list("") == source.named()
        successor = Publisher(source.origin, stream="policy", incarnation=2)
        await successor.publish(tensors, 5)
        await until(lambda: (mirror.status.incarnation, mirror.status.version) == (2, 5))
        await mirror.caught_up()
        assert mirror.list("") == source.named()
    assert not list((tmp_path / ".incoming").iterdir())


async def test_it_leases_at_its_source_and_keeps_what_is_leased_here(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
) -> None:
    async def succeed(incarnation: int) -> None:
        newest_only = Retention(versions=1)
        await Publisher(source.origin, stream="policy", incarnation=incarnation, retention=newest_only).publish(
            tensors, 0
        )

    source.hold_at = 0
    await publisher.publish(tensors, 0)
    async with Mirror(source, tmp_path, cut_through=True, interval=0.01) as mirror:
        await until(lambda: bool(source.list("leases/")))
        await succeed(2)
        assert "1/v/0/model.safetensors" in source.list("1/"), "a slow mirror's version stays"
        source.released.set()
        await mirror.caught_up()
        await until(lambda: not source.list("leases/"))
        async with lease(mirror, decode_head(mirror.read("HEAD")).versions):
            await succeed(3)
            await until(lambda: mirror.status.incarnation == 3)
            await mirror.caught_up()
            assert "2/v/0/model.safetensors" in mirror.list("2/")
        await succeed(4)
        await until(lambda: mirror.status.incarnation == 4)
        await mirror.caught_up()
        assert mirror.list("2/") == []


async def test_what_its_block_raises_comes_out_as_it_is(source: Any, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with Mirror(source, tmp_path):
            raise LookupError("mine")


async def test_a_directory_has_one_mirror(source: Any, tmp_path: Path) -> None:
    async with Mirror(source, tmp_path):
        with pytest.raises(WeightSyncError, match="another mirror's"):
            async with Mirror(source, tmp_path):
                pass
    async with Mirror(source, tmp_path):
        pass


async def test_only_leases_can_be_written(source: Any, tmp_path: Path) -> None:
    async with Mirror(source, tmp_path) as mirror:
        for refused in (
            lambda: mirror.put("1/v/0/delta.ws", [b""]),
            lambda: mirror.swap("HEAD", None, b""),
            lambda: mirror.delete("HEAD"),
        ):
            with pytest.raises(PermissionError, match="publish there"):
                refused()
        mirror.put("leases/x", [b"1"])
        assert mirror.read("leases/x") == b"1"
        mirror.delete("leases/x")
        assert mirror.list("") == []


async def test_mirrors_can_be_chained(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, pulled: Pulled
) -> None:
    await publisher.publish(tensors, 0)
    async with (
        Mirror(source, tmp_path / "a", cut_through=True, interval=0.01) as first,
        Mirror(first, tmp_path / "b", cut_through=True, interval=0.01) as second,
    ):
        await until(lambda: second.status.version == 0)
        live = await pulled(second, tensors)
        await second.caught_up()
    assert (live["w"] == tensors["w"]).all()
    assert source.sent == source.sizes()


async def test_what_several_ranks_published_is_mirrored_with_its_index(
    source: Any, tensors: Arrays, tmp_path: Path, pulled: Pulled
) -> None:
    """A store that cannot be written at offsets has an anchor in several files."""
    ranks = [ShardedPublisher(source.origin, channel, stream="s", incarnation=1) for channel in LocalChannel.group(2)]
    rows = [slice(0, 400), slice(400, None)]
    async with anyio.create_task_group() as group:
        for publisher, row in zip(ranks, rows, strict=True):
            piece = Piece("w", "F32", tensors["w"].shape, row.start, tensors["w"][row])
            bias = Piece("b", "F32", tensors["b"].shape, 0, tensors["b"])
            group.start_soon(publisher.publish, [piece, bias], 0)
    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await mirror.caught_up()
        assert mirror.list("") == source.named()
        assert "1/v/0/model.safetensors.index.json" in mirror.list("")
        assert (await verify(mirror)).damage == ()
        live = await pulled(mirror, tensors)
    assert (live["w"] == tensors["w"]).all()
    assert source.sent == source.sizes() + len(source.read("1/v/0/model.safetensors.index.json"))
