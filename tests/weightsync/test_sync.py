"""Publisher to puller, over both kinds of store."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from astraflow.weightsync import (
    CorruptVersion,
    DirectoryStore,
    MemoryStore,
    Publisher,
    Puller,
    Retention,
    SinkState,
    StaleIncarnation,
    Store,
    TensorSink,
    TensorSpec,
    VersionGone,
    WeightSyncError,
    open_store,
)
from astraflow.weightsync.manifest import HEAD, decode_head

Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays, int], None]
Copy = Callable[[Arrays], Arrays]
Same = Callable[[Arrays, Arrays], bool]
InTurn = Callable[[Publisher, Arrays, Puller, Arrays, int], Awaitable[list[str]]]

DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)


@st.composite
def models(draw: st.DrawFn) -> tuple[Arrays, Arrays]:
    """A model of any bits (NaN payloads, ±0, infinities among them), and the same after a step."""
    seed = draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    before, after = {}, {}
    for number in range(draw(st.integers(1, 5))):
        dtype, shape = np.dtype(draw(st.sampled_from(DTYPES))), draw(SHAPES)
        high = 2 if dtype.kind == "b" else 256
        size = int(np.prod(shape)) * dtype.itemsize
        old = rng.integers(0, high, size, dtype=np.uint8)
        hit = rng.random(size) < draw(st.sampled_from([0.0, 0.01, 1.0]))
        new = np.where(hit, rng.integers(0, high, size, dtype=np.uint8), old)
        before[f"t{number}"] = old.view(dtype).reshape(shape)
        after[f"t{number}"] = new.view(dtype).reshape(shape)
    before["one"], after["one"] = np.array(0.0, np.float32), np.array(-0.0, np.float32)
    return before, after


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=models())
def test_any_tensors_round_trip(pair: tuple[Arrays, Arrays], small_frames: int, copy: Copy, same: Same) -> None:
    before, after = pair

    async def run() -> None:
        store = MemoryStore("round-trip")
        try:
            live = {name: np.zeros_like(tensor) for name, tensor in before.items()}
            publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
            for version, tensors in enumerate((before, after, after, before)):
                await publisher.publish(tensors, version)
                report = await puller.pull()
                assert report is not None
                assert report.version == version
                assert same(live, tensors)
        finally:
            store.close()

    anyio.run(run)


async def test_full_then_delta_then_nothing(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = {name: np.zeros_like(tensor) for name, tensor in model.items()}
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    assert await puller.pull() is None

    first = await publisher.publish(model, 0)
    assert (first.anchor, first.density, first.delta_bytes) == (True, 1.0, 0)
    assert first.anchor_bytes > first.dense_bytes
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.kind, pulled.full_bytes, pulled.digest) == ("full", first.anchor_bytes, first.digest)
    assert same(live, model)

    change(model, 1)
    second = await publisher.publish(model, 1)
    assert not second.anchor
    assert 0.01 < second.density < 0.04
    assert 0 < second.delta_bytes < first.dense_bytes / 4
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.kind, pulled.full_bytes, pulled.delta_bytes) == ("delta", 0, second.delta_bytes)
    assert same(live, model)
    assert await puller.pull() is None

    third = await publisher.publish(model, 2)
    assert (third.density, third.delta_bytes, third.digest) == (0.0, 0, second.digest)
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.version, pulled.delta_bytes) == (2, 0)


async def test_a_sink_several_versions_behind_follows_the_chain(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    deltas = 0
    for version in (1, 2, 5):
        change(model, version)
        deltas += (await publisher.publish(model, version)).delta_bytes
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.kind, pulled.version, pulled.delta_bytes) == ("chain", 5, deltas)
    assert same(live, model)

    fresh = copy(model)
    pulled = await Puller(store, TensorSink(fresh)).pull()  # anchor + chain
    assert pulled is not None
    assert (pulled.kind, pulled.delta_bytes) == ("full", deltas)
    assert same(fresh, model)


async def test_published_mode_syncs_fully_at_its_interval(
    store: Store, small_frames: int, model: Arrays, copy: Copy, in_turn: InTurn
) -> None:
    live = copy(model)
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=3)
    puller = Puller(store, TensorSink(live), mode="published", interval=3)
    kinds = await in_turn(publisher, model, puller, live, 7)
    assert kinds == ["full", "delta", "delta", "full", "delta", "delta", "full"]


async def test_the_old_weights_serve_until_commit(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
    await publisher.publish(model, 0)
    await puller.pull()
    old = copy(model)
    change(model, 1)
    await publisher.publish(model, 1)

    staged = await puller.stage()
    assert staged is not None
    assert staged.version == 1
    assert same(live, old)
    staged.abort()
    with pytest.raises(WeightSyncError):
        staged.commit()
    replaced, staged = await puller.stage(), await puller.stage()
    assert replaced is not None
    assert staged is not None
    with pytest.raises(WeightSyncError):
        replaced.commit()
    assert same(live, old)
    assert staged.commit().version == 1
    assert same(live, model)
    with pytest.raises(WeightSyncError):
        staged.commit()


async def test_a_stage_waits_for_a_commit_under_way(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    entered, leave, order = threading.Event(), threading.Event(), []

    class Slow(TensorSink):
        def commit(self, state: SinkState) -> None:
            entered.set()
            assert leave.wait(10)
            super().commit(state)
            order.append("commit")

        def begin(self, layout: Sequence[TensorSpec]) -> None:
            order.append("begin")
            super().begin(layout)

    live = copy(model)
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, Slow(live))
    await publisher.publish(model, 0)
    staged = await puller.stage()
    assert staged is not None
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, staged.commit)
        await anyio.to_thread.run_sync(entered.wait)
        change(model, 1)
        await publisher.publish(model, 1)
        group.start_soon(puller.pull)
        await anyio.sleep(0.05)
        leave.set()
    assert order == ["begin", "commit", "begin", "commit"]
    assert same(live, model)


async def test_a_later_incarnation_takes_over(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    live = copy(model)
    puller = Puller(store, TensorSink(live))
    old = Publisher(store, stream="s", incarnation=1)
    for version in range(4):
        await old.publish(model, version)
        change(model, version)
    await puller.pull()
    store.put("1/v/9/delta.ws", [b"of a version that never came to be"])

    new = Publisher(store, stream="s", incarnation=2)
    report = await new.publish(model, 2)  # rolled back to a lower version
    assert report.anchor
    with pytest.raises(StaleIncarnation, match="incarnation 2"):
        await old.publish(model, 4)
    with pytest.raises(StaleIncarnation):
        await Publisher(store, stream="s", incarnation=0).publish(model, 10)
    pulled = await puller.pull()
    assert pulled is not None
    assert (pulled.version, pulled.incarnation) == (2, 2)
    assert same(live, model)
    named = {f"{ref.incarnation}/v/{ref.version}" for ref in decode_head(store.read(HEAD)).versions}
    assert {key.rpartition("/")[0] for key in store.list("") if "/" in key} == named
    change(model, 9)
    assert not (await new.publish(model, 3)).anchor


async def test_files_of_a_later_incarnation_are_left_alone(store: Store, model: Arrays) -> None:
    """It may be writing its first version just now."""
    store.put("3/v/9/delta.ws", [b"to be"])
    store.put("1/v/7/delta.ws", [b"abandoned"])
    publisher = Publisher(store, stream="s", incarnation=2)
    await publisher.publish(model, 0)
    assert [key for key in store.list("") if not key.startswith("2/") and "/" in key] == ["3/v/9/delta.ws"]


async def test_what_cannot_be_published_is_refused(store: Store, model: Arrays) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    await publisher.publish(model, 3)
    for version in (3, 2):
        with pytest.raises(ValueError, match="ascend"):
            await publisher.publish(model, version)
    with pytest.raises(ValueError, match="stream 's'"):
        await Publisher(store, stream="other", incarnation=1).publish(model, 4)
    with pytest.raises(ValueError, match="complex64"):
        await publisher.publish({"z": np.zeros(3, np.complex64)}, 4)
    with pytest.raises(ValueError, match="no tensors"):
        await publisher.publish({}, 4)
    with pytest.raises(TypeError):
        await publisher.publish({"a": [1, 2]}, 4)
    assert (await publisher.publish(model, 4)).density == 0.0


async def test_a_second_publisher_of_an_incarnation_fences_the_first(store: Store, model: Arrays) -> None:
    first = Publisher(store, stream="s", incarnation=1)
    await first.publish(model, 0)
    assert (await Publisher(store, stream="s", incarnation=1).publish(model, 1)).anchor
    with pytest.raises(StaleIncarnation):
        await first.publish(model, 2)


@pytest.mark.parametrize(("anchor_every", "keep"), [(1, 1), (4, 1), (3, 5), (10, 4)])
async def test_retention_is_bounded_and_never_breaks_a_chain(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same, anchor_every: int, keep: int
) -> None:
    publisher = Publisher(
        store, stream="s", incarnation=1, anchor_every=anchor_every, retention=Retention(versions=keep)
    )
    late = copy(model)
    behind = Puller(store, TensorSink(late))
    for version in range(16):
        change(model, version)
        await publisher.publish(model, version)
        fresh = {name: np.zeros_like(tensor) for name, tensor in model.items()}
        assert await Puller(store, TensorSink(fresh)).pull() is not None
        assert same(fresh, model)
        if version % keep == 0:  # at most `keep` behind: deltas alone, once it has a version
            pulled = await behind.pull()
            assert pulled is not None
            assert same(late, model)
            assert version == 0 or anchor_every == 1 or pulled.kind in ("delta", "chain")
        named = decode_head(store.read(HEAD)).versions
        assert len(named) <= anchor_every + keep
        assert {key.split("/")[2] for key in store.list("1/v/")} == {str(ref.version) for ref in named}


async def test_pullers_beside_a_publisher_always_see_one_version(
    store: Store, small_frames: int, model: Arrays, change: Change, copy: Copy, same: Same
) -> None:
    published: dict[int, Arrays] = {}
    done = anyio.Event()
    other = open_store(store.url)

    async def publish() -> None:
        publisher = Publisher(store, stream="s", incarnation=1, anchor_every=3, retention=Retention(versions=2))
        for version in range(25):
            change(model, version)
            published[version] = copy(model)
            await publisher.publish(model, version)
        done.set()

    async def pull(pause: float) -> None:
        live = {name: np.zeros_like(tensor) for name, tensor in model.items()}
        puller, seen = Puller(other, TensorSink(live)), -1
        while not (done.is_set() and seen == 24):
            pulled = await puller.pull()
            if pulled is not None:
                assert pulled.version > seen
                seen = pulled.version
                assert same(live, published[seen])
            await anyio.sleep(pause)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(publish)
            for pause in (0.0, 0.001, 0.02):
                group.start_soon(pull, pause)


async def test_a_layout_that_changes_starts_anew(store: Store, model: Arrays, copy: Copy, same: Same) -> None:
    publisher = Publisher(store, stream="s", incarnation=1)
    await publisher.publish(model, 0)
    wider = {**model, "extra": np.ones(7, np.float32)}
    live = copy(wider)
    assert (await publisher.publish(wider, 1)).anchor
    pulled = await Puller(store, TensorSink(live)).pull()
    assert pulled is not None
    assert same(live, wider)
    with pytest.raises(CorruptVersion, match="extra"):
        await Puller(store, TensorSink(copy(model))).pull()


async def test_a_frame_of_full_size(store: Store) -> None:
    """Three frames of 16 MiB and a bit, changed at their edges."""
    tensor = np.zeros((49 << 20) // 4, np.float32)
    live = tensor.copy()
    publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink({"t": live}))
    await publisher.publish({"t": tensor}, 0)
    await puller.pull()
    edges = [0, (16 << 20) // 4 - 1, (16 << 20) // 4, tensor.size - 1]
    tensor[edges] = np.nan
    report = await publisher.publish({"t": tensor}, 1)
    assert report.density * tensor.size == pytest.approx(len(edges))
    await puller.pull()
    assert live.tobytes() == tensor.tobytes()


async def test_the_event_loop_is_not_blocked(tmp_path: Path) -> None:
    """A 10 ms probe beside publishing and pulling 64 MB."""
    store = DirectoryStore(tmp_path)
    tensor = np.random.default_rng(0).normal(size=16 << 20).astype(np.float32)
    live = np.zeros_like(tensor)
    lags: list[float] = []

    async def probe() -> None:
        while True:
            before = anyio.current_time()
            await anyio.sleep(0.01)
            lags.append(anyio.current_time() - before - 0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(probe)
        publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink({"t": live}))
        for version in range(3):
            tensor[version::100] += 1
            await publisher.publish({"t": tensor}, version)
            await puller.pull()
        group.cancel_scope.cancel()
    assert np.median(lags) < 0.05


async def test_a_puller_goes_back_to_a_version_and_on_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    publisher = Publisher(store, stream="s", incarnation=1, anchor_every=3, retention=Retention(versions=4))
    here = {"w": np.zeros(64, np.float32)}
    puller = Puller(store, TensorSink(here))
    for version in range(12):
        await publisher.publish({"w": np.full(64, version, np.float32)}, version)
        if version % 4 == 3:
            await puller.pull()
    for wanted in (9, 10, 8, 11):
        staged = await puller.stage((1, wanted))
        assert staged is not None
        assert (await anyio.to_thread.run_sync(staged.commit)).version == wanted
        assert set(here["w"].tolist()) == {float(wanted)}
        assert await puller.stage((1, wanted)) is None, "it is there"
    assert await puller.stage((1, 12)) is None, "it is to come"
    with pytest.raises(VersionGone):
        await puller.stage((1, 2))
    assert set(here["w"].tolist()) == {11.0}


async def test_a_pull_says_how_far_it_is(store: Store, model: Arrays, small_frames: int, change: Change) -> None:
    publisher = Publisher(store, stream="p", incarnation=1)
    told: list[tuple[int, int]] = []
    sink = TensorSink({name: np.zeros_like(array) for name, array in model.items()})
    puller = Puller(store, sink, progress=lambda done, total: told.append((done, total)))
    for version in range(2):
        told.clear()
        await publisher.publish(model, version)
        report = await puller.pull()
        assert report is not None
        payload = report.full_bytes + report.delta_bytes
        done = [count for count, _ in told]
        assert {total for _, total in told} == {payload}
        assert done == sorted(done)
        assert len(done) > 1
        # The header of an anchor is not read.
        assert payload - 4096 < done[-1] <= payload
        change(model, version)
