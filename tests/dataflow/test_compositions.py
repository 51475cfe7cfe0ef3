"""The published composition, dynamic sampling + replay 0.3 + GRESO, on prompts whose difficulty is known.

Of 90 prompts a third is always solved, a third never, a third half of the time; so two of three rollouts are wasted.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from astraflow.dataflow import Empty, ListSource, PolicyFeed, Prompt, Replay, Status, TrainBatch

STEPS, BATCH, N = 20, 64, 8
RATES = (1.0, 0.0, 0.5)


class Ran(msgspec.Struct):
    batches: list[TrainBatch]
    status: Status
    rollouts: int
    by_kind: dict[float, int]


def rate(prompt: Prompt) -> float:
    return RATES[int(prompt.id.removeprefix("p")) % 3]


async def run(kit: Any, *, filters: tuple[str, ...] = (), selectors: tuple[str, ...] = (), replay: float = 0.0) -> Ran:
    """A policy that does not change, trained for `STEPS` versions: one batch when there is one, else one more task."""
    feed = PolicyFeed(model_id="solver", batch_size=BATCH, steps=STEPS, replay=Replay(ratio=replay))
    dataflow = kit.dataflow(
        [feed],
        source=ListSource(kit.prompts(90), seed=0),
        n_samples=N,
        filters=filters,
        selectors=selectors,
        max_dropped_batches=50,
    )
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    rng, ran = random.Random(0), Ran([], await dataflow.status(Empty()), 0, dict.fromkeys(RATES, 0))
    while len(ran.batches) < STEPS:
        version = len(ran.batches)
        batch = (await kit.ask(dataflow, incarnation, version)).batch
        if batch is not None:
            ran.batches.append(batch)
            await kit.publish(dataflow, incarnation, version + 1)
            continue
        (task,) = await kit.lease(dataflow)
        wins = [{"solver": float(rng.random() < rate(task.prompt))} for _ in range(N)]
        await kit.submit(dataflow, task, wins, versions={"solver": version})
        ran.rollouts += N
        ran.by_kind[rate(task.prompt)] += N
    ran.status = await dataflow.status(Empty())
    return ran


def effective(ran: Ran) -> float:
    samples = [sample for batch in ran.batches for sample in batch.samples]
    return sum(sample.group_std > 0 for sample in samples) / len(samples)


async def test_what_each_algorithm_saves_and_costs(make_kit: Any) -> None:
    ds = ("zero_advantage",)
    vanilla = await run(make_kit())
    sampled = await run(make_kit(), filters=ds)
    replayed = await run(make_kit(), filters=ds, replay=0.3)
    full = await run(make_kit(), filters=ds, replay=0.3, selectors=("greso",))

    assert vanilla.rollouts == STEPS * BATCH
    assert 0.25 < effective(vanilla) < 0.42, "a third of the prompts carry a gradient"
    assert effective(sampled) == effective(replayed) == effective(full) == 1.0
    assert 2.5 < sampled.rollouts / vanilla.rollouts < 3.5, "dynamic sampling pays for what it drops"
    # int(64 * 0.3) = 19 of every batch but the first are replayed; groups of 8 round this off.
    saved = 1 - replayed.rollouts / sampled.rollouts
    assert 0.2 < saved < 0.4
    assert full.rollouts < 0.85 * replayed.rollouts, "GRESO does not roll out again what gave nothing"
    wasted = (full.by_kind[1.0] + full.by_kind[0.0]) / full.rollouts
    assert wasted < (replayed.by_kind[1.0] + replayed.by_kind[0.0]) / replayed.rollouts - 0.05
    assert full.by_kind[1.0] < full.by_kind[0.0], "solved prompts are skipped more than hopeless ones: lower floor"


async def test_the_composition_keeps_the_published_rules(kit: Any) -> None:
    ran = await run(kit, filters=("zero_advantage",), replay=0.3, selectors=("greso",))
    seen: set[str] = set()
    for batch in ran.batches:
        fresh = [sample for sample in batch.samples if not sample.replayed]
        again = [sample for sample in batch.samples if sample.replayed]
        assert len(batch.samples) == BATCH
        assert len(again) == (19 if seen else 0)
        assert {sample.sample_id for sample in again} <= seen, "only what was consumed is replayed"
        assert not {sample.sample_id for sample in fresh} & seen, "what is fresh is trained for the first time"
        assert len({sample.sample_id for sample in batch.samples}) == BATCH
        assert all(batch.version - sample.sequence.oldest_version <= 8 for sample in batch.samples)
        seen |= {sample.sample_id for sample in fresh}
    (policy,) = ran.status.policies
    assert policy.consumed == len(seen) == BATCH + (STEPS - 1) * (BATCH - 19)
    assert policy.consumed + policy.buffered + sum(policy.dropped.values()) == ran.rollouts, "every sample ends once"
    assert ran.status.data["selection"]["rejected"] > 0
    assert policy.data["greso"]["p_easy"] < 0.5 < policy.data["greso"]["p_hard"] + 0.3


async def test_a_data_set_that_ends_is_trained_to_its_last_sample(kit: Any) -> None:
    """Fault 5: the tail is neither lost nor repeated, with replay in every batch."""
    feed = PolicyFeed(model_id="solver", batch_size=8, steps=99, replay=Replay(ratio=0.5))
    dataflow = kit.dataflow([feed], source=ListSource(kit.prompts(7), seed=0, epochs=2))
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    batches: list[TrainBatch] = []
    while not (reply := await kit.ask(dataflow, incarnation, len(batches))).finished:
        if reply.batch is not None:
            batches.append(reply.batch)
            await kit.publish(dataflow, incarnation, len(batches))
        for task in await kit.lease(dataflow, 1):
            await kit.mixed(dataflow, task, versions={"solver": len(batches)})
    fresh = [sample.sample_id for batch in batches for sample in batch.samples if not sample.replayed]
    assert len(fresh) == len(set(fresh)) == 7 * 2 * 4
    assert all(batch.samples for batch in batches)
    assert (await dataflow.status(Empty())).policies[0].dropped == {}
