"""Evaluations ride the workers' leases; what never came back counts as wrong and is shown."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from astraflow.dataflow import (
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    Heartbeat,
    LeaseRequest,
    Registration,
    RunFailed,
    Sampling,
    SubmitRequest,
    Trajectory,
)


def suite(kit: Any, count: int, name: str = "held_out", **fields: Any) -> EvalSuite:
    return EvalSuite(
        name=name, prompts=kit.prompts(count, "eval"), workflow="solo", sampling={"solver": Sampling()}, **fields
    )


async def test_evaluation_goes_first_and_counts_the_missing_as_wrong(kit: Any) -> None:
    dataflow = kit.dataflow(
        suites=[suite(kit, 4, n_samples=2)], max_attempts=1, task_deadline_s=5.0, worker_silence_s=99.0
    )
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow, version=3)
    await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
    await kit.publish(dataflow, incarnation, 4)
    await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
    assert (await dataflow.status(Empty())).pending_eval == 4
    tasks = await kit.lease(dataflow, 5)
    assert [task.purpose for task in tasks] == ["eval"] * 4, "and nothing else, until they are done"
    assert [(v.model_id, v.version, v.incarnation) for v in tasks[0].pinned] == [("solver", 3, incarnation)]
    assert (tasks[0].suite, tasks[0].workflow) == ("held_out", "solo")
    for number, task in enumerate(tasks[:3]):
        right = kit.trajectory({"solver": None}, {"solver": 3}, metrics={"right": float(number != 0)})
        other = right if number != 2 else Trajectory(status="failed", error="timeout")
        await dataflow.submit(SubmitRequest(results=(kit.result(task, 0, right), kit.result(task, 1, other))))
    early = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
    assert not early.finished
    assert (early.suites[0].done, early.suites[0].missing) == (6, 1)
    assert await kit.lease(dataflow) == ()
    kit.clock.advance(6)
    ended = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
    (report,) = ended.suites
    assert ended.finished
    assert (report.done, report.total, report.missing) == (8, 8, 3)
    assert report.metrics["right"].mean == pytest.approx(3 / 8)
    assert report.metrics["right"].n == 8
    assert report.metrics["right"].low < 3 / 8 < report.metrics["right"].high
    assert report.passes["right"][2].mean == pytest.approx(2 / 4), "two of four prompts have a right answer"
    assert report.versions == {"solver": 3}
    assert len(report.examples) == 5
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.buffered == 0, "evaluation is never trained on"
    assert kit.notes.evaluations == [ended]
    assert [task.purpose for task in await kit.lease(dataflow)] == ["train"]


async def test_a_lost_evaluation_task_is_leased_before_anything_else(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 2)], worker_silence_s=5.0)
    await kit.start(dataflow, "w0", "w1")
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    (lost,) = await kit.lease(dataflow)
    kit.clock.advance(4)
    await kit.lease(dataflow, 0, "w1")
    kit.clock.advance(4)
    first, second = await kit.lease(dataflow, 3, "w1")
    assert (first.task_id, first.attempt) == (lost.task_id, 1)
    assert second.purpose == "eval"


async def test_several_suites_before_the_run_starts(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 1, "one"), suite(kit, 2, "two")], real_time=True)
    await dataflow.register(Registration(worker_id="w0", pool="main", capacity=8, policies=("solver",)))
    await dataflow.evaluate(EvaluateRequest(label="all", suites=("one", "two")))
    async with anyio.create_task_group() as group:

        async def work() -> None:
            while tasks := (await dataflow.lease(LeaseRequest(worker_id="w0", max_tasks=1, wait_s=0.0))).tasks:
                await anyio.sleep(0.01)
                trajectory = Trajectory(metrics={"right": 1.0})
                await dataflow.submit(SubmitRequest(results=(kit.result(tasks[0], 0, trajectory),)))

        group.start_soon(work)
        with anyio.fail_after(2):
            while not (report := await dataflow.evaluation(EvaluationQuery(label="all", wait_s=30.0))).finished:
                pass
    assert [(s.suite, s.total, s.metrics["right"].mean) for s in report.suites] == [("one", 1, 1.0), ("two", 2, 1.0)]


async def test_an_evaluation_that_nobody_can_finish_fails(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 2)], worker_grace_s=20.0)
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    kit.clock.advance(21)
    with pytest.raises(RunFailed, match="2 evaluation tasks are open"):
        await dataflow.evaluation(EvaluationQuery(label="a", wait_s=60.0))
    with pytest.raises(ValueError, match=r"no suite \['x'\]"):
        await dataflow.evaluate(EvaluateRequest(label="b", suites=("x",)))
    with pytest.raises(ValueError, match="no evaluation 'b'"):
        await dataflow.evaluation(EvaluationQuery(label="b"))


async def finish(kit: Any, dataflow: Any, task: Any, worker: str, version: int = 0, right: float = 1.0) -> None:
    """Every sample of an evaluation task, right and sampled by this version."""
    trajectory = kit.trajectory({"solver": None}, {"solver": version}, metrics={"right": right})
    results = tuple(kit.result(task, index, trajectory, worker) for index in range(task.n_samples))
    await dataflow.submit(SubmitRequest(results=results))


async def test_a_share_of_the_workers_evaluates_while_the_others_go_on(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 8)], evaluation_share=0.5)
    workers = [f"w{n}" for n in range(4)]
    await kit.start(dataflow, *workers)
    await kit.attach(dataflow)
    (training,) = await kit.lease(dataflow, worker="w3")
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    held = {name: await kit.lease(dataflow, 2, name) for name in workers}
    purposes = {name: [task.purpose for task in tasks] for name, tasks in held.items()}
    assert purposes == {"w0": ["eval"] * 2, "w1": ["eval"] * 2, "w2": ["train"] * 2, "w3": ["train"] * 2}
    assert (await dataflow.status(Empty())).evaluating == 2
    await finish(kit, dataflow, held["w0"][0], "w0")
    assert [task.purpose for task in await kit.lease(dataflow, 1, "w0")] == ["eval"], "it stays at it"
    for task in held["w1"]:
        await finish(kit, dataflow, task, "w1")
    assert [task.purpose for task in await kit.lease(dataflow, 1, "w2")] == ["eval"], "a place is free again"
    assert [task.purpose for task in await kit.lease(dataflow, 1, "w3")] == ["train"]
    assert training.purpose == "train"


async def test_with_one_worker_training_waits_and_that_is_said(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 1)])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    (task,) = await kit.lease(dataflow, 5)
    await kit.ask(dataflow, incarnation, 0)
    warning = (await dataflow.status(Empty())).warning
    assert warning == "training waits for an evaluation: all 1 workers are at it"
    assert await kit.lease(dataflow, 5) == ()
    await finish(kit, dataflow, task, "w0")
    assert {task.purpose for task in await kit.lease(dataflow, 5)} == {"train"}
    assert (await dataflow.status(Empty())).warning == ""


async def test_before_training_every_worker_evaluates(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 3)])
    for name in ("w0", "w1", "w2"):
        await dataflow.register(Registration(worker_id=name, pool="main", capacity=8, policies=("solver",)))
    await kit.attach(dataflow)
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    assert [len(await kit.lease(dataflow, 1, name)) for name in ("w0", "w1", "w2")] == [1, 1, 1]


async def test_what_another_version_sampled_does_not_count(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 2)])
    await kit.start(dataflow)
    await kit.attach(dataflow, version=5)
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    first, second = await kit.lease(dataflow, 2)
    await finish(kit, dataflow, first, "w0", version=5)
    await finish(kit, dataflow, second, "w0", version=6)
    (report,) = (await dataflow.evaluation(EvaluationQuery(label="a"))).suites
    assert (report.missing, report.elsewhere, report.metrics["right"].mean) == (1, 1, 0.5)


async def test_a_declined_task_goes_to_another_worker_and_is_missing_if_none_can(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 1)])
    await kit.start(dataflow, "w0", "w1")
    await kit.attach(dataflow)
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    (task,) = await kit.lease(dataflow, worker="w0")
    await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(task.task_id,), declined=(task.task_id,)))
    assert [t.purpose for t in await kit.lease(dataflow, worker="w0")] == ["train"], "not once more"
    (again,) = await kit.lease(dataflow, worker="w1")
    assert (again.task_id, again.attempt) == (task.task_id, 0)
    await dataflow.heartbeat(Heartbeat(worker_id="w1", tasks=(task.task_id,), declined=(task.task_id,)))
    (report,) = (await dataflow.evaluation(EvaluationQuery(label="a"))).suites
    assert (report.done, report.missing) == (1, 1)


async def test_evaluations_come_by_themselves_every_so_many_versions(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 1)], evaluate_every=2)
    await kit.start(dataflow, "w0")
    incarnation = await kit.attach(dataflow)
    for version in range(1, 6):
        await kit.publish(dataflow, incarnation, version)
        if version == 2:
            (task,) = await kit.lease(dataflow)
            assert (task.purpose, task.pinned[0].version) == ("eval", 2)
            await finish(kit, dataflow, task, "w0", version=2)
    ended = await dataflow.evaluation(EvaluationQuery(label="version 2"))
    assert ended.suites[0].versions == {"solver": 2}
    assert (await dataflow.status(Empty())).pending_eval == 1
    await kit.publish(dataflow, incarnation, 6)
    assert (await dataflow.status(Empty())).pending_eval == 1, "the last one still goes on"
    with pytest.raises(ValueError, match="no evaluation 'version 6'"):
        await dataflow.evaluation(EvaluationQuery(label="version 6"))
    (task,) = await kit.lease(dataflow)
    assert task.pinned[0].version == 4
