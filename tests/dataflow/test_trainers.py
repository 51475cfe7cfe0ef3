"""Batches as trainers see them: identity, fencing, rollback, staleness, stalls, and errors instead of endless waits."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Control,
    Dataflow,
    Empty,
    Fenced,
    Heartbeat,
    PolicyFeed,
    RunFailed,
    StepReport,
    SubmitRequest,
    Trajectory,
)


def feed(model_id: str = "solver", **fields: Any) -> PolicyFeed:
    return PolicyFeed(model_id=model_id, **({"batch_size": 4, "steps": 10} | fields))


async def fill(kit: Any, dataflow: Dataflow, count: int, *names: str, **versions: int) -> None:
    """Roll out `count` groups at the given versions, if that many are admitted."""
    for task in await kit.lease(dataflow, count):
        await kit.mixed(dataflow, task, *names, versions=versions)


async def test_a_waiting_trainer_gets_its_batch_when_it_is_full(kit: Any) -> None:
    dataflow = kit.dataflow([feed(batch_size=6)], real_time=True)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    tasks = await kit.lease(dataflow, 2)
    async with anyio.create_task_group() as group:

        async def later() -> None:
            for task in tasks:
                await anyio.sleep(0.02)
                await kit.mixed(dataflow, task)

        group.start_soon(later)
        with anyio.fail_after(2):
            batch = (await kit.ask(dataflow, incarnation, 0, wait_s=30.0)).batch
    assert len(batch.samples) == 6
    assert (batch.version, batch.model_id) == (0, "solver")
    empty = await kit.ask(dataflow, incarnation, 1)
    assert empty.batch is None
    assert not empty.finished


async def test_a_batch_is_the_same_until_it_is_committed(kit: Any) -> None:
    dataflow = kit.dataflow([feed()])
    await kit.start(dataflow)
    one = await kit.attach(dataflow)
    await fill(kit, dataflow, 3)
    first, second = [(await kit.ask(dataflow, one, v)).batch for v in (0, 1)]
    await kit.publish(dataflow, one, 1)
    assert (await kit.ask(dataflow, one, 1)).batch == second
    two = (await dataflow.attach(AttachRequest(model_id="solver"))).incarnation
    assert two == one + 1
    assert (await kit.ask(dataflow, two, 0)).batch == first
    assert (await kit.ask(dataflow, two, 1)).batch == second
    await dataflow.commit(CommitRequest(model_id="solver", incarnation=two, version=1))
    three = await dataflow.attach(AttachRequest(model_id="solver", version=1, consumed=(first.batch_id,)))
    assert (await kit.ask(dataflow, three.incarnation, 1)).batch == second
    with pytest.raises(ValueError, match="batch at version 0 was asked for, the next is 2"):
        await kit.ask(dataflow, three.incarnation, 0)
    third = (await kit.ask(dataflow, three.incarnation, 2)).batch
    ids = [s.sample_id for batch in (first, second, third) for s in batch.samples]
    assert len(set(ids)) == 12


async def test_an_older_incarnation_is_fenced_in_every_call(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], real_time=True)
    await kit.start(dataflow)
    old = await kit.attach(dataflow)

    async def replace() -> None:
        await anyio.sleep(0.05)
        await kit.attach(dataflow)

    async with anyio.create_task_group() as group:
        group.start_soon(replace)
        with anyio.fail_after(2), pytest.raises(Fenced, match="incarnation 1 spoke, but 2 is in charge"):
            await kit.ask(dataflow, old, 0, wait_s=30.0)
    with pytest.raises(Fenced):
        await kit.ask(dataflow, old, 0)
    with pytest.raises(Fenced):
        await kit.publish(dataflow, old, 5)
    with pytest.raises(Fenced):
        await dataflow.commit(CommitRequest(model_id="solver", incarnation=old, version=5))
    report = StepReport(model_id="solver", incarnation=old, version=1, batch_id="b", wait_s=0.0, step_s=1.0, metrics={})
    with pytest.raises(Fenced):
        await dataflow.report(report)
    assert (await dataflow.status(Empty())).policies[0].version == 0
    with pytest.raises(ValueError, match="does not train 'judge'"):
        await dataflow.attach(AttachRequest(model_id="judge"))


async def test_stale_sequences_are_dropped_at_serving(kit: Any) -> None:
    dataflow = kit.dataflow([feed(max_staleness=1, steps=10)])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    tasks = await kit.lease(dataflow, 2)
    for version in range(2):
        await kit.mixed(dataflow, tasks[version], versions={"solver": 0})
        assert (await kit.ask(dataflow, incarnation, version)).batch is not None
        await kit.publish(dataflow, incarnation, version + 1)
    (old,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, old, versions={"solver": 0})
    assert (await kit.ask(dataflow, incarnation, 2)).batch is None
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.dropped == {"stale": 4}
    assert policy.staleness_max == 1
    (new,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, new, versions={"solver": 1})
    assert (await kit.ask(dataflow, incarnation, 2)).batch is not None


async def test_the_oldest_version_is_served_first(kit: Any) -> None:
    dataflow = kit.dataflow([feed(batch_size=2, max_staleness=9)], n_samples=2)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await kit.publish(dataflow, incarnation, 3)
    for task, version in zip(await kit.lease(dataflow, 3), (2, 0, 1), strict=True):
        await kit.mixed(dataflow, task, versions={"solver": version})
    served = []
    for version in (3, 4, 5):
        batch = (await kit.ask(dataflow, incarnation, version)).batch
        served.append({sample.sequence.oldest_version for sample in batch.samples})
    assert served == [{0}, {1}, {2}]


async def test_after_a_rollback_abandoned_versions_count_as_the_point_gone_back_to(kit: Any) -> None:
    """Data of versions 8 and 9, buffered or still running when the trainer goes back to 2, is of version 2."""
    dataflow = kit.dataflow([feed(max_staleness=1, steps=20)])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await kit.publish(dataflow, incarnation, 9)
    buffered, running = await kit.lease(dataflow, 2)
    await kit.mixed(dataflow, buffered, versions={"solver": 8})
    incarnation = await kit.attach(dataflow, version=2)
    await kit.publish(dataflow, incarnation, 4)
    await kit.mixed(dataflow, running, versions={"solver": 9})
    assert (await kit.ask(dataflow, incarnation, 4)).batch is None
    assert (await dataflow.status(Empty())).policies[0].dropped == {"stale": 8}


async def test_a_stalled_policy_stops_nobody_and_its_memory_is_bounded(kit: Any) -> None:
    dataflow = kit.dataflow([feed("solver", steps=50), feed("verifier", batch_size=2, max_staleness=3)])
    await kit.start(dataflow, policies=("solver", "verifier"))
    await kit.attach(dataflow, "verifier")
    incarnation = await kit.attach(dataflow, "solver")
    for version in range(50):
        while (batch := (await kit.ask(dataflow, incarnation, version)).batch) is None:
            await fill(kit, dataflow, 1, "solver", "verifier", solver=version)
        assert len(batch.samples) == 4
        await kit.publish(dataflow, incarnation, version + 1)
    assert (await kit.ask(dataflow, incarnation, 50)).finished
    solver, verifier = (await dataflow.status(Empty())).policies
    assert (solver.version, solver.finished, verifier.version) == (50, True, 0)
    assert verifier.buffered <= 10
    assert verifier.dropped["overflow"] == verifier.produced - verifier.buffered
    assert await kit.lease(dataflow, 5) == (), "a policy that is done or full opens nothing"
    assert (await kit.ask(dataflow, 1, 0, "verifier")).batch is not None, "and the stalled one can go on"


async def test_a_finished_policy_counts_no_longer(kit: Any) -> None:
    dataflow = kit.dataflow([feed("solver", steps=1), feed("verifier", steps=3)])
    await kit.start(dataflow, policies=("solver", "verifier"))
    solver, verifier = [await kit.attach(dataflow, name) for name in ("solver", "verifier")]
    (task,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, task, "solver", "verifier")
    assert (await kit.ask(dataflow, solver, 0, "solver")).batch is not None
    running = await kit.lease(dataflow, 3)
    await kit.mixed(dataflow, running[0], "solver", "verifier")
    assert (await dataflow.status(Empty())).policies[0].dropped == {"finished": 4}
    for version in range(2):
        assert (await kit.ask(dataflow, verifier, version, "verifier")).batch is not None
        await kit.publish(dataflow, verifier, version + 1, "verifier")
    await kit.mixed(dataflow, running[1], "verifier")
    assert (await kit.ask(dataflow, verifier, 2, "verifier")).batch is not None
    beat = await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(running[2].task_id,)))
    assert beat.cancel == (running[2].task_id,), "nobody needs it any more"
    assert not beat.finished, "the driver evaluates first"
    assert await kit.lease(dataflow) == ()


async def test_groups_without_advantage_are_dropped_and_replaced(kit: Any) -> None:
    dataflow = kit.dataflow([feed(max_staleness=0)])
    await kit.start(dataflow)
    for _ in range(3):
        (task,) = await kit.lease(dataflow)
        await kit.submit(dataflow, task, [{"solver": 1.0}] * 4)
    (policy,) = (await dataflow.status(Empty())).policies
    assert (policy.dropped, policy.buffered, policy.produced) == ({"zero_advantage": 12}, 0, 0)
    keeping = kit.dataflow([feed(max_staleness=0)], filters=())
    await kit.start(keeping)
    (task,) = await kit.lease(keeping)
    await kit.submit(keeping, task, [{"solver": 1.0}] * 4)
    assert (await keeping.status(Empty())).policies[0].buffered == 4


@pytest.mark.parametrize("reward", [0.0, 1.0])
async def test_nothing_but_dropped_groups_fails_with_the_histogram(kit: Any, reward: float) -> None:
    dataflow = kit.dataflow([feed()], max_dropped_batches=3)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for _ in range(3):
        assert (await dataflow.status(Empty())).error == ""
        (task,) = await kit.lease(dataflow)
        await kit.submit(dataflow, task, [{"solver": reward}] * 4)
    with pytest.raises(RunFailed, match=rf"3 groups \(12 samples\) in a row .*12 zero_advantage.*: {reward:g} x 12"):
        await kit.ask(dataflow, incarnation, 0, wait_s=60.0)
    assert "12 zero_advantage" in (await dataflow.status(Empty())).error
    assert await kit.lease(dataflow) == ()


async def test_a_group_that_is_kept_starts_the_count_again(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], max_dropped_batches=2)
    await kit.start(dataflow)
    for rewards in ((1, 1, 1, 1), (0, 1, 1, 1), (0, 0, 0, 0)):
        (task,) = await kit.lease(dataflow)
        await kit.submit(dataflow, task, [{"solver": float(r)} for r in rewards])
    assert (await dataflow.status(Empty())).error == ""


async def test_nothing_but_errors_fails_with_the_first_of_them(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], max_dropped_batches=2)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for number in range(2):
        (task,) = await kit.lease(dataflow)
        results = tuple(
            kit.result(task, i, Trajectory(status="failed", error=f"KeyError {number}{i}")) for i in range(4)
        )
        await dataflow.submit(SubmitRequest(results=results))
    with pytest.raises(RunFailed, match=r"8 failed.*first error: KeyError 00"):
        await kit.ask(dataflow, incarnation, 0)


async def test_nothing_but_stale_data_fails(kit: Any) -> None:
    dataflow = kit.dataflow([feed(max_staleness=0)], max_dropped_batches=2)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await kit.publish(dataflow, incarnation, 5)
    await fill(kit, dataflow, 1, solver=1)
    assert (await kit.ask(dataflow, incarnation, 5)).batch is None
    await fill(kit, dataflow, 1, solver=1)
    with pytest.raises(RunFailed, match="8 sequences in a row were more than 0 versions old"):
        await kit.ask(dataflow, incarnation, 5)


async def test_when_every_worker_is_gone_the_wait_ends_with_the_cause(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], worker_silence_s=5.0, worker_grace_s=20.0)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    await kit.lease(dataflow)
    kit.clock.advance(19)
    assert (await kit.ask(dataflow, incarnation, 0)).batch is None
    kit.clock.advance(2)
    with pytest.raises(RunFailed, match=r"no rollout worker was heard of for 21 s .* 1 training and 0 evaluation"):
        await kit.ask(dataflow, incarnation, 0, wait_s=60.0)
    assert "no rollout worker" in (await dataflow.status(Empty())).error
    await kit.start(dataflow)
    assert (await kit.ask(dataflow, incarnation, 0)).batch is None, "a worker came back"


async def test_a_trainer_waiting_in_real_time_hears_that_everybody_is_gone(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], worker_silence_s=0.1, worker_grace_s=0.2, real_time=True)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    with anyio.fail_after(3), pytest.raises(RunFailed):
        await kit.ask(dataflow, incarnation, 0, wait_s=60.0)


async def test_reports_make_the_figures_once(kit: Any) -> None:
    dataflow = kit.dataflow([feed()])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for version, (wait_s, step_s) in enumerate(((1.0, 3.0), (2.0, 2.0)), start=1):
        report = StepReport(
            model_id="solver",
            incarnation=incarnation,
            version=version,
            batch_id=f"b{version}",
            wait_s=wait_s,
            step_s=step_s,
            metrics={"loss": float(version)},
        )
        await dataflow.report(report)
        await dataflow.report(report)
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.wait_fraction == pytest.approx(3 / 8)
    assert policy.metrics == {"loss": 2.0}
    assert policy.target_workers == 2
    assert [step.version for step in kit.notes.steps] == [1, 2]


async def test_a_finished_run_sends_trainers_home(kit: Any) -> None:
    dataflow = kit.dataflow([feed()], real_time=True)
    incarnation = await kit.attach(dataflow)
    async with anyio.create_task_group() as group:

        async def later() -> None:
            await anyio.sleep(0.05)
            await dataflow.control(Control(phase="finished"))

        group.start_soon(later)
        with anyio.fail_after(2):
            assert (await kit.ask(dataflow, incarnation, 0, wait_s=30.0)).finished


async def test_a_trainer_that_comes_back_before_what_is_kept_trains_anew(kit: Any) -> None:
    """Without commits the oldest batches are forgotten; what is kept behind the gap must not take their room."""
    dataflow = kit.dataflow([feed(max_staleness=0, steps=100)])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    for version in range(70):
        await fill(kit, dataflow, 1, solver=version)
        assert (await kit.ask(dataflow, incarnation, version)).batch is not None
        await kit.publish(dataflow, incarnation, version + 1)
    incarnation = await kit.attach(dataflow, version=0)
    for version in range(70):
        reply = await kit.ask(dataflow, incarnation, version)
        if reply.batch is None:
            await fill(kit, dataflow, 1, solver=version)
            reply = await kit.ask(dataflow, incarnation, version)
        assert reply.batch.version == version
        await kit.publish(dataflow, incarnation, version + 1)
