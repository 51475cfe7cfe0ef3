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
    await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",), min_versions={"solver": 3, "x": 1}))
    await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
    assert (await dataflow.status(Empty())).pending_eval == 4
    tasks = await kit.lease(dataflow, 5)
    assert [task.purpose for task in tasks] == ["eval"] * 4 + ["train"]
    assert tasks[0].min_versions == {"solver": 3}
    assert (tasks[0].suite, tasks[0].workflow) == ("held_out", "solo")
    for number, task in enumerate(tasks[:3]):
        right = kit.trajectory({"solver": None}, {"solver": 3}, metrics={"right": float(number != 0)})
        other = right if number != 2 else Trajectory(status="failed", error="timeout")
        await dataflow.submit(SubmitRequest(results=(kit.result(task, 0, right), kit.result(task, 1, other))))
    early = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
    assert not early.finished
    assert (early.suites[0].done, early.suites[0].missing) == (6, 1)
    kit.clock.advance(6)
    ended = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
    (report,) = ended.suites
    assert ended.finished
    assert (report.done, report.total, report.missing) == (8, 8, 3)
    assert report.metrics["right"].mean == pytest.approx(3 / 8)
    assert report.metrics["right"].n == 8
    assert report.metrics["right"].low < 3 / 8 < report.metrics["right"].high
    assert report.versions == {"solver": 3, "x": 1}
    assert len(report.examples) == 5
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.buffered == 0, "evaluation is never trained on"


async def test_a_lost_evaluation_task_is_leased_before_anything_else(kit: Any) -> None:
    dataflow = kit.dataflow(suites=[suite(kit, 2)], worker_silence_s=5.0)
    await kit.start(dataflow, "w0", "w1")
    await dataflow.evaluate(EvaluateRequest(label="a", suites=("held_out",)))
    (lost,) = await kit.lease(dataflow)
    kit.clock.advance(4)
    await kit.lease(dataflow, 0, "w1")
    kit.clock.advance(4)
    first, second, third = await kit.lease(dataflow, 3, "w1")
    assert (first.task_id, first.attempt) == (lost.task_id, 1)
    assert (second.purpose, third.purpose) == ("eval", "train")


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
