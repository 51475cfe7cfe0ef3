"""A mirror fetches each byte once, gives out none that is wrong, and goes on after a kill, a cut or alone."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    LocalChannel,
    MemoryStore,
    Mirror,
    Piece,
    Publisher,
    Puller,
    Retention,
    ShardedPublisher,
    TensorSink,
    WeightSyncError,
    verify,
)
from astraflow.weightsync.leases import lease
from astraflow.weightsync.manifest import decode_head

Arrays = dict[str, np.ndarray[Any, Any]]
CHUNK = 64 << 10


class Distant:
    """`origin` behind a link: it counts what it sends, and can be down, held up at a byte, cut, or wrong. Publishers
    write to `origin` itself."""

    def __init__(self, origin: MemoryStore) -> None:
        self.origin = origin
        self.url = origin.url
        self.put, self.swap, self.delete = origin.put, origin.swap, origin.delete
        self.list, self.entries = origin.list, origin.entries
        self.sent = 0
        self.down = False
        self.cut_every = 1 << 60
        self.flips = 0
        self.hold_at: int | None = None
        self.released = anyio.Event()

    def read(self, key: str, offset: int = 0, length: int | None = None) -> memoryview:
        self._reach()
        return self.origin.read(key, offset, length)

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        self._reach()
        return self.origin.poll(key, seen)

    async def stream(self, key: str, start: int, stop: int) -> AsyncIterator[bytes]:
        until_cut = self.cut_every
        while start < stop:
            self._reach()
            if self.hold_at is not None and start + CHUNK > self.hold_at:
                await self.released.wait()
            chunk = bytearray(self.origin.read(key, start, min(CHUNK, stop - start, until_cut)))
            await anyio.lowlevel.checkpoint()
            self._reach()
            if not chunk:
                return
            if self.flips:
                self.flips -= 1
                chunk[len(chunk) // 2] ^= 1
            self.sent += len(chunk)
            yield bytes(chunk)
            start += len(chunk)
            until_cut -= len(chunk)
            if not until_cut:
                raise ConnectionError(f"{key} was cut at byte {start}")

    def sizes(self) -> int:
        """Bytes of all payloads."""
        return sum(entry.size for entry in self.entries("") if entry.key.endswith((".ws", ".safetensors")))

    def named(self) -> list[str]:
        """HEAD, and all that belongs to the versions it names."""
        versions = decode_head(self.origin.read("HEAD")).versions
        prefixes = ("HEAD", *(f"{ref.incarnation}/v/{ref.version}/" for ref in versions))
        return [key for key in self.list("") if key.startswith(prefixes)]

    def _reach(self) -> None:
        if self.down:
            raise ConnectionError(f"{self.url} is down")


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[Distant]:
    origin = MemoryStore(request.node.name)
    yield Distant(origin)
    origin.close()


@pytest.fixture
def tensors() -> Arrays:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(1000, 700)).astype(np.float32), "b": rng.normal(size=333).astype(np.float32)}


@pytest.fixture
def publisher(source: Distant) -> Publisher:
    return Publisher(source.origin, stream="policy", incarnation=1, anchor_every=3)


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.002)


def zeros(tensors: Arrays) -> Arrays:
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


def step(tensors: Arrays) -> None:
    tensors["w"][::7, ::5] += 0.125


@pytest.mark.parametrize("cut_through", [False, True])
async def test_each_byte_crosses_once_however_many_pull(
    source: Distant,
    publisher: Publisher,
    tensors: Arrays,
    tmp_path: Path,
    cut_through: bool,
    same: Callable[[Arrays, Arrays], bool],
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
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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
        live = zeros(tensors)
        await Puller(mirror, TensorSink(live)).pull()
        assert (live["w"] == tensors["w"]).all()


async def test_head_moves_only_when_all_of_a_version_is_here(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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

    source.stream = watched  # type: ignore[method-assign]
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


async def test_a_byte_that_arrives_wrong_is_fetched_again(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    source.flips = 2
    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        live = zeros(tensors)
        await Puller(mirror, TensorSink(live)).pull()
        await mirror.caught_up()
    assert (live["w"] == tensors["w"]).all()
    assert source.flips == 0
    assert source.sent > source.sizes()
    assert (tmp_path / "1/v/0/model.safetensors").read_bytes() == bytes(source.read("1/v/0/model.safetensors"))


async def test_what_is_damaged_at_the_source_is_named_and_never_kept(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        await publisher.publish(tensors, 0)
        await until(lambda: mirror.status.version == 0)
        step(tensors)
        source.flips = 1_000_000
        await publisher.publish(tensors, 1)
        with pytest.raises(CorruptVersion, match=r"1/v/1/delta\.ws is damaged at 'w'.* 3 times"), anyio.fail_after(20):
            await mirror.caught_up()
        assert "damaged" in mirror.status.fault
        assert mirror.status.version == 0
        assert not (tmp_path / "1/v/1/delta.ws").exists()
        live = zeros(tensors)
        await Puller(mirror, TensorSink(live)).pull()
        source.flips = 0
    async with Mirror(source, tmp_path) as mirror:
        await mirror.caught_up()
        await Puller(mirror, TensorSink(live)).pull()
    assert (live["w"] == tensors["w"]).all()


async def test_a_payload_that_ends_early_is_damaged(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    whole = source.read("1/v/0/model.safetensors")
    source.put("1/v/0/model.safetensors", [whole[:-100]])
    async with Mirror(source, tmp_path) as mirror:
        with pytest.raises(CorruptVersion, match=f"ends at byte {len(whole) - 100} of {len(whole)}"):
            await mirror.caught_up()


async def test_a_cut_is_resumed_at_the_byte(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.weightsync.mirror._FIRST_WAIT_S", 0.001)
    await publisher.publish(tensors, 0)
    source.cut_every = 100_001
    async with Mirror(source, tmp_path, connections=3) as mirror:
        await mirror.caught_up()
    assert source.sent == source.sizes()


async def test_without_its_source_it_serves_what_it_has_and_goes_on_later(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        await publisher.publish(tensors, 0)
        await until(lambda: mirror.status.version == 0)
        source.down = True
        await until(lambda: "is down" in mirror.status.fault)
        live = zeros(tensors)
        await Puller(mirror, TensorSink(live)).pull()
        assert (live["w"] == tensors["w"]).all()
        source.down = False
        step(tensors)
        await publisher.publish(tensors, 1)
        await until(lambda: mirror.status.version == 1)
        assert mirror.status.fault == ""
    source.down = True
    async with Mirror(source, tmp_path, interval=0.01) as again:
        await Puller(again, TensorSink(live)).pull()
    assert (live["w"] == tensors["w"]).all()


async def test_a_reader_gives_up_on_a_silent_source(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.weightsync.mirror._PATIENCE_S", 0.05)
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        with pytest.raises(TimeoutError, match="nothing came from the source"):
            await anyio.to_thread.run_sync(mirror.read, "1/v/0/model.safetensors")


async def test_who_reads_when_it_ends_is_told(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    told: list[str] = []

    async def ask() -> None:
        with pytest.raises(ConnectionError, match="ended while"):
            await anyio.to_thread.run_sync(mirror.read, "1/v/0/model.safetensors")
        told.append("told")

    async with anyio.create_task_group() as group, Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        group.start_soon(ask)
        await anyio.sleep(0.05)
    assert told == ["told"]
    with pytest.raises(FileNotFoundError):
        mirror.read("1/v/0/model.safetensors")


async def test_it_keeps_what_its_source_keeps(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
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


async def test_what_the_source_removes_meanwhile_is_let_go(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    async with Mirror(source, tmp_path, cut_through=True, interval=0.01) as mirror:
        await until(lambda: mirror.status.version == 0)
        failed: list[BaseException] = []

        async def ask() -> None:
            try:
                await anyio.to_thread.run_sync(mirror.read, "1/v/0/model.safetensors")
            except FileNotFoundError as error:
                failed.append(error)

        for lease_key in source.list("leases/"):
            source.delete(lease_key)
        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await anyio.sleep(0.02)
            await Publisher(source.origin, stream="policy", incarnation=2, retention=Retention(versions=1)).publish(
                tensors, 0
            )
            await until(lambda: bool(failed))
        source.hold_at = None
        source.released.set()
        await mirror.caught_up()
        assert mirror.list("") == source.named()


async def test_a_source_that_is_another_or_older_is_refused(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    first = bytes(source.read("HEAD"))
    await publisher.publish(tensors, 1)
    second = bytes(source.read("HEAD"))
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        await mirror.caught_up()
        assert source.swap("HEAD", second, first)  # as a cache may give out
        await anyio.sleep(0.05)
        assert (mirror.status.version, mirror.status.fault) == (1, "")
        assert source.swap("HEAD", first, second)
        newer = Publisher(source.origin, stream="policy", incarnation=2)
        await newer.publish(tensors, 0)
        await until(lambda: mirror.status.incarnation == 2)
        assert source.swap("HEAD", bytes(source.read("HEAD")), second)
        await until(lambda: "went back from incarnation 2 to 1" in mirror.status.fault)
        source.delete("HEAD")
        await Publisher(source.origin, stream="other", incarnation=3).publish(tensors, 0)
        await until(lambda: "stream 'other'" in mirror.status.fault)
        assert (mirror.status.incarnation, mirror.status.version) == (2, 0)


async def test_what_its_block_raises_comes_out_as_it_is(source: Distant, tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with Mirror(source, tmp_path):
            raise LookupError("mine")


@pytest.mark.parametrize("cut_through", [False, True])
async def test_it_ends_at_once_when_it_is_cancelled_while_fetching(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path, cut_through: bool
) -> None:
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    with anyio.fail_after(20), anyio.move_on_after(0.2):
        async with anyio.create_task_group() as group, Mirror(source, tmp_path, cut_through=cut_through) as mirror:
            group.start_soon(anyio.sleep_forever)
            await mirror.caught_up()


async def test_a_directory_has_one_mirror(source: Distant, tmp_path: Path) -> None:
    async with Mirror(source, tmp_path):
        with pytest.raises(WeightSyncError, match="another mirror's"):
            async with Mirror(source, tmp_path):
                pass
    async with Mirror(source, tmp_path):
        pass


async def test_only_leases_can_be_written(source: Distant, tmp_path: Path) -> None:
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


async def test_mirrors_can_be_chained(source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path) -> None:
    await publisher.publish(tensors, 0)
    async with (
        Mirror(source, tmp_path / "a", cut_through=True, interval=0.01) as first,
        Mirror(first, tmp_path / "b", cut_through=True, interval=0.01) as second,
    ):
        await until(lambda: second.status.version == 0)
        live = zeros(tensors)
        await Puller(second, TensorSink(live)).pull()
        await second.caught_up()
    assert (live["w"] == tensors["w"]).all()
    assert source.sent == source.sizes()


async def test_what_lies_there_is_believed_only_with_its_digest(
    source: Distant, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    source.hold_at = 500_000
    async with Mirror(source, tmp_path, connections=1) as mirror:
        await until(lambda: mirror.status.arrived_bytes > 200_000)
    partial = tmp_path / ".incoming" / "1~v~0~model.safetensors"
    data = bytearray(partial.read_bytes())
    data[100_000] ^= 1
    partial.write_bytes(data)
    (tmp_path / ".incoming" / "1~v~9~delta.ws").write_bytes(b"left by an earlier process")
    source.hold_at = None
    async with Mirror(source, tmp_path) as mirror:
        await mirror.caught_up()
    assert (tmp_path / "1/v/0/model.safetensors").read_bytes() == bytes(source.read("1/v/0/model.safetensors"))
    assert not list((tmp_path / ".incoming").iterdir())


SLOW_MIRROR = """
import sys, anyio
from astraflow.weightsync import DirectoryStore, Mirror

class Slow(DirectoryStore):
    async def stream(self, key, start, stop):
        while start < stop:
            await anyio.sleep(0.002)
            part = self.read(key, start, min(65536, stop - start))
            yield part
            start += len(part)

async def main():
    async with Mirror(Slow(sys.argv[1]), sys.argv[2], connections=2, cut_through=True) as mirror:
        print("there", flush=True)
        await anyio.sleep(60)

anyio.run(main)
"""


async def test_after_a_kill_it_goes_on_with_what_it_has(
    source: Distant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    tensors = {f"layer{n}": rng.normal(size=(1000, 700)).astype(np.float32) for n in range(6)}
    for store in (DirectoryStore(tmp_path / "source"), source.origin):
        await Publisher(store, stream="policy", incarnation=1).publish(tensors, 0)
    place = tmp_path / "mirror"
    note = place / ".incoming" / "1~v~0~model.safetensors.have"

    def arrived() -> int:
        return int(np.frombuffer(note.read_bytes(), np.uint32).sum()) if note.exists() else 0

    kills = 4
    for kill in range(1, kills + 1):
        argv = [sys.executable, "-c", SLOW_MIRROR, str(tmp_path / "source"), str(place)]
        killed = subprocess.Popen(argv, stdout=subprocess.PIPE)  # noqa: ASYNC220
        try:
            assert killed.stdout is not None
            assert killed.stdout.readline()
            await until(lambda wanted=kill: arrived() > wanted * 3_000_000)  # type: ignore[misc]
        finally:
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait(10)
    had = arrived()
    assert had > kills * 3_000_000
    async with Mirror(source, place) as mirror:
        await mirror.caught_up()
    assert source.sent == source.sizes() - had
    assert (place / "1/v/0/model.safetensors").read_bytes() == bytes(source.read("1/v/0/model.safetensors"))


async def test_what_several_ranks_published_is_mirrored_with_its_index(
    source: Distant, tensors: Arrays, tmp_path: Path
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
        live = zeros(tensors)
        await Puller(mirror, TensorSink(live)).pull()
    assert (live["w"] == tensors["w"]).all()
    assert source.sent == source.sizes() + len(source.read("1/v/0/model.safetensors.index.json"))
