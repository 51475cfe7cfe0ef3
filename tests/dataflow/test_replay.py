"""What batches are made of: order, groups, staleness, replay, and how much may be under way."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from astraflow.dataflow import Context, Empty, Entry, PolicyFeed, Replay, RunFailed, TrainSample
from astraflow.dataflow.algorithms.catalogue import CORRECTIONS, PICKS
from astraflow.dataflow.replay import ReplayPool
from astraflow.dataflow.serving import Serving

CONTEXT = Context(seed=5, model_id="a", n_samples=4)


def entries(kit: Any, count: int, version: int = 0, first: int = 0, group: int = 1) -> list[Entry]:
    """`count` entries in groups of `group`, rewards 0, 1, 2, … within each, so that advantages differ."""
    made: list[Entry] = []
    for task in range(first, first + count, group):
        samples = kit.group(kit.prompts(1)[0], *map(float, range(group)), version=version, task=f"t{task}").samples
        made.extend(Entry(version, task + i, sample) for i, sample in enumerate(samples))
    return made


def pool(staleness: int = 8, by: Any = "samples", **fields: Any) -> ReplayPool:
    return ReplayPool(Replay(**({"ratio": 0.5} | fields)), by, staleness, CONTEXT)


def serving(**fields: Any) -> Serving:
    return Serving(PolicyFeed(model_id="a", **({"batch_size": 4} | fields)), CONTEXT)


def fill(kit: Any, supply: Serving, count: int, version: int = 0, first: int = 0, group: int = 4) -> None:
    for entry in entries(kit, count, version, first, group):
        supply.add(entry.sample, version)


def ids(samples: Any) -> list[str]:
    return [sample.sample_id for sample in samples]


# --- the pool ----------------------------------------------------------------------------------------------------


def test_staleness_bounds_what_is_replayed(kit: Any) -> None:
    for bounds in ({"staleness": 2}, {"max_staleness": 2}):
        held = pool(**bounds)
        held.offer(entries(kit, 3, version=4) + entries(kit, 2, version=5, first=3))
        assert [held.available(version) for version in (5, 6, 7, 8)] == [5, 5, 2, 0]


def test_uses_are_capped_the_first_included(kit: Any) -> None:
    held = pool(max_uses=3)
    held.offer(entries(kit, 2))
    assert [len(held.take(2, 1)) for _ in range(3)] == [2, 2, 0]


def test_the_pool_is_bounded_and_forgets_the_first(kit: Any) -> None:
    held = pool(capacity=5, pick="latest")
    held.offer(entries(kit, 8))
    assert sorted(entry.arrival for entry in held.take(99, 0)) == [3, 4, 5, 6, 7]
    assert held.stats() == {"kept": 5.0, "replayed": 5.0}


def test_no_replay_keeps_nothing(kit: Any) -> None:
    held = pool(ratio=0.0)
    held.offer(entries(kit, 8))
    assert held.available(0) == 0


def test_latest_takes_the_newest_versions(kit: Any) -> None:
    held = pool(pick="latest")
    held.offer(entries(kit, 3, version=2) + entries(kit, 3, version=1, first=3))
    assert [entry.arrival for entry in held.take(4, 3)] == [2, 1, 0, 5]


def test_random_is_uniform_without_replacement(kit: Any) -> None:
    pick = PICKS.build("random", CONTEXT)
    units = [[entry] for entry in entries(kit, 5)]
    counts = [0] * 5
    for _ in range(2000):
        chosen = pick.pick(units, 2)
        assert len(set(chosen)) == 2
        for index in chosen:
            counts[index] += 1
    assert all(abs(count - 800) < 5 * 22 for count in counts), counts


def test_prioritised_goes_by_the_size_of_the_advantage(kit: Any) -> None:
    """A group of rewards 0, 1, 2: advantages -1, 0, 1. What has none comes last."""
    pick = PICKS.build("prioritised", CONTEXT)
    (prompt,) = kit.prompts(1)
    small = kit.group(prompt, 0.0, 0.0, 0.0, 0.0, 1.0, task="u").samples  # advantages -0.45 x 4, 1.79
    spread = kit.group(prompt, 0.0, 1.0, 2.0).samples
    units = [[Entry(0, i, sample)] for i, sample in enumerate((*spread, *small))]
    counts = [0] * len(units)
    for _ in range(3000):
        (index,) = pick.pick(units, 1)
        counts[index] += 1
    total = 1 + 0 + 1 + 4 * 0.447 + 1.789
    for index, weight in enumerate((1, 0, 1, 0.447, 0.447, 0.447, 0.447, 1.789)):
        assert counts[index] == pytest.approx(3000 * weight / total, abs=130)
    assert pick.pick(units, 8)[-1] == 1


@pytest.mark.parametrize("line", ["random", "prioritised", "latest"])
@pytest.mark.parametrize("by", ["samples", "groups"])
def test_a_restored_pool_gives_what_it_would_have_given(kit: Any, line: str, by: Any) -> None:
    one, other = pool(pick=line, by=by, max_uses=4), pool(pick=line, by=by, max_uses=4)
    held = entries(kit, 24, version=1, group=4) + entries(kit, 8, version=2, first=24, group=4)
    one.offer(held)
    one.take(3, 2)
    one.rebase(1)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(one.state())))
    assert other.available(2) == 0
    stranger = entries(kit, 4, first=900)
    assert other.refill(entry.sample for entry in [*stranger, *reversed(held)]) == 0
    for version in (2, 3, 4, 5):
        assert ids(e.sample for e in other.take(3, version)) == ids(e.sample for e in one.take(3, version))
    assert other.state() == one.state()


def test_what_cannot_be_refilled_is_forgotten(kit: Any) -> None:
    one, other = pool(), pool()
    held = entries(kit, 4)
    one.offer(held)
    other.restore(one.state())
    assert other.refill(entry.sample for entry in held[:3]) == 1
    assert other.available(0) == 3


# --- batches -----------------------------------------------------------------------------------------------------


def test_a_batch_has_its_share_of_replay_and_the_rest_is_fresh(kit: Any) -> None:
    supply = serving(batch_size=10, replay=Replay(ratio=0.35))
    fill(kit, supply, 20)
    first = supply.cut(0)
    assert (first.figures.fresh, len(first.samples)) == (10, 10), "nothing was consumed yet"
    assert supply.fresh_needed(1) == 7
    second = supply.cut(1)
    assert (second.figures.fresh, len(second.samples)) == (7, 10)
    assert [sample.replayed for sample in second.samples] == [False] * 7 + [True] * 3
    assert set(ids(second.samples[7:])) <= set(ids(first.samples))
    assert len(set(ids(second.samples))) == 10
    assert second.figures.stats() == {"samples": 10.0, "replayed": 3.0, "effective": 1.0}


def test_replay_fills_only_as_far_as_it_can(kit: Any) -> None:
    supply = serving(batch_size=8, max_staleness=2, replay=Replay(ratio=0.5))
    fill(kit, supply, 16)
    supply.cut(0)
    fill(kit, supply, 8, version=9, first=16)
    assert len(supply.drop_stale(9)) == 8
    assert supply.fresh_needed(9) == 8, "all consumed samples are too stale by now"
    assert supply.cut(9).figures.fresh == 8


def test_a_last_smaller_batch_keeps_the_mix(kit: Any) -> None:
    supply = serving(batch_size=8, replay=Replay(ratio=0.5))
    fill(kit, supply, 8)
    supply.cut(0)
    fill(kit, supply, 3, version=1, first=8, group=3)
    last = supply.cut(1)
    assert (last.figures.fresh, len(last.samples)) == (3, 6)


def test_batches_of_whole_groups(kit: Any) -> None:
    supply = serving(batch_size=3, batch_by="groups", order="fifo", replay=Replay(ratio=0.4))
    fill(kit, supply, 24)
    assert (supply.units, len(supply)) == (6, 24)
    first = supply.cut(0)
    assert {sample.group_id for sample in first.samples} == {"t0", "t4", "t8"}
    assert len(first.samples) == 12
    second = supply.cut(1)
    assert (second.figures.fresh, len(second.samples)) == (8, 12), "int(3 * 0.4) = 1 group is replayed"
    assert len({sample.group_id for sample in second.samples}) == 3


def test_a_group_is_dropped_whole_for_staleness_and_for_room(kit: Any) -> None:
    supply = serving(batch_size=1, batch_by="groups", max_staleness=1)
    (old, *young) = entries(kit, 4, version=5, group=4)
    supply.add(msgspec.structs.replace(old.sample, sequence=kit.sequence(version=3, reward=0.0)), 9)
    for entry in young:
        supply.add(entry.sample, 9)
    fill(kit, supply, 4, version=5, first=4)
    assert len(supply.drop_stale(5)) == 4
    dropped = [supply.add(e.sample, 9)[1] for e in entries(kit, 12, version=6, first=8, group=4)]
    assert [len(gone) for gone in dropped].count(4) == 1


@pytest.mark.parametrize(("order", "versions"), [("edf", [1, 2]), ("fifo", [3, 1]), ("lifo", [2, 1])])
def test_order_is_the_policys(kit: Any, order: str, versions: list[int]) -> None:
    supply = serving(batch_size=2, order=order)
    for first, version in enumerate((3, 1, 2)):
        fill(kit, supply, 1, version=version, first=first, group=1)
    assert [s.sequence.oldest_version for s in supply.cut(3).samples] == versions


# --- staleness ---------------------------------------------------------------------------------------------------


def test_stale_samples_are_kept_with_less_weight_and_a_narrow_range(kit: Any) -> None:
    keep = CORRECTIONS.build("keep(beyond=3, decay=0.5, low=0.9, high=1.1)", CONTEXT)
    (sample,) = kit.samples(1.0)
    assert keep.limit(2) == 5
    made = [keep.correct(sample, staleness, 2) for staleness in (0, 2, 3, 5)]
    assert [s.weight for s in made] == [1.0, 1.0, 0.5, 0.125]
    assert [s.ratio_range for s in made] == [None, None, (0.9, 1.1), (0.9, 1.1)]
    for wrong in ("beyond=-1", "decay=0", "low=1.1", "high=0.9"):
        with pytest.raises(ValueError, match=r"beyond is|low is"):
            CORRECTIONS.build(f"keep({wrong})", CONTEXT)


def test_drop_is_at_the_bound_and_keep_beyond_it(kit: Any) -> None:
    for line, left in (("drop", [4, 5]), ("keep(beyond=2)", [2, 3, 4, 5])):
        supply = serving(max_staleness=1, staleness=line)
        for version in range(6):
            fill(kit, supply, 1, version=version, first=version, group=1)
        supply.drop_stale(5)
        cut = supply.cut(5)
        assert [s.sequence.oldest_version for s in cut.samples] == left
        assert all((s.weight < 1) == (s.sequence.oldest_version < 4) for s in cut.samples)


def test_staleness_of_a_batch_is_reported(kit: Any) -> None:
    import numpy as np

    from astraflow.dataflow import Array

    supply = serving(batch_size=2)
    (sample,) = kit.samples(1.0, task="x")
    versions = np.array([-1, -1, -1, 2, 3, 5], np.int32)
    mixed = msgspec.structs.replace(sample.sequence, versions=Array.of(versions))
    supply.add(msgspec.structs.replace(sample, sequence=mixed), 9)
    fill(kit, supply, 1, version=6, first=1, group=1)
    cut = supply.cut(7).figures
    assert (cut.staleness_mean, cut.staleness_max, cut.staleness_min, cut.version_span) == (3.0, 5, 1, 3)


async def test_a_buffer_full_of_stale_samples_ends_in_an_error_with_figures(kit: Any) -> None:
    """Fault 4, with replay and correction on: bounded effort, never an empty batch."""
    feed = PolicyFeed(
        model_id="solver", batch_size=4, max_staleness=1, staleness="keep(beyond=1)", replay=Replay(ratio=0.5)
    )
    dataflow = kit.dataflow([feed], max_dropped_batches=2)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow, version=5)
    for _ in range(2):
        for task in await kit.lease(dataflow, 1):
            await kit.mixed(dataflow, task, versions={"solver": 0})
        with contextlib.suppress(RunFailed):
            assert (await kit.ask(dataflow, incarnation, 5)).batch is None
    with pytest.raises(RunFailed, match=r"8 sequences in a row were more than 2 versions old at version 5"):
        await kit.ask(dataflow, incarnation, 5)


# --- how much may be under way -----------------------------------------------------------------------------------


def test_the_horizon_is_the_fresh_part_of_the_batches(kit: Any) -> None:
    feed = PolicyFeed(model_id="a", batch_size=256, max_staleness=8, replay=Replay(ratio=0.3))
    assert feed.replayed == 76
    assert feed.horizon == 9 * (256 - 76)


async def leased(kit: Any, dataflow: Any) -> int:
    return len(await kit.lease(dataflow, 999))


async def test_admission_counts_what_replay_will_give(kit: Any) -> None:
    for ratio, groups in ((0.0, 9), (0.5, 5)):  # 3 * 12 / 4, and 3 * 6 / 4 rounded up
        feed = PolicyFeed(model_id="solver", batch_size=12, max_staleness=2, replay=Replay(ratio=ratio))
        dataflow = kit.dataflow([feed])
        await kit.start(dataflow)
        await kit.attach(dataflow)
        assert await leased(kit, dataflow) == groups


async def test_the_first_batch_is_reachable_before_there_is_anything_to_replay(kit: Any) -> None:
    """With staleness 0 nothing is ever replayed, and (0 + 1) * (8 - 7) sequences would never make a batch of 8."""
    feed = PolicyFeed(model_id="solver", batch_size=8, max_staleness=0, replay=Replay(ratio=0.9), steps=3)
    dataflow = kit.dataflow([feed])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for version in range(3):
        for task in await kit.lease(dataflow, 99):
            await kit.mixed(dataflow, task, versions={"solver": version})
        batch = (await kit.ask(dataflow, incarnation, version)).batch
        assert len(batch.samples) == 8
        assert not any(sample.replayed for sample in batch.samples)
        await kit.publish(dataflow, incarnation, version + 1)


async def test_a_replayed_batch_is_the_same_when_it_is_asked_for_again(kit: Any) -> None:
    feed = PolicyFeed(model_id="solver", batch_size=8, replay=Replay(ratio=0.5))
    dataflow = kit.dataflow([feed])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for task in await kit.lease(dataflow, 3):
        await kit.mixed(dataflow, task)
    first, second = [(await kit.ask(dataflow, incarnation, version)).batch for version in (0, 1)]
    assert sum(sample.replayed for sample in second.samples) == 4
    again = await kit.attach(dataflow)
    assert (await kit.ask(dataflow, again, 0)).batch == first
    assert (await kit.ask(dataflow, again, 1)).batch == second
    status = (await dataflow.status(Empty())).policies[0]
    assert status.consumed == 12, "what is replayed is consumed once"
    assert status.data["replay"]["replayed"] == 4.0


async def test_batches_by_groups_through_the_dataflow(kit: Any) -> None:
    feed = PolicyFeed(model_id="solver", batch_size=2, batch_by="groups", max_staleness=1, steps=5)
    dataflow = kit.dataflow([feed])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    tasks = await kit.lease(dataflow, 99)
    assert len(tasks) == 4, "two batches of two groups"
    for task in tasks[:3]:
        await kit.mixed(dataflow, task)
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert (len(batch.samples), len({s.group_id for s in batch.samples})) == (8, 2)
    assert (await kit.ask(dataflow, incarnation, 1)).batch is None


def test_samples_carry_nothing_unless_they_must(kit: Any) -> None:
    (sample,) = kit.samples(1.0)
    assert isinstance(sample, TrainSample)
    assert (sample.weight, sample.ratio_range, sample.replayed) == (1.0, None, False)
