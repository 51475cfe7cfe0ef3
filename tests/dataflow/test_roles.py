"""Policies that are asked but not trained, and policies that play two roles."""

from __future__ import annotations

from typing import Any

import msgspec

from astraflow.dataflow import Empty, Heartbeat, PolicyFeed, Registration, SubmitRequest, TaskProgress


async def test_a_frozen_policy_is_served_and_never_trained(kit: Any) -> None:
    """Only workers that serve it get tasks; its tokens are in no buffer, and its age keeps no group from being
    cancelled."""
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4, max_staleness=0)], served=("judge",))
    await kit.start(dataflow, policies=("solver", "judge"))
    await dataflow.register(Registration(worker_id="half", pool="main", capacity=8, policies=("solver",)))
    incarnation = await kit.attach(dataflow)
    assert await kit.lease(dataflow, worker="half") == ()
    (task,) = await kit.lease(dataflow)
    assert set(task.sampling) == {"solver", "judge"}
    await kit.mixed(dataflow, task, "solver", "judge")
    (policy,) = (await dataflow.status(Empty())).policies
    assert (policy.model_id, policy.buffered) == ("solver", 4)
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert {sample.sequence.model_id for sample in batch.samples} == {"solver"}
    await kit.publish(dataflow, incarnation, 1)
    (old,) = await kit.lease(dataflow)
    await kit.publish(dataflow, incarnation, 2)
    told = (TaskProgress(old.task_id, 5, {"solver": 1, "judge": 0}),)
    reply = await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(old.task_id,), progress=told))
    assert reply.cancel == (old.task_id,)


async def test_two_roles_share_a_policy_and_its_batches(kit: Any) -> None:
    """One model solves and verifies: both parts are trained, a trajectory counts once."""
    dataflow = kit.dataflow([PolicyFeed(model_id="both", batch_size=8)], n_samples=4)
    await kit.start(dataflow, policies=("both",))
    incarnation = await kit.attach(dataflow, "both")
    (task,) = await kit.lease(dataflow)
    results = []
    for index in range(4):
        parts = tuple(
            msgspec.structs.replace(kit.sequence("both", reward), role=role)
            for role, reward in (("solver", float(index % 2)), ("verifier", 1.0))
        )
        results.append(kit.result(task, index, kit.holding(*parts)))
    await dataflow.submit(SubmitRequest(results=tuple(results)))
    batch = (await kit.ask(dataflow, incarnation, 0, "both")).batch
    assert sorted(sample.sequence.role for sample in batch.samples) == ["solver"] * 4 + ["verifier"] * 4
    assert {sample.group_size for sample in batch.samples} == {4}
