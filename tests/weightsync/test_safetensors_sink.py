from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from astraflow.weightsync import CorruptVersion, DirectoryStore, Publisher, Puller, SafetensorsSink, Store, WrongBase

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]


def served(directory: Path) -> Arrays:
    tensors: Arrays = load_file(directory / "current" / "model.safetensors")
    return tensors


async def test_a_server_loads_what_was_published(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, same: Same
) -> None:
    directory = tmp_path / "served"
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=4)
    puller = Puller(store, SafetensorsSink(directory), mode="published", interval=4)
    kinds = []
    for version in range(9):
        await publisher.publish(model, version)
        report = await puller.pull()
        assert report is not None
        kinds.append(report.kind)
        assert same(served(directory), model)
        change(model, version)
    assert kinds == ["full", *["delta"] * 3, "full", *["delta"] * 3, "full"]
    assert {path.name for path in directory.iterdir()} == {"a", "b", "current"}


async def test_a_published_file_is_never_written_to(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy
) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    puller = Puller(store, SafetensorsSink(tmp_path / "served"))
    await publisher.publish(model, 0)
    await puller.pull()
    first = copy(model)
    with safe_open(tmp_path / "served" / "current" / "model.safetensors", "numpy") as opened:  # a slow reader
        for version in range(1, 5):
            change(model, version)
            await publisher.publish(model, version)
            await puller.pull()
        assert opened.get_tensor("embed").tobytes() == first["embed"].tobytes()


async def test_it_goes_on_after_a_restart(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, same: Same
) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    await Puller(store, SafetensorsSink(tmp_path / "served")).pull()
    change(model, 1)
    await publisher.publish(model, 1)
    again = SafetensorsSink(tmp_path / "served")
    assert again.state().version == 0
    report = await Puller(store, again).pull()
    assert report is not None
    assert report.kind == "delta"
    assert same(served(tmp_path / "served"), model)


async def test_an_aborted_stage_leaves_what_is_served(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    puller = Puller(store, SafetensorsSink(tmp_path / "served"))
    await publisher.publish(model, 0)
    await puller.pull()
    old = copy(model)
    change(model, 1)
    await publisher.publish(model, 1)
    staged = await puller.stage()
    assert staged is not None
    staged.abort()
    assert same(served(tmp_path / "served"), old)
    assert await puller.pull() is not None
    assert same(served(tmp_path / "served"), model)


async def test_a_torn_file_is_noticed(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    puller = Puller(store, SafetensorsSink(tmp_path / "served"))
    await publisher.publish(model, 0)
    await puller.pull()
    path = tmp_path / "served" / "current" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 8)
    change(model, 1)
    await publisher.publish(model, 1)
    with pytest.raises(WrongBase, match="not what version 1 starts from"):
        await puller.pull()
    assert await puller.pull() is not None
    assert same(served(tmp_path / "served"), model)
    path.write_bytes(b"short")
    with pytest.raises(CorruptVersion, match="bytes instead of"):
        SafetensorsSink(tmp_path / "served")


KILLED = """
import hashlib, os, signal, sys
from pathlib import Path
import anyio
from astraflow.weightsync import Puller, SafetensorsSink, open_store

EVENTS = {"open", "os.rename", "os.truncate", "os.remove", "os.rmdir", "os.mkdir", "os.symlink"}
url, directory = sys.argv[1:]

def pull_and_die(point):
    sink, calls = SafetensorsSink(directory), 0

    def count(event, arguments):
        nonlocal calls
        if event in EVENTS:
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    anyio.run(Puller(open_store(url), sink).pull)
    os._exit(0)

point, ended = 0, -1
while ended != 0:
    point += 1
    child = os.fork() or pull_and_die(point)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), ended
    served = (Path(directory) / "current" / "model.safetensors").read_bytes()
    print(SafetensorsSink(directory).state().version, hashlib.sha256(served).hexdigest())
"""


async def test_killed_at_any_point_the_old_or_the_new_weights_are_served(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change
) -> None:
    """One process forks another for every file operation of a pull, which dies there; leftovers stay for the next."""
    store, directory = DirectoryStore(tmp_path / "store"), tmp_path / "served"
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, SafetensorsSink(directory))
    right = []
    for version in range(2):
        await publisher.publish(model, version)
        await Puller(store, SafetensorsSink(tmp_path / str(version))).pull()
        file = tmp_path / str(version) / "current" / "model.safetensors"
        right.append(f"{version} {hashlib.sha256(file.read_bytes()).hexdigest()}")
        if version == 0:
            await puller.pull()
        change(model, version)
    command = [sys.executable, "-c", KILLED, store.url, str(directory)]
    ended = subprocess.run(command, timeout=100, check=False, capture_output=True, text=True)  # noqa: ASYNC221
    assert ended.returncode == 0, ended.stderr
    outcomes = ended.stdout.splitlines()
    assert set(outcomes) == set(right)
    assert outcomes == sorted(outcomes)
    assert len(outcomes) > 20


def inode(directory: Path) -> int:
    return (directory / "current" / "model.safetensors").stat().st_ino


async def test_the_file_before_last_is_written_anew_unless_a_server_has_it(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    directory = tmp_path / "served"
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, SafetensorsSink(directory))
    inodes, mapped, held = [], None, model
    for version in range(7):
        await publisher.publish(model, version)
        await puller.pull()
        assert same(served(directory), model)
        inodes.append(inode(directory))
        if version == 3:
            path = directory / "current" / "model.safetensors"
            mapped, held = np.memmap(path, np.uint8, "r"), copy(model)
            whole = path.read_bytes()
        change(model, version)
    assert inodes[0] == inodes[2] == inodes[4]
    assert inodes[1] == inodes[3] != inodes[5]  # version 3's is mapped
    assert mapped is not None
    assert mapped.tobytes() == whole
    assert not same(held, model)


async def test_a_server_that_keeps_the_directory_open_sees_no_change(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change
) -> None:
    """It may open its files late: it then finds them as they were, or not at all."""
    directory = tmp_path / "served"
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, SafetensorsSink(directory))
    await publisher.publish(model, 0)
    await puller.pull()
    whole = (directory / "current" / "model.safetensors").read_bytes()
    descriptor = os.open(directory / "current", os.O_RDONLY | os.O_DIRECTORY)
    for version in range(1, 5):
        change(model, version)
        await publisher.publish(model, version)
        staged = await puller.stage()
        assert staged is not None
        try:
            late = os.open("model.safetensors", os.O_RDONLY, dir_fd=descriptor)
        except FileNotFoundError:
            assert version > 1
        else:
            assert version == 1
            assert os.pread(late, len(whole) + 1, 0) == whole
            os.close(late)
        staged.commit()
    os.close(descriptor)


async def test_shards_and_what_belongs_beside_them(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, same: Same
) -> None:
    directory, beside = tmp_path / "served", tmp_path / "base"
    beside.mkdir()
    (beside / "config.json").write_text("{}")
    (beside / "model.safetensors").write_text("of the base model")
    publisher = Publisher(store, stream="s", incarnation=1)
    kinds = []
    for version in range(4):
        puller = Puller(store, SafetensorsSink(directory, file_bytes=9000, beside=beside))  # and after restarts
        await publisher.publish(model, version)
        report = await puller.pull()
        assert report is not None
        kinds.append(report.kind)
        current = (directory / "current").resolve()
        index = json.loads((current / "model.safetensors.index.json").read_text())["weight_map"]
        files = sorted(set(index.values()))
        assert files == [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
        assert len(files) == 3
        assert {path.name for path in current.iterdir()} == {
            *files, "config.json", "model.safetensors.index.json", "state.msgpack"
        }  # fmt: skip
        assert same({name: load_file(current / file)[name] for name, file in index.items()}, model)
        change(model, version)
    assert kinds == ["full", "delta", "delta", "delta"]
    await Publisher(store, stream="s", incarnation=2).publish(directory / "current", 9)
    again = await Puller(store, SafetensorsSink(tmp_path / "again")).pull()  # as one file
    assert again is not None
    assert len(list((tmp_path / "again" / "current").glob("*.safetensors"))) == 1


async def test_nothing_that_was_left_behind_ends_in_a_version(
    store: Store, tmp_path: Path, small_frames: int, model: Arrays, change: Change, same: Same
) -> None:
    """The copy that is written anew is not trusted for a byte."""
    directory = tmp_path / "served"
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, SafetensorsSink(directory))
    for version in range(6):
        await publisher.publish(model, version)
        for path in (directory / "a", directory / "b"):
            if path.exists() and path.name != (directory / "current").readlink().name:
                size = (path / "model.safetensors").stat().st_size
                (path / "model.safetensors").write_bytes(bytes([255]) * size)
                (path / "model-00007-of-00009.safetensors").write_bytes(b"stale")
        await puller.pull()
        assert same(served(directory), model)
        change(model, 0)
        model["half"][:2] += 1
        if version == 3:  # another layout, and back
            await publisher.publish({"other": np.ones(5)}, 100)
            await puller.pull()
            publisher = Publisher(store, stream="s", incarnation=2)
