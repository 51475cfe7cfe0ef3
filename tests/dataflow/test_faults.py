"""Faults that runs of this kind meet, each with its outcome at this level; the plainer ones are in the other files."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from astraflow.dataflow import (
    Control,
    Dataflow,
    DataflowConfig,
    DataflowService,
    Empty,
    FailurePolicy,
    Heartbeat,
    LeaseRequest,
    ListSource,
    PolicyFeed,
    Registration,
    RunFailed,
    Sampling,
    SubmitRequest,
    Trajectory,
)
from astraflow.rpc import connect, serve


async def test_a_buffer_full_of_stale_samples_is_emptied_once_and_filled_again(kit: Any) -> None:
    """Every sample in it is too old at once: all are dropped and counted, the trainer waits, and fresh ones train."""
    feed = PolicyFeed(model_id="solver", batch_size=4, max_staleness=2, steps=99)
    dataflow = kit.dataflow([feed], max_dropped_batches=50)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    held = await kit.lease(dataflow, 99)
    assert len(held) == 3
    for task in held:
        await kit.mixed(dataflow, task)
    assert await kit.lease(dataflow, 99) == ()
    await kit.publish(dataflow, incarnation, 3)
    assert (await kit.ask(dataflow, incarnation, 3)).batch is None
    (policy,) = (await dataflow.status(Empty())).policies
    assert (policy.buffered, policy.dropped) == (0, {"stale": 12})
    fresh = await kit.lease(dataflow, 99)
    assert len(fresh) == 3, "there is room for a whole horizon again"
    for task in fresh:
        await kit.mixed(dataflow, task, versions={"solver": 3})
    assert len((await kit.ask(dataflow, incarnation, 3)).batch.samples) == 4


async def test_a_policy_that_stalls_for_good_costs_the_other_nothing(kit: Any) -> None:
    """The other finishes every step, ends its wait, and the workers are told to stop what only the stalled one fed."""
    feeds = [PolicyFeed(model_id=name, batch_size=4, max_staleness=1, steps=30) for name in ("solver", "stalled")]
    dataflow = kit.dataflow(feeds, max_dropped_batches=10**6)
    await kit.start(dataflow, policies=("solver", "stalled"))
    await kit.attach(dataflow, "stalled")
    incarnation = await kit.attach(dataflow, "solver")
    most = 0
    for version in range(30):
        while (await kit.ask(dataflow, incarnation, version)).batch is None:
            for task in await kit.lease(dataflow, 4):
                await kit.mixed(dataflow, task, "solver", "stalled", versions={"solver": version})
        await kit.publish(dataflow, incarnation, version + 1)
        most = max(most, *(policy.buffered for policy in (await dataflow.status(Empty())).policies))
    assert (await kit.ask(dataflow, incarnation, 30)).finished
    solver, stalled = (await dataflow.status(Empty())).policies
    assert (solver.finished, stalled.finished) == (True, False)
    assert most <= feeds[0].horizon + feeds[0].batch_size
    assert stalled.dropped["overflow"] == stalled.produced - stalled.buffered


@pytest.mark.parametrize("rewards", [(0.0,) * 4, (1.0,) * 4, (None,) * 4, (float("nan"),) * 4])
async def test_groups_that_teach_nothing_end_in_an_error_with_figures(kit: Any, rewards: tuple[Any, ...]) -> None:
    """All zero, all one, never scored, not a number: bounded effort, no empty batch, no reward made up."""
    dataflow = kit.dataflow(max_dropped_batches=4)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    groups = 0
    while tasks := await kit.lease(dataflow, 1):
        await kit.submit(dataflow, tasks[0], [{"solver": reward} for reward in rewards])
        groups += 1
        assert groups <= 4, "the effort is bounded"
    (policy,) = (await dataflow.status(Empty())).policies
    reason = {0.0: "zero_advantage", 1.0: "zero_advantage", None: "masked"}.get(rewards[0], "failed")
    assert (policy.buffered, policy.dropped) == (0, {reason: 16})
    with pytest.raises(RunFailed, match=rf"4 groups \(16 samples\) in a row gave nothing to train \(16 {reason}\)"):
        await kit.ask(dataflow, incarnation, 0, wait_s=60.0)


async def test_without_groups_to_compare_single_samples_train_unless_that_is_asked_for(kit: Any) -> None:
    with pytest.raises(ValueError, match="every group is constant"):
        kit.config(n_samples=1)
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=3)], n_samples=1, filters=())
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for task in await kit.lease(dataflow, 3):
        await kit.submit(dataflow, task, [{"solver": 1.0}])
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert {(sample.group_size, sample.group_std) for sample in batch.samples} == {(1, 0.0)}


async def test_errors_close_to_everywhere_end_the_run_although_some_samples_train(kit: Any) -> None:
    """One group in sixty is good: a drought alone would never be noticed."""
    feed = PolicyFeed(model_id="solver", batch_size=400, steps=9)
    dataflow = kit.dataflow([feed], failures=FailurePolicy(error_results=240), max_dropped_batches=10**6)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    failed = Trajectory(status="failed", error="the sandbox is gone")
    for number in range(120):
        (task,) = await kit.lease(dataflow)
        if number % 60 == 30:
            await kit.mixed(dataflow, task)
        else:
            results = tuple(kit.result(task, index, failed) for index in range(4))
            await dataflow.submit(SubmitRequest(results=results))
    with pytest.raises(RunFailed, match=r"236 of the last 240 samples failed; first error: the sandbox is gone"):
        await kit.ask(dataflow, incarnation, 0, wait_s=60.0)


async def test_two_runs_at_once_do_not_meet(kit: Any, make_kit: Any) -> None:
    """Ports are found by themselves, and the same names in both mean nothing."""
    async with AsyncExitStack() as stack:
        services = []
        for _ in range(2):
            served = await stack.enter_async_context(
                serve(make_kit().dataflow(real_time=True), DataflowService, "tcp://127.0.0.1:0")
            )
            services.append(await stack.enter_async_context(connect(served.address, DataflowService)))
        with anyio.fail_after(20):
            for service in services:
                await kit.start(service)
            (first,), (second,) = [await kit.lease(service) for service in services]
            assert first.task_id == second.task_id
            await kit.mixed(services[0], first)
            buffered = [(await service.status(Empty())).policies[0].buffered for service in services]
    assert buffered == [4, 0]


async def test_a_thousand_rollouts_at_once_queue_and_everybody_is_heard(kit: Any, tmp_path: Path) -> None:
    """They are all taken, within the buffer's bound, and a heartbeat need not wait for the last of them."""
    feed = PolicyFeed(model_id="solver", batch_size=64, max_staleness=1)
    config = DataflowConfig(
        policies=(feed,), workflow="w", n_samples=2, sampling={"solver": Sampling()}, max_attempts=9, filters=()
    )
    dataflow = Dataflow(config, ListSource(kit.prompts(8), seed=0))
    address = f"unix:{tmp_path}/d.sock"
    order: list[str] = []
    async with serve(dataflow, DataflowService, address), connect(address, DataflowService) as service:
        await service.register(Registration(worker_id="w0", pool="p", capacity=999, policies=("solver",)))
        await service.control(Control(phase="running"))
        incarnation = await kit.attach(service)
        tasks = (await service.lease(LeaseRequest(worker_id="w0", max_tasks=999))).tasks
        assert len(tasks) == 64, "as many as can be trained in time"

        async def submit(number: int) -> None:
            """Many times over: what is known already is recognised."""
            await kit.mixed(service, tasks[number % 64])
            order.append("submit")

        async def beat() -> None:
            await service.heartbeat(Heartbeat(worker_id="w0"))
            order.append("beat")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for number in range(500):
                    group.start_soon(submit, number)
                group.start_soon(beat)
                for number in range(500):
                    group.start_soon(submit, number)
        status = await service.status(Empty())
        assert (status.leased, status.policies[0].buffered) == (0, 128)
        assert len((await kit.ask(service, incarnation, 0)).batch.samples) == 64
    assert order.index("beat") < 900
