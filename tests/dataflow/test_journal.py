"""What was said to anybody is in the file: a dataflow that goes on from it is as if it had never stopped."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Control,
    Dataflow,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    Heartbeat,
    JournalError,
    ListSource,
    PolicyFeed,
    Replay,
    Sampling,
    SubmitRequest,
)

NAMES = ("solver", "verifier")


async def work(kit: Any, dataflow: Dataflow, groups: int, *, fail: bool = False) -> None:
    for task in await kit.lease(dataflow, groups):
        rows = [dict.fromkeys(NAMES, float(index)) for index in range(task.n_samples)]
        if fail:
            rows = rows[:1]
        await kit.submit(dataflow, task, rows)


async def test_it_goes_on_as_if_nothing_had_happened(kit: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        one = await kit.attach(dataflow, "solver")
        await kit.attach(dataflow, "verifier")
        await work(kit, dataflow, 3)
        first = (await kit.ask(dataflow, one, 0, "solver")).batch
        await kit.publish(dataflow, one, 1, "solver")
        await work(kit, dataflow, 2, fail=True)
        before = await dataflow.status(Empty())
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        after = await dataflow.status(Empty())
        assert after.phase == "running"
        for old, new in zip(before.policies, after.policies, strict=True):
            assert (new.version, new.incarnation) == (old.version, old.incarnation)
            assert (new.buffered, new.running) == (old.buffered, old.running)
            assert (new.produced, new.consumed, new.dropped) == (old.produced, old.consumed, old.dropped)
        assert after.leased == 2
        second = (await kit.ask(dataflow, one, 1, "solver")).batch
        assert second is None, "six sequences came, four were served"
        two = await kit.attach(dataflow, "solver")
        assert two == one + 1
        assert (await kit.ask(dataflow, two, 0, "solver")).batch == first


async def test_late_results_of_leases_before_the_death_count(kit: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        (task,) = await kit.lease(dataflow)
        result = kit.result(task, 0, kit.trajectory(dict.fromkeys(NAMES, 1.0)))
        await dataflow.submit(SubmitRequest(results=(result,)))
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        again = await dataflow.submit(SubmitRequest(results=(result,)))
        assert (again.accepted, again.duplicates) == (0, 1)
        other = kit.result(task, 1, kit.trajectory(dict.fromkeys(NAMES, 0.0)))
        assert (await dataflow.submit(SubmitRequest(results=(other,)))).accepted == 1
        status = await dataflow.status(Empty())
        assert [policy.buffered for policy in status.policies] == [2, 2]
        assert status.leased == 0


async def test_the_worker_that_held_a_task_keeps_it_or_another_gets_it(kit: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, "w0", "w1", policies=NAMES)
        (mine,) = await kit.lease(dataflow, worker="w0")
        (lost,) = await kit.lease(dataflow, worker="w1")
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed) as dataflow:
        for _ in range(10):
            kit.clock.advance(2.0)
            reply = await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(mine.task_id,)))
            assert reply.known
            assert reply.cancel == ()
        tasks = await kit.lease(dataflow, worker="w0")
        assert [task.task_id for task in tasks] == [lost.task_id]
        assert tasks[0].attempt == 1


async def test_tokens_of_abandoned_weights_count_as_the_point_gone_back_to(
    kit: Any, opened: Any, tmp_path: Path
) -> None:
    """A worker that has not pulled yet leases a task after the trainer went back."""
    policies = (PolicyFeed(model_id="solver", batch_size=2, max_staleness=1, steps=20),)
    path = tmp_path / "a.sqlite"
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        for version in range(1, 10):
            await kit.publish(dataflow, one, version)
        two = await kit.attach(dataflow, version=5)
        (task,) = await kit.lease(dataflow)
        for version in (6, 7):
            await kit.publish(dataflow, two, version)
        trajectory = kit.trajectory({"solver": 1.0}, {"solver": 9})
        results = tuple(kit.result(task, index, trajectory, incarnations={"solver": one}) for index in range(2))
        await dataflow.submit(SubmitRequest(results=results[:1]))
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        await dataflow.submit(SubmitRequest(results=results[1:]))
        assert (await kit.ask(dataflow, two, 7)).batch is None
        status = await dataflow.status(Empty())
        assert status.policies[0].dropped == {"stale": 2}, "5 is two behind 7"


async def test_committed_batches_are_forgotten_when_no_checkpoint_needs_them(
    kit: Any, opened: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.sqlite"
    policies = (PolicyFeed(model_id="solver", batch_size=2, steps=20),)
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        batches = []
        for version in range(6):
            for task in await kit.lease(dataflow):
                await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 0.0}])
            batches.append((await kit.ask(dataflow, one, version)).batch)
            await kit.publish(dataflow, one, version + 1)
            if version % 2:
                await dataflow.commit(CommitRequest(model_id="solver", incarnation=one, version=version + 1))
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        with pytest.raises(ValueError, match="the batch at version 4 was asked for"):
            await kit.ask(dataflow, one, 4)
        consumed = tuple(batch.batch_id for batch in batches[:4])
        two = (await dataflow.attach(AttachRequest(model_id="solver", version=4, consumed=consumed))).incarnation
        assert [(await kit.ask(dataflow, two, at)).batch for at in (4, 5)] == batches[4:]
        other = ("x", *consumed[:3], "y")
        with pytest.raises(ValueError, match="another run's checkpoint"):
            await dataflow.attach(AttachRequest(model_id="solver", version=5, consumed=other))
    rows = sqlite3.connect(killed).execute("SELECT version, kept FROM batches ORDER BY version").fetchall()
    assert rows == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1), (5, 1)]


async def test_an_evaluation_goes_on(kit: Any, opened: Any, tmp_path: Path) -> None:
    suite = EvalSuite(
        name="held_out", prompts=kit.prompts(3, "held"), workflow="math", sampling={"solver": Sampling(temperature=0)}
    )
    path = tmp_path / "a.sqlite"
    async with opened(path, suites=[suite]) as dataflow:
        await kit.start(dataflow, policies=NAMES)
        await dataflow.evaluate(EvaluateRequest(label="before", suites=("held_out",)))
        (first,) = await kit.lease(dataflow)
        trajectory = kit.trajectory({"solver": 1.0}, metrics={"correct": 1.0})
        await dataflow.submit(SubmitRequest(results=(kit.result(first, 0, trajectory),)))
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed, suites=[suite]) as dataflow:
        for task in await kit.lease(dataflow, 2):
            assert task.suite == "held_out"
            await dataflow.submit(SubmitRequest(results=(kit.result(task, 0, trajectory),)))
        ended = await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0))
        assert ended.finished
        assert ended.suites[0].metrics["correct"].n == 3
        killed = kit.copied(killed, "c.sqlite")
    async with opened(killed, suites=[suite]) as dataflow:
        assert await dataflow.evaluation(EvaluationQuery(label="before", wait_s=0.0)) == ended


async def test_another_run_is_refused(kit: Any, opened: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    async with opened(path) as dataflow:
        await kit.start(dataflow, policies=NAMES)
    with pytest.raises(JournalError, match=r"trains \['solver', 'verifier'\], this one trains \['solver'\]"):
        async with opened(path, policies=(PolicyFeed(model_id="solver", batch_size=4),)):
            pass
    with pytest.raises(ValueError, match="another source"):
        async with opened(path, source=ListSource(kit.prompts(9), seed=0)):
            pass


async def test_algorithms_go_on_with_what_they_know(kit: Any, opened: Any, tmp_path: Path) -> None:
    """Replay has its samples back, a selector its rates, the prompts go on where they were."""
    settings: dict[str, Any] = {
        "policies": (PolicyFeed(model_id="solver", batch_size=4, steps=20, replay=Replay(ratio=0.5)),),
        "selectors": ("filter_solved(decay=0, threshold=0.9)",),
    }
    path = tmp_path / "a.sqlite"
    async with opened(path, **settings) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        for version in range(6):
            for task in await kit.lease(dataflow, 2):
                await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 1.0 if version else 0.0}])
            await kit.ask(dataflow, one, version)
            await kit.publish(dataflow, one, version + 1)
            await dataflow.commit(CommitRequest(model_id="solver", incarnation=one, version=version + 1))
        await anyio.sleep(0.1)  # what algorithms know may be behind by a moment
        await dataflow.control(Control(phase="running"))
        before = await dataflow.status(Empty())
        killed = kit.copied(path, "b.sqlite")
        (expected,) = [task.prompt.id for task in await kit.lease(dataflow)]
    assert before.data["selection"]["rejected"] > 0
    async with opened(killed, **settings) as dataflow:
        after = await dataflow.status(Empty())
        assert after.data == before.data
        old, new = before.policies[0].data, after.policies[0].data
        assert new["replay"]["kept"] == old["replay"]["kept"] > 0
        assert new["filter_solved"]["solved"] == old["filter_solved"]["solved"] > 0
        for task in await kit.lease(dataflow):
            assert task.prompt.id == expected
            await kit.submit(dataflow, task, [{"solver": 0.0}, {"solver": 1.0}])
        batch = (await kit.ask(dataflow, one, 6)).batch
        assert [sample.replayed for sample in batch.samples] == [False, False, True, True]


async def test_batches_beyond_what_memory_holds_come_again_from_the_file(kit: Any, opened: Any, tmp_path: Path) -> None:
    policies = (PolicyFeed(model_id="solver", batch_size=2, max_staleness=0, steps=200),)
    path = tmp_path / "a.sqlite"
    async with opened(path, policies=policies) as dataflow:
        await kit.start(dataflow)
        one = await kit.attach(dataflow)
        batches = []
        for version in range(70):
            (task,) = await kit.lease(dataflow)
            await kit.submit(dataflow, task, [{"solver": 1.0}, {"solver": 0.0}], {"solver": version})
            batches.append((await kit.ask(dataflow, one, version)).batch)
            await kit.publish(dataflow, one, version + 1)
        two = await kit.attach(dataflow, version=0)
        assert [(await kit.ask(dataflow, two, at)).batch for at in range(70)] == batches
        killed = kit.copied(path, "b.sqlite")
    async with opened(killed, policies=policies) as dataflow:
        assert [(await kit.ask(dataflow, two, at)).batch for at in range(70)] == batches
