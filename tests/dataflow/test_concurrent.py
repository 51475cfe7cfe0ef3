"""Everybody at once, on long waits that only a wake-up can end in time: nobody waits for a poll, or for ever."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from astraflow.dataflow import (
    CommitRequest,
    Control,
    Dataflow,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    Heartbeat,
    LeaseRequest,
    PolicyFeed,
    Registration,
    Sampling,
    SubmitRequest,
    Trajectory,
    WatchRequest,
)

NAMES = ("solver", "verifier")
LONG_S = 60.0


async def roll_out(kit: Any, dataflow: Dataflow, name: str, chance: random.Random, versions: dict[str, int]) -> None:
    """A worker: now and then it forgets a task, fails a sample, or submits twice."""
    await dataflow.register(Registration(worker_id=name, pool="main", capacity=8, policies=NAMES))
    held: set[str] = set()
    while not (reply := await dataflow.lease(LeaseRequest(worker_id=name, max_tasks=2, wait_s=LONG_S))).finished:
        held.update(task.task_id for task in reply.tasks)
        for task in reply.tasks:
            held.discard(task.task_id)
            if chance.random() < 0.05:
                continue
            for index in range(task.n_samples):
                await anyio.lowlevel.checkpoint()
                rewards = dict.fromkeys(task.sampling, float(chance.random() < 0.5))
                trajectory: Trajectory = kit.trajectory(rewards, versions, metrics={"right": 1.0})
                if chance.random() < 0.05:
                    trajectory = Trajectory(status="failed", error="bad luck")
                await dataflow.submit(SubmitRequest(results=(kit.result(task, index, trajectory, name),) * 2))
        await dataflow.heartbeat(Heartbeat(worker_id=name, tasks=tuple(held)))


async def follow(dataflow: Dataflow, versions: dict[str, int]) -> None:
    while True:
        for policy in (await dataflow.watch(WatchRequest(known=versions, wait_s=LONG_S))).versions:
            versions[policy.model_id] = policy.version
        await anyio.lowlevel.checkpoint()


async def train(kit: Any, dataflow: Dataflow, name: str, step_s: float, seen: list[str]) -> None:
    incarnation = await kit.attach(dataflow, name)
    version = 0
    while not (reply := await kit.ask(dataflow, incarnation, version, name, wait_s=LONG_S)).finished:
        await anyio.sleep(step_s)
        seen.extend(sample.sample_id for sample in reply.batch.samples)
        version += 1
        await kit.publish(dataflow, incarnation, version, name)
        await dataflow.commit(CommitRequest(model_id=name, incarnation=incarnation, version=version))


async def run(kit: Any, dataflow: Dataflow, pace: Mapping[str, float]) -> dict[str, list[str]]:
    """Drive as a run does: evaluate, train, evaluate, finish. Returns the samples that each policy trained."""
    seen: dict[str, list[str]] = {name: [] for name in pace}
    versions = dict.fromkeys(NAMES, 0)
    async with anyio.create_task_group() as others, anyio.create_task_group() as workers:
        others.start_soon(follow, dataflow, versions)
        for number in range(3):
            workers.start_soon(roll_out, kit, dataflow, f"w{number}", random.Random(number), versions)
        await dataflow.evaluate(EvaluateRequest(label="before", suites=("s",)))
        await dataflow.evaluation(EvaluationQuery(label="before", wait_s=LONG_S))
        await dataflow.control(Control(phase="running"))
        async with anyio.create_task_group() as trainers:
            for name, step_s in pace.items():
                trainers.start_soon(train, kit, dataflow, name, step_s, seen[name])
        await dataflow.evaluate(EvaluateRequest(label="after", suites=("s",)))
        report = await dataflow.evaluation(EvaluationQuery(label="after", wait_s=LONG_S))
        assert report.finished
        await dataflow.control(Control(phase="finished"))
        others.cancel_scope.cancel()
    return seen


def a_dataflow(kit: Any, **fields: Any) -> Dataflow:
    feeds = [
        PolicyFeed(model_id="solver", batch_size=12, steps=15),
        PolicyFeed(model_id="verifier", batch_size=8, steps=10),
    ]
    suite = EvalSuite(
        name="s", prompts=kit.prompts(6, "e"), workflow="w", sampling={name: Sampling() for name in NAMES}
    )
    made: Dataflow = kit.dataflow(
        feeds,
        suites=[suite],
        real_time=True,
        task_deadline_s=0.3,
        worker_silence_s=LONG_S,
        max_attempts=5,
        **fields,
    )
    return made


@pytest.mark.parametrize("synchronous", [False, True])
async def test_a_run_ends_with_every_batch_trained(kit: Any, synchronous: bool) -> None:
    dataflow = a_dataflow(kit, synchronous=synchronous)
    with anyio.fail_after(30):
        seen = await run(kit, dataflow, {"solver": 0.002, "verifier": 0.01})
    for name, count in (("solver", 15 * 12), ("verifier", 10 * 8)):
        assert len(seen[name]) == len(set(seen[name])) == count
    assert all(policy.finished for policy in (await dataflow.status(Empty())).policies)


async def test_a_policy_without_a_trainer_stops_nobody(kit: Any) -> None:
    with anyio.fail_after(30):
        seen = await run(kit, a_dataflow(kit), {"solver": 0.0})
    assert len(seen["solver"]) == 15 * 12
