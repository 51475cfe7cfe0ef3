"""What weightsync promises, one test or more for each; numbers as in docs/weightsync.md.

3 (killed at any point) is in test_crash.py, 6 (a cut connection) with the remote stores, 8 (any bits of any dtype and
shape) in test_sync.py and with the codecs, 7 (memory) in test_guarantees_memory.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from safetensors.numpy import load_file

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    MemoryStore,
    Publisher,
    Puller,
    Retention,
    SafetensorsSink,
    TensorSink,
    WeightSyncError,
)
from astraflow.weightsync.frames import dense_digest
from astraflow.weightsync.layout import canonical, cut, layout_digest, root_digest
from astraflow.weightsync.manifest import HEAD, decode_head
from astraflow.weightsync.tensors import spec_of

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]


def root(tensors: Arrays, frame_bytes: int) -> str:
    """The name of these bytes, worked out without a publisher or a manifest."""
    layout = canonical(spec_of(name, tensor) for name, tensor in tensors.items())
    dense = {name: tensor.reshape(-1).view(np.uint8) for name, tensor in tensors.items()}
    digests = (
        dense_digest(np.ascontiguousarray(dense[layout[at].name][offset : offset + length]))
        for at, offset, length in cut(layout, frame_bytes)
    )
    return root_digest(layout_digest(layout, frame_bytes), digests)


def served(directory: Path) -> Arrays:
    tensors: Arrays = load_file(directory / "current" / "model.safetensors")
    return tensors


def start(
    script: str, *arguments: object, stdin: int | None = None, stdout: int | None = None, stderr: int | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, text=True)


# 1. After `commit` the bytes have the manifest's root, or nothing changed.


async def test_1_a_directory_has_the_root_or_what_it_had_though_any_call_fails(
    memory: MemoryStore,
    tmp_path: Path,
    small_frames: int,
    model: Arrays,
    change: Change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call that writes fails once, one after the other, in stage and commit."""
    directory = tmp_path / "served"
    publisher = Publisher(memory, stream="s", incarnation=1)
    first = await publisher.publish(model, 0)
    await Puller(memory, SafetensorsSink(directory)).pull()
    change(model, 1)
    second = await publisher.publish(model, 1)
    left = calls = failed = 0

    def arm(name: str) -> None:
        original = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == left:
                raise OSError(28, f"No space left on device (in {name})")
            return original(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fsync", "rename", "open", "truncate", "mkdir", "symlink"):
        arm(name)
    sink = SafetensorsSink(directory)
    while sink.state().digest == first.digest:
        left, calls = failed + 1, 0
        try:
            await Puller(memory, sink).pull()
        except OSError:
            failed += 1
            assert sink.state().digest == first.digest
        left = 0
        assert root(served(directory), small_frames) == sink.state().digest
        assert SafetensorsSink(directory).state() == sink.state()
    assert failed > 15
    assert sink.state().digest == second.digest == root(model, small_frames)


async def test_1_live_tensors_have_the_root_or_what_they_had_though_any_write_fails(
    memory: MemoryStore, small_frames: int, model: Arrays, change: Change, copy: Copy
) -> None:
    live = copy(model)
    sink = TensorSink(live)
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, sink)
    first = await publisher.publish(model, 0)
    await puller.pull()
    change(model, 1)
    second = await publisher.publish(model, 1)

    def fail() -> None:
        raise RuntimeError("the device is lost")

    failed = 0
    while True:
        staged = await puller.stage()
        assert staged is not None
        changes = [(name, offset) for name, parts in sink._changes.items() for offset in parts]
        if failed == len(changes):
            break
        name, offset = changes[failed]
        sink._changes[name][offset] = sink._changes[name][offset]._replace(write=fail)
        with pytest.raises(RuntimeError, match="lost"):
            staged.commit()
        failed += 1
        assert root(live, small_frames) == sink.state().digest == first.digest
    assert failed > 8
    staged.commit()
    assert root(live, small_frames) == sink.state().digest == second.digest


# 2. What is not what it should be is refused before any write; the next pull recovers by itself.


@pytest.fixture
async def pair(
    memory: MemoryStore, small_frames: int, model: Arrays, change: Change, copy: Copy
) -> tuple[Arrays, TensorSink]:
    """A sink that holds version 0 of a stream whose newest version 1 has a delta and an anchor."""
    live = copy(model)
    sink = TensorSink(live)
    publisher = Publisher(memory, stream="s", incarnation=2, anchor_every=1, retention=Retention(versions=3))
    await publisher.publish(model, 0)
    await Puller(memory, sink).pull()
    change(model, 1)
    await publisher.publish(model, 1)
    return live, sink


KEYS = {
    "payload": "2/v/1/delta.ws",
    "manifest": "2/v/1/manifest.msgpack",
    "HEAD": HEAD,
    "anchor": "2/v/1/model.safetensors",
}


@pytest.mark.parametrize("what", KEYS)
async def test_2_a_flipped_bit_or_a_cut_is_refused(
    memory: MemoryStore, pair: tuple[Arrays, TensorSink], model: Arrays, copy: Copy, same: Same, what: str
) -> None:
    """One bit in each of 200 positions, and 20 lengths."""
    live, sink = pair
    old, whole = copy(live), bytes(memory.read(KEYS[what]))
    if what == "anchor":
        sink = TensorSink(live)  # holds no version, so that it starts from the anchor
    start = 8 + int.from_bytes(whole[:8], "little") if what == "anchor" else 0  # nobody reads an anchor's header
    rng = np.random.default_rng(0)
    positions = np.linspace(start, len(whole) - 1, 200).astype(int)
    bad = []
    for position in positions:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(8))
        bad.append(bytes(flipped))
    bad += [whole[:length] for length in np.linspace(0, len(whole) - 1, 20).astype(int)]
    state, changes = sink.state(), 0
    for number, data in enumerate(bad):
        memory.put(KEYS[what], [data])
        puller = Puller(memory, sink)
        with pytest.raises(CorruptVersion):
            await puller.pull()
        assert sink.state() == state
        assert same(live, old)
        if number % 10 == 0 and what == "payload":  # damaged for good: the next pull goes another way
            staged = await puller.stage()
            assert staged is not None
            changes = len(sink._changes)
            staged.abort()
    assert changes or what != "payload"
    memory.put(KEYS[what], [whole])
    report = await Puller(memory, sink).pull()
    assert report is not None
    assert same(live, model)


async def test_2_damage_for_good_is_gone_round_by_the_next_pull(
    memory: MemoryStore, pair: tuple[Arrays, TensorSink], model: Arrays, same: Same
) -> None:
    live, sink = pair
    memory.put(KEYS["payload"], [b"\xff" * len(memory.read(KEYS["payload"]))])
    puller = Puller(memory, sink)
    with pytest.raises(CorruptVersion):
        await puller.pull()
    report = await puller.pull()
    assert report is not None
    assert report.kind == "full"
    assert same(live, model)


async def test_2_the_wrong_order_base_or_incarnation_is_refused(
    memory: MemoryStore, pair: tuple[Arrays, TensorSink], model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live, sink = pair
    old, puller = copy(live), Puller(memory, sink)
    names = ("delta.ws", "manifest.msgpack", "model.safetensors")
    blobs = {key: bytes(memory.read(key)) for key in memory.list("") if "/" not in key or key.startswith("2/v/")}
    change(model, 2)
    publisher = Publisher(memory, stream="s", incarnation=3, anchor_every=1)
    await publisher.publish(model, 0)
    newest = bytes(memory.read(HEAD))

    # Version 1's files where version 0 of the next incarnation should be.
    right = {name: bytes(memory.read(f"3/v/0/{name}")) for name in names}
    for name in names[:2]:
        memory.put(f"3/v/0/{name}", [blobs[f"2/v/1/{name}"]])
        with pytest.raises(CorruptVersion):
            await Puller(memory, sink).pull()
        memory.put(f"3/v/0/{name}", [right[name]])
        assert same(live, old)

    # Somebody wrote to the live weights: the delta would start from what nobody published.
    live["embed"][0, 0] += 1
    touched = copy(live)
    with pytest.raises(WeightSyncError, match="next pull is full"):
        await puller.pull()
    assert same(live, touched)
    report = await puller.pull()
    assert report is not None
    assert (report.kind, report.incarnation) == ("full", 3)
    assert same(live, model)

    # A HEAD from before: an earlier version, an earlier incarnation.
    memory.put(HEAD, [blobs[HEAD]])
    with pytest.raises(CorruptVersion, match="stale copy"):
        await puller.pull()
    assert same(live, model)
    memory.put(HEAD, [newest])
    assert await puller.pull() is None


# 4. Readers never see mixed versions.

READER = """
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import load_file

directory, seen, loads = Path(sys.argv[1]), [], 0
while len(seen) < 6 or loads < 30:
    assert (directory / "current" / "state.msgpack").exists()
    current = (directory / "current").resolve()           # once, for all files
    tensors = {}
    try:
        for path in sorted(current.glob("*.safetensors")):
            tensors |= load_file(path)
    except FileNotFoundError:
        pass
    if len(tensors) != 9:                                 # two versions later, its files were taken away
        continue
    values = {value for tensor in tensors.values() for value in np.unique(tensor).tolist()}
    assert len(values) == 1, values
    loads += 1
    if values != set(seen[-1:]):
        seen += values
assert seen == sorted(seen), seen
"""


@pytest.mark.parametrize("file_bytes", [1 << 30, 70_000])
async def test_4_readers_of_a_directory_see_whole_versions(
    memory: MemoryStore, tmp_path: Path, small_frames: int, file_bytes: int
) -> None:
    """Processes load one file or five, over and over, while versions change under them."""
    directory, version = tmp_path / "served", 0
    model = {f"t{number}": np.zeros((50, 163), np.float32) for number in range(9)}
    publisher = Publisher(memory, stream="s", incarnation=1)
    puller = Puller(memory, SafetensorsSink(directory, file_bytes=file_bytes))
    await publisher.publish(model, 0)
    await puller.pull()
    readers = [start(READER, directory, stderr=subprocess.PIPE) for _ in range(2)]
    try:
        with anyio.fail_after(100):
            while any(reader.poll() is None for reader in readers):
                version += 1
                for tensor in model.values():
                    tensor[:] = version
                await publisher.publish(model, version)
                await puller.pull()
        for reader in readers:
            assert reader.returncode == 0, reader.communicate()[1]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


async def test_4_readers_of_live_tensors_see_whole_versions_under_the_lock_that_commit_takes(
    memory: MemoryStore, small_frames: int
) -> None:
    """The contract: who reads holds a lock, and so does who commits; staging takes none."""
    model = {f"t{number}": np.zeros(5_000, np.float32) for number in range(4)}
    live = {name: np.zeros_like(tensor) for name, tensor in model.items()}
    publisher, puller = Publisher(memory, stream="s", incarnation=1), Puller(memory, TensorSink(live))
    lock, done, faults = threading.Lock(), threading.Event(), list[set[float]]()
    reads = 0

    def read() -> None:
        nonlocal reads
        while not done.is_set():
            with lock:
                values = {value for tensor in live.values() for value in np.unique(tensor).tolist()}
            reads += 1
            time.sleep(0.0005)
            if len(values) != 1:
                faults.append(values)

    def commit(staged: Any) -> None:
        with lock:
            staged.commit()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for version in range(30):
            for tensor in model.values():
                tensor[:] = version
            await publisher.publish(model, version)
            staged = await puller.stage()
            assert staged is not None
            await anyio.to_thread.run_sync(commit, staged)
    finally:
        done.set()
        reader.join()
    assert not faults
    assert reads > 30


# 5. A publisher never waits for a reader.

STUCK = """
import sys
import anyio
from astraflow.weightsync import Puller, SafetensorsSink, open_store

class Slow(SafetensorsSink):
    def stage_dense(self, name, offset, data):
        super().stage_dense(name, offset, data)
        if not hasattr(self, "told"):
            self.told = print("in the middle", flush=True)
            sys.stdin.readline()

report = anyio.run(Puller(open_store(sys.argv[1]), Slow(sys.argv[2])).pull)
print(report.version, report.kind, flush=True)
"""


async def test_5_a_reader_that_is_stuck_in_the_middle_stops_nobody(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    """A process stopped while it stages: others publish and pull; what it reads stays, and it ends as it should."""
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=1, retention=Retention(versions=1))
    await publisher.publish(model, 0)
    first, other = copy(model), Puller(store, SafetensorsSink(tmp_path / "other"))
    reader = start(STUCK, store.url, tmp_path / "stuck", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert reader.stdin is not None
    assert reader.stdout is not None
    try:
        while "in the middle" not in await anyio.to_thread.run_sync(reader.stdout.readline):
            assert reader.poll() is None
        reader.send_signal(signal.SIGSTOP)
        with anyio.fail_after(60):
            for version in range(1, 6):
                change(model, version)
                await publisher.publish(model, version)
                assert (await other.pull()) is not None
                assert same(served(tmp_path / "other"), model)
        assert reader.poll() is None
        assert [ref.version for ref in decode_head(store.read(HEAD)).versions] == [5]
        assert store.list("1/v/0/")  # leased
        reader.send_signal(signal.SIGCONT)
        out, _ = await anyio.to_thread.run_sync(reader.communicate, "go on\n")
        assert "0 full" in out
        assert same(served(tmp_path / "stuck"), first)
        report = await Puller(store, SafetensorsSink(tmp_path / "stuck")).pull()
        assert report is not None
        assert same(served(tmp_path / "stuck"), model)
    finally:
        reader.kill()
        reader.wait()
