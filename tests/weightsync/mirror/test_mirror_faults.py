"""A mirror gives out nothing that is wrong, and goes on after a kill, a cut or alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    Mirror,
    Publisher,
    Retention,
    Store,
)

Arrays = dict[str, np.ndarray[Any, Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Pulled = Callable[[Store, Arrays], Awaitable[Arrays]]
Step = Callable[[Arrays], None]


async def test_a_byte_that_arrives_wrong_is_fetched_again(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, pulled: Pulled
) -> None:
    await publisher.publish(tensors, 0)
    source.flips = 2
    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        live = await pulled(mirror, tensors)
        await mirror.caught_up()
    assert (live["w"] == tensors["w"]).all()
    assert source.flips == 0
    assert source.sent > source.sizes()
    assert (tmp_path / "1/v/0/model.safetensors").read_bytes() == bytes(source.read("1/v/0/model.safetensors"))


async def test_what_is_damaged_at_the_source_is_named_and_never_kept(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, step: Step, pulled: Pulled
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
        await pulled(mirror, tensors)
        source.flips = 0
    async with Mirror(source, tmp_path) as mirror:
        await mirror.caught_up()
        live = await pulled(mirror, tensors)
    assert (live["w"] == tensors["w"]).all()


async def test_a_payload_that_ends_early_is_damaged(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path
) -> None:
    await publisher.publish(tensors, 0)
    whole = source.read("1/v/0/model.safetensors")
    source.put("1/v/0/model.safetensors", [whole[:-100]])
    async with Mirror(source, tmp_path) as mirror:
        with pytest.raises(CorruptVersion, match=f"ends at byte {len(whole) - 100} of {len(whole)}"):
            await mirror.caught_up()


async def test_a_cut_is_resumed_at_the_byte(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow.weightsync.mirror._FIRST_WAIT_S", 0.001)
    await publisher.publish(tensors, 0)
    source.cut_every = 100_001
    async with Mirror(source, tmp_path, connections=3) as mirror:
        await mirror.caught_up()
    assert source.sent == source.sizes()


async def test_without_its_source_it_serves_what_it_has_and_goes_on_later(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until, step: Step, pulled: Pulled
) -> None:
    async with Mirror(source, tmp_path, interval=0.01) as mirror:
        await publisher.publish(tensors, 0)
        await until(lambda: mirror.status.version == 0)
        source.down = True
        await until(lambda: "is down" in mirror.status.fault)
        live = await pulled(mirror, tensors)
        assert (live["w"] == tensors["w"]).all()
        source.down = False
        step(tensors)
        await publisher.publish(tensors, 1)
        await until(lambda: mirror.status.version == 1)
        assert mirror.status.fault == ""
    source.down = True
    async with Mirror(source, tmp_path, interval=0.01) as again:
        live = await pulled(again, tensors)
    assert (live["w"] == tensors["w"]).all()


async def test_a_reader_gives_up_on_a_silent_source(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr("astraflow.weightsync.mirror._PATIENCE_S", 0.05)
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    async with Mirror(source, tmp_path, cut_through=True) as mirror:
        await until(lambda: mirror.status.version == 0)
        with pytest.raises(TimeoutError, match="nothing came from the source"):
            await anyio.to_thread.run_sync(mirror.read, "1/v/0/model.safetensors")


async def test_who_reads_when_it_ends_is_told(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
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


async def test_what_the_source_removes_meanwhile_is_let_go(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
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
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
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


@pytest.mark.parametrize("cut_through", [False, True])
async def test_it_ends_at_once_when_it_is_cancelled_while_fetching(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, cut_through: bool
) -> None:
    await publisher.publish(tensors, 0)
    source.hold_at = 0
    with anyio.fail_after(20), anyio.move_on_after(0.2):
        async with anyio.create_task_group() as group, Mirror(source, tmp_path, cut_through=cut_through) as mirror:
            group.start_soon(anyio.sleep_forever)
            await mirror.caught_up()


async def test_what_lies_there_is_believed_only_with_its_digest(
    source: Any, publisher: Publisher, tensors: Arrays, tmp_path: Path, until: Until
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
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until
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
