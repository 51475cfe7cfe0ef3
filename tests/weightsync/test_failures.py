"""What is damaged, fails, is removed or cancelled: the last good version stays, on both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    Entry,
    Publisher,
    Puller,
    Retention,
    Store,
    TensorSink,
    WeightSyncError,
    WrongBase,
)
from astraflow.weightsync.manifest import HEAD

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]


async def test_a_wrong_base_is_refused_and_the_next_pull_recovers(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    live["embed"][3, 4] += 1  # somebody wrote to the live weights
    before = copy(live)
    change(model, 1)
    await publisher.publish(model, 1)
    with pytest.raises(WrongBase, match="embed"):
        await puller.pull()
    assert same(live, before)
    pulled = await puller.pull()
    assert pulled is not None
    assert pulled.kind == "full"
    assert same(live, model)


def blobs(root: Path, name: str) -> list[Path]:
    return sorted(root.rglob(name), key=lambda path: int(path.parent.name))


@pytest.mark.parametrize("victim", ["delta.ws", "model.safetensors"])
async def test_any_flipped_bit_of_a_payload_is_refused(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same, victim: str
) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    live = copy(model)
    puller = Puller(store, TensorSink(live))
    await puller.pull()
    old = copy(model)
    change(model, 1)
    await publisher.publish(model, 1)
    if victim == "model.safetensors":
        puller = Puller(store, TensorSink(live))  # holds no verified version, so it starts from the anchor

    path = blobs(tmp_path, victim)[-1]
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little") if victim == "model.safetensors" else 0  # nobody reads its header
    rng = np.random.default_rng(0)
    for position in rng.integers(start, len(whole), 100):
        bad = bytearray(whole)
        bad[position] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(bad)
        with pytest.raises(CorruptVersion):
            await puller.stage()
        assert same(live, old)
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptVersion):
            await puller.stage()
    path.write_bytes(whole)
    assert await puller.pull() is not None
    assert same(live, model)


async def test_a_damaged_delta_is_left_behind_with_the_next_anchor(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=2)
    live = copy(model)
    puller = Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    for version in (1, 2):
        change(model, version)
        await publisher.publish(model, version)
    blobs(tmp_path, "delta.ws")[0].write_bytes(b"nonsense")
    with pytest.raises(CorruptVersion):
        await puller.pull()  # the chain 1, 2
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.kind, pulled.version) == ("full", 2)
    assert same(live, model)


async def test_a_missing_file_is_refused(tmp_path: Path, model: Arrays, change: Change, copy: Copy) -> None:
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1)
    puller = Puller(store, TensorSink(copy(model)))
    await publisher.publish(model, 0)
    await puller.pull()
    change(model, 1)
    await publisher.publish(model, 1)
    blobs(tmp_path, "delta.ws")[0].unlink()
    with pytest.raises(CorruptVersion, match="incomplete"):
        await puller.pull()


class Failing:
    """A store whose calls fail when told to."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.fail = ""

    @property
    def url(self) -> str:
        return self._store.url

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.fail and self.fail in key:
            raise OSError(28, "No space left on device")
        self._store.put(key, chunks)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        return self._store.read(key, offset, length)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        if self.fail == "swap":
            raise OSError(5, "Input/output error")
        return self._store.swap(key, old, new)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        return self._store.poll(key, seen)

    def entries(self, prefix: str) -> Sequence[Entry]:
        return self._store.entries(prefix)

    def delete(self, key: str) -> None:
        if self.fail == "delete":
            raise PermissionError(13, "Permission denied")
        self._store.delete(key)


@pytest.mark.parametrize("point", ["delta.ws", "manifest", "model.safetensors", "swap"])
async def test_a_failed_publish_leaves_the_last_version(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same, point: str
) -> None:
    failing = Failing(store)
    live = copy(model)
    publisher = Publisher(failing, stream="s", incarnation=1, anchor_every=2)
    puller = Puller(store, TensorSink(live))
    for version in range(2):
        change(model, version)
        await publisher.publish(model, version)
        await puller.pull()
    old = copy(model)
    head = bytes(store.read(HEAD))

    change(model, 2)
    failing.fail = point
    with pytest.raises(OSError, match=r"No space|output error"):
        await publisher.publish(model, 2)
    assert bytes(store.read(HEAD)) == head
    assert await puller.pull() is None
    assert same(live, old)

    failing.fail = ""
    change(model, 3)
    await publisher.publish(model, 3)  # the delta starts from version 1, the last that HEAD named
    pulled = await puller.pull()
    assert pulled is not None
    assert pulled.kind == "delta"
    assert same(live, model)
    assert "/v/2/" not in "".join(store.list(""))


async def test_that_old_versions_stay_does_not_fail_a_publish(store: Store, model: Arrays) -> None:
    failing = Failing(store)
    failing.fail = "delete"
    publisher = Publisher(failing, stream="s", incarnation=1, anchor_every=1, retention=Retention(versions=1))
    await publisher.publish(model, 0)
    await publisher.publish(model, 1)
    assert any(key.startswith("1/v/0/") for key in store.list(""))
    failing.fail = ""
    await publisher.publish(model, 2)
    assert not any(key.startswith(("1/v/0/", "1/v/1/")) for key in store.list(""))


async def test_a_cancelled_publish_can_be_followed_by_another(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    for version in range(1, 40):
        change(model, version)
        with anyio.move_on_after(0.0003 * version):
            await publisher.publish(model, version)
    change(model, 40)
    await publisher.publish(model, 40)
    pulled = await puller.pull()
    assert pulled is not None
    assert same(live, model)


async def test_a_cancelled_stage_leaves_the_old_weights(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    old = copy(model)
    change(model, 1)
    await publisher.publish(model, 1)
    for step in range(20):
        with anyio.move_on_after(0.0003 * step):
            await puller.stage()
        assert same(live, old)
    assert await puller.pull() is not None
    assert same(live, model)


class Removing(Failing):
    """A store that takes no leases, where the next version is published, and this one removed, while it is read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.before_read: Callable[[], None] | None = None

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        raise PermissionError("read-only")

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        if key.endswith("model.safetensors") and self.before_read is not None:
            hook, self.before_read = self.before_read, None
            hook()
        return super().read(key, offset, length)


async def test_a_version_removed_while_it_is_pulled_gives_way_to_the_newest(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    removing = Removing(store)
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=1, retention=Retention(versions=1))
    await publisher.publish(model, 0)
    live = {name: np.zeros_like(tensor) for name, tensor in model.items()}

    def publish_next() -> None:
        change(model, 1)
        anyio.from_thread.run(publisher.publish, model, 1)

    removing.before_read = publish_next
    pulled = await Puller(removing, TensorSink(live)).pull()
    assert pulled is not None
    assert pulled.version == 1
    assert same(live, model)


async def test_tensors_that_change_while_published_are_noticed(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    class Meddling(Failing):
        def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
            if self.fail:
                model["embed"][0, 0] += 1
            return super().swap(key, old, new)

    meddling = Meddling(store)
    publisher = Publisher(meddling, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    change(model, 1)
    meddling.fail = "after encoding"
    with pytest.raises(WeightSyncError, match="embed"):
        await publisher.publish(model, 1)
    meddling.fail = ""
    await publisher.publish(model, 2)
    live = copy(model)
    await Puller(store, TensorSink(live)).pull()
    assert same(live, model)


async def test_an_anchor_on_request_mends_a_stream_with_a_damaged_delta(
    tmp_path: Path, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    """Long before the next one is due."""
    store = DirectoryStore(tmp_path / "store")
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=100)
    live = copy(model)
    puller = Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    old = copy(model)
    change(model, 1)
    await publisher.publish(model, 1)
    (tmp_path / "store/1/v/1/delta.ws").write_bytes(b"nonsense")
    for _ in range(3):
        with pytest.raises(CorruptVersion):
            await puller.pull()
        assert same(live, old)
    change(model, 2)
    assert (await publisher.publish(model, 2, anchor=True)).anchor
    pulled = await puller.pull()
    assert pulled is not None
    assert pulled.kind == "full"
    assert same(live, model)
