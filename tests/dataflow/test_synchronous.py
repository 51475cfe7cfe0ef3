"""Synchronous mode: generate, train, sync in turn, the same parts in another order."""

from __future__ import annotations

from typing import Any

from astraflow.dataflow import Empty, PolicyFeed, SubmitRequest, Trajectory

NAMES = ("solver", "verifier")


def feeds(steps: int = 2) -> list[PolicyFeed]:
    return [
        PolicyFeed(model_id="solver", batch_size=4, steps=steps),
        PolicyFeed(model_id="verifier", batch_size=8, steps=steps),
    ]


async def test_generation_training_and_sync_take_turns(kit: Any) -> None:
    dataflow = kit.dataflow(feeds(), synchronous=True)
    await kit.start(dataflow, policies=NAMES)
    solver = await kit.attach(dataflow, "solver")
    assert await kit.lease(dataflow, 9) == (), "a trainer is missing"
    verifier = await kit.attach(dataflow, "verifier")
    assert (await kit.ask(dataflow, solver, 0, "solver")).batch is None
    assert await kit.lease(dataflow, 9) == (), "one trainer waits, the other does not"
    assert (await kit.ask(dataflow, verifier, 0, "verifier")).batch is None
    one, two = await kit.lease(dataflow, 9)
    assert one.min_versions == {"solver": 0, "verifier": 0}
    await kit.mixed(dataflow, one, *NAMES)
    assert (await kit.ask(dataflow, solver, 0, "solver")).batch is None, "the solver's batch waits for the verifier's"
    await kit.mixed(dataflow, two, *NAMES)
    assert len((await kit.ask(dataflow, solver, 0, "solver")).batch.samples) == 4
    assert await kit.lease(dataflow, 9) == (), "training now"
    assert len((await kit.ask(dataflow, verifier, 0, "verifier")).batch.samples) == 8
    await kit.publish(dataflow, solver, 1, "solver")
    await kit.ask(dataflow, solver, 1, "solver")
    assert await kit.lease(dataflow, 9) == (), "the verifier still trains"
    await kit.publish(dataflow, verifier, 1, "verifier")
    await kit.ask(dataflow, verifier, 1, "verifier")
    tasks = await kit.lease(dataflow, 9)
    assert [task.min_versions for task in tasks] == [{"solver": 1, "verifier": 1}] * 2


async def test_no_batch_while_rollouts_run(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=6, steps=9)], synchronous=True)
    await kit.start(dataflow)
    solver = await kit.attach(dataflow)
    await kit.ask(dataflow, solver, 0)
    first, second = await kit.lease(dataflow, 9)
    twice = [Trajectory(sequences=(kit.sequence(reward=float(i % 2)),) * 2) for i in range(4)]
    results = tuple(kit.result(first, i, trajectory) for i, trajectory in enumerate(twice))
    await dataflow.submit(SubmitRequest(results=results))
    assert (await dataflow.status(Empty())).policies[0].buffered == 8
    assert (await kit.ask(dataflow, solver, 0)).batch is None
    await kit.mixed(dataflow, second)
    assert (await kit.ask(dataflow, solver, 0)).batch is not None


async def test_a_restarted_trainer_gets_its_batch_again(kit: Any) -> None:
    dataflow = kit.dataflow(feeds(), synchronous=True)
    await kit.start(dataflow, policies=NAMES)
    incarnations = {name: await kit.attach(dataflow, name) for name in NAMES}
    for name in NAMES:
        await kit.ask(dataflow, incarnations[name], 0, name)
    for task in await kit.lease(dataflow, 9):
        await kit.mixed(dataflow, task, *NAMES)
    first = (await kit.ask(dataflow, incarnations["solver"], 0, "solver")).batch
    again = await kit.attach(dataflow, "solver")
    assert (await kit.ask(dataflow, again, 0, "solver")).batch == first


async def test_a_finished_policy_does_not_hold_up_the_other(kit: Any) -> None:
    policies = [
        PolicyFeed(model_id="solver", batch_size=4, steps=1),
        PolicyFeed(model_id="verifier", batch_size=4, steps=2),
    ]
    dataflow = kit.dataflow(policies, synchronous=True)
    await kit.start(dataflow, policies=NAMES)
    incarnations = {name: await kit.attach(dataflow, name) for name in NAMES}
    for name in NAMES:
        await kit.ask(dataflow, incarnations[name], 0, name)
    (task,) = await kit.lease(dataflow, 9)
    await kit.mixed(dataflow, task, *NAMES)
    for name in NAMES:
        assert (await kit.ask(dataflow, incarnations[name], 0, name)).batch is not None
    await kit.publish(dataflow, incarnations["verifier"], 1, "verifier")
    await kit.ask(dataflow, incarnations["verifier"], 1, "verifier")
    (task,) = await kit.lease(dataflow, 9)
    await kit.mixed(dataflow, task, *NAMES)
    assert (await kit.ask(dataflow, incarnations["verifier"], 1, "verifier")).batch is not None
    assert (await dataflow.status(Empty())).error == ""
