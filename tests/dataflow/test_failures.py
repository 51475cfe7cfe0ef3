"""Samples that fail, workers on which they do, runs in which nothing goes on: an outcome for each, within a bound."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest
from structlog.testing import capture_logs

from astraflow.dataflow import (
    Dataflow,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    FailurePolicy,
    Heartbeat,
    PolicyFeed,
    RolloutTask,
    RunFailed,
    Sampling,
    SubmitRequest,
    TaskProgress,
    Trajectory,
)

FAILED = Trajectory(status="failed", error="KeyError: 'answer'")


async def send(
    kit: Any,
    dataflow: Dataflow,
    task: RolloutTask,
    outcomes: dict[int, Trajectory],
    worker: str = "w0",
    tokens: int = 0,
) -> Any:
    results = (kit.result(task, index, outcome, worker) for index, outcome in outcomes.items())
    told = tuple(msgspec.structs.replace(result, tokens=tokens) for result in results)
    return await dataflow.submit(SubmitRequest(results=told))


def good(kit: Any, *indices: int) -> dict[int, Trajectory]:
    return {index: kit.trajectory({"solver": float(index % 2)}) for index in indices}


async def status_of(dataflow: Dataflow) -> Any:
    return (await dataflow.status(Empty())).policies[0]


async def test_a_failed_sample_runs_again_elsewhere_and_alone(kit: Any) -> None:
    dataflow = kit.dataflow(failures=FailurePolicy(retries=1))
    await kit.start(dataflow, "w0", "w1")
    (task,) = await kit.lease(dataflow)
    await send(kit, dataflow, task, {0: FAILED, **good(kit, 1, 2)})
    repeated = await send(kit, dataflow, task, {0: FAILED})
    assert repeated.duplicates == 1
    assert (await dataflow.status(Empty())).leased == 1, "the last sample of this attempt is still out"
    await send(kit, dataflow, task, good(kit, 3))
    (again,) = await kit.lease(dataflow, worker="w1")
    assert (again.task_id, again.attempt, again.done) == (task.task_id, 1, (1, 2, 3))
    late = await send(kit, dataflow, task, {0: FAILED})
    assert late.duplicates == 1, "what failed before says nothing about this attempt"
    await send(kit, dataflow, again, good(kit, 0), "w1")
    policy = await status_of(dataflow)
    assert (policy.buffered, policy.dropped) == (4, {})


async def test_a_sample_that_fails_too_often_leaves_the_rest(kit: Any) -> None:
    dataflow = kit.dataflow(failures=FailurePolicy(retries=1))
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    await send(kit, dataflow, task, {0: FAILED, **good(kit, 1, 2, 3)})
    (again,) = await kit.lease(dataflow)
    await send(kit, dataflow, again, {0: FAILED})
    policy = await status_of(dataflow)
    assert (policy.buffered, policy.dropped) == (3, {"failed": 1})


async def test_only_what_never_began_is_tried_again_when_its_time_is_up(kit: Any) -> None:
    """A long answer would get a second chance to be short."""
    dataflow = kit.dataflow(failures=FailurePolicy(retries=1))
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    await send(kit, dataflow, task, {0: Trajectory(status="timed_out")}, tokens=900)
    await send(kit, dataflow, task, {1: Trajectory(status="timed_out"), **good(kit, 2, 3)})
    (again,) = await kit.lease(dataflow)
    assert again.done == (0, 2, 3)
    await send(kit, dataflow, again, good(kit, 1))
    policy = await status_of(dataflow)
    assert (policy.buffered, policy.dropped) == (3, {"failed": 1})


@pytest.mark.parametrize(("least", "kept"), [(1, 2), (2, 2), (3, 0), (4, 0)])
async def test_a_group_needs_so_many_samples(kit: Any, least: int, kept: int) -> None:
    dataflow = kit.dataflow(failures=FailurePolicy(min_samples=least))
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    await send(kit, dataflow, task, {0: FAILED, 3: FAILED, **good(kit, 1, 2)})
    policy = await status_of(dataflow)
    assert policy.buffered == kept
    assert policy.dropped == ({"failed": 2} if kept else {"failed": 2, "incomplete": 2})
    with pytest.raises(ValueError, match=r"failures\.min_samples 5 is more than n_samples 4"):
        kit.config(failures=FailurePolicy(min_samples=5))


async def fail_everything(kit: Any, dataflow: Dataflow, worker: str, groups: int) -> int:
    """Lease and fail so many groups, as far as there are any for this worker; returns how many."""
    for count in range(groups):
        tasks = await kit.lease(dataflow, worker=worker)
        if not tasks:
            return count
        await send(kit, dataflow, tasks[0], dict.fromkeys(range(4), FAILED), worker)
    return groups


async def test_a_worker_that_fails_often_is_set_aside_with_the_reason(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=64, steps=9)], worker_silence_s=200.0)
    await kit.start(dataflow, "broken", "sound")
    with capture_logs() as logs:
        assert await fail_everything(kit, dataflow, "broken", 100) == 4
    assert [entry["event"] for entry in logs] == ["worker_quarantined"]
    broken, sound = (await dataflow.status(Empty())).workers
    assert "16 of the last 16 samples failed; first error: KeyError: 'answer'; no tasks for 60 s" in broken.quarantine
    assert sound.quarantine == ""
    (task,) = await kit.lease(dataflow, worker="sound")
    await send(kit, dataflow, task, good(kit, 0, 1, 2, 3), "sound")
    kit.clock.advance(61)
    assert await fail_everything(kit, dataflow, "broken", 100) == 4, "another chance"
    kit.clock.advance(61)
    assert await kit.lease(dataflow, worker="broken") == (), "for longer this time"


async def test_what_fails_everywhere_is_no_workers_fault(kit: Any) -> None:
    """Neither worker is set aside for long, and the run ends with the figures and the first cause."""
    feeds = [PolicyFeed(model_id=name, batch_size=512, steps=9) for name in ("solver", "verifier")]
    dataflow = kit.dataflow(feeds, failures=FailurePolicy(error_results=200))
    await kit.start(dataflow, "w0", "w1", policies=("solver", "verifier"))
    first, second = [await kit.attach(dataflow, name) for name in ("solver", "verifier")]
    for number in range(60):
        for worker in ("w0", "w1"):
            await fail_everything(kit, dataflow, worker, 1)
        if number == 20:
            (task,) = await kit.lease(dataflow, worker="w1") or await kit.lease(dataflow)
            await send(kit, dataflow, task, good(kit, 0))
    for incarnation, name in ((first, "solver"), (second, "verifier")):
        with pytest.raises(RunFailed, match=r"of the last 200 samples failed; first error: KeyError: 'answer'"):
            await kit.ask(dataflow, incarnation, 0, name, wait_s=60.0)


async def test_the_last_worker_is_never_set_aside(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=512, steps=9)], worker_silence_s=10.0)
    await kit.start(dataflow, "broken")
    assert await fail_everything(kit, dataflow, "broken", 20) == 20
    await kit.start(dataflow, "broken", "sound")
    assert await fail_everything(kit, dataflow, "broken", 20) == 1
    assert await kit.lease(dataflow, worker="broken") == ()
    await dataflow.heartbeat(Heartbeat(worker_id="sound", leaving=True))
    assert len(await kit.lease(dataflow, worker="broken")) == 1


async def test_when_nothing_goes_on_it_is_said_and_then_an_error(kit: Any) -> None:
    """A worker lives and holds a task, but no token ever comes of it."""
    suite = EvalSuite(name="s", prompts=kit.prompts(1, "e"), workflow="w", sampling={"solver": Sampling()})
    dataflow = kit.dataflow(
        suites=[suite], task_deadline_s=100.0, max_attempts=1, worker_silence_s=5.0, worker_grace_s=60.0
    )
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    (task,) = await kit.lease(dataflow)
    tokens = 0

    async def seconds(count: int) -> None:
        for _ in range(count):
            kit.clock.advance(1)
            progress = (TaskProgress(task.task_id, tokens),)
            await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(task.task_id,), progress=progress))
            await kit.ask(dataflow, incarnation, 0)

    with capture_logs() as logs:
        await seconds(15)
        tokens = 1
        await seconds(15)
        assert (await dataflow.status(Empty())).warning == "", "one token in between"
        await seconds(3)
    assert [entry["event"] for entry in logs] == ["no_progress"]
    status = await dataflow.status(Empty())
    assert "nothing went on for 17 s: 1 training and 0 evaluation tasks are open, 1 of them leased" in status.warning
    assert status.error == ""
    await dataflow.evaluate(EvaluateRequest(label="e", suites=("s",)))
    with pytest.raises(RunFailed, match="1 workers are alive, 0 of them in quarantine; buffered: solver 0"):
        await seconds(100)
    with pytest.raises(RunFailed, match="nothing went on for 101 s"):
        await dataflow.evaluation(EvaluationQuery(label="e", wait_s=60.0))


async def test_while_nobody_waits_nothing_needs_to_go_on(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, max_attempts=1, worker_silence_s=5.0, worker_grace_s=10.0)
    await kit.start(dataflow)
    await kit.attach(dataflow)
    with capture_logs() as logs:
        for _ in range(50):
            kit.clock.advance(2)
            await dataflow.heartbeat(Heartbeat(worker_id="w0"))
    assert logs == []
    status = await dataflow.status(Empty())
    assert (status.warning, status.error) == ("", "")


async def ask_for_ever(kit: Any, dataflow: Dataflow, incarnation: int) -> None:
    while True:
        await kit.ask(dataflow, incarnation, 0, wait_s=0.1)


async def test_a_waiting_trainer_hears_in_real_time_that_nothing_goes_on(kit: Any) -> None:
    dataflow = kit.dataflow(
        task_deadline_s=0.2, max_attempts=1, worker_silence_s=0.2, worker_grace_s=0.3, real_time=True
    )
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def beats() -> None:
                while True:
                    await dataflow.heartbeat(Heartbeat(worker_id="w0"))
                    await anyio.sleep(0.05)

            tasks.start_soon(beats)
            with pytest.raises(RunFailed, match="nothing went on"):
                await ask_for_ever(kit, dataflow, incarnation)
            tasks.cancel_scope.cancel()
