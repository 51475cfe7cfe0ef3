"""Leases as workers see them: replacement, duplicates, failures, cancellations."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import anyio
import msgspec
import pytest

from astraflow.dataflow import (
    Control,
    Empty,
    EvalSuite,
    EvaluateRequest,
    Heartbeat,
    LeaseRequest,
    ListSource,
    Message,
    PolicyFeed,
    Registration,
    Sampling,
    SubmitRequest,
    TaskProgress,
    Trajectory,
    WatchRequest,
    WorkerStats,
)


async def test_training_tasks_are_leased_only_while_the_run_runs(kit: Any) -> None:
    dataflow = kit.dataflow()
    assert await kit.lease(dataflow) == (), "a stranger gets nothing"
    await dataflow.register(Registration(worker_id="w0", pool="main", capacity=8, policies=("solver",)))
    assert await kit.lease(dataflow) == ()
    await dataflow.control(Control(phase="running"))
    first, second = await kit.lease(dataflow, 2)
    assert (first.task_id, second.task_id) == ("sums/0", "sums/1")
    assert first.seed != second.seed
    await dataflow.control(Control(phase="finished"))
    assert (await dataflow.lease(LeaseRequest(worker_id="w0", max_tasks=1, wait_s=0.0))).finished
    assert (await dataflow.heartbeat(Heartbeat(worker_id="w0"))).finished


async def test_a_worker_gets_only_tasks_whose_policies_it_serves(kit: Any) -> None:
    dataflow = kit.dataflow(served=("judge",))
    await kit.start(dataflow, "w0", policies=("solver",))
    assert await kit.lease(dataflow) == ()
    await kit.start(dataflow, "w1", policies=("judge", "solver"))
    assert len(await kit.lease(dataflow, worker="w1")) == 1


async def test_a_lease_waits_for_work_and_wakes(kit: Any) -> None:
    dataflow = kit.dataflow(real_time=True)
    await dataflow.register(Registration(worker_id="w0", pool="main", capacity=8, policies=("solver",)))
    with anyio.fail_after(2):
        async with anyio.create_task_group() as tasks:

            async def later() -> None:
                await anyio.sleep(0.05)
                await dataflow.control(Control(phase="running"))

            tasks.start_soon(later)
            reply = await dataflow.lease(LeaseRequest(worker_id="w0", max_tasks=1, wait_s=30.0))
    assert len(reply.tasks) == 1


async def test_a_missed_deadline_gives_what_is_missing_to_another_worker(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, worker_silence_s=100.0)
    await kit.start(dataflow, "slow", "fast")
    (task,) = await kit.lease(dataflow, worker="slow")
    good = kit.trajectory({"solver": 1.0})
    await dataflow.submit(SubmitRequest(results=(kit.result(task, 2, good, "slow"),)))
    kit.clock.advance(10.1)
    assert (await dataflow.heartbeat(Heartbeat(worker_id="slow", tasks=(task.task_id,)))).cancel == (task.task_id,)
    (again,) = await kit.lease(dataflow, worker="fast")
    assert (again.task_id, again.attempt, again.done, again.seed) == (task.task_id, 1, (2,), task.seed)
    late = await dataflow.submit(SubmitRequest(results=(kit.result(task, 2, good, "slow"),)))
    assert (late.accepted, late.duplicates) == (0, 1)
    bad = kit.trajectory({"solver": 0.0})
    results = tuple(kit.result(again, index, bad, "fast") for index in (0, 1, 3, 3))
    reply = await dataflow.submit(SubmitRequest(results=results))
    assert (reply.accepted, reply.duplicates) == (3, 1)
    assert [t.sequences[0].reward for t in kit.notes.groups[0].trajectories] == [0.0, 0.0, 1.0, 0.0]
    assert (await dataflow.submit(SubmitRequest(results=results))).duplicates == 4, "the group is closed"
    assert len(kit.notes.groups) == 1


async def test_the_worker_that_lost_a_task_gets_it_back_only_if_it_is_alone(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, worker_silence_s=100.0)
    await kit.start(dataflow, "w0", "w1")
    (task,) = await kit.lease(dataflow)
    kit.clock.advance(11)
    (other,) = await kit.lease(dataflow)
    assert other.task_id != task.task_id
    alone = kit.dataflow(task_deadline_s=10.0, worker_silence_s=100.0)
    await kit.start(alone, "w0")
    (task,) = await kit.lease(alone)
    kit.clock.advance(11)
    (again,) = await kit.lease(alone)
    assert (again.task_id, again.attempt) == (task.task_id, 1)


async def test_a_silent_workers_tasks_go_to_others(kit: Any) -> None:
    dataflow = kit.dataflow(worker_silence_s=5.0)
    await kit.start(dataflow, "dead", "w1")
    (task,) = await kit.lease(dataflow, worker="dead")
    kit.clock.advance(3)
    await dataflow.heartbeat(Heartbeat(worker_id="w1"))
    kit.clock.advance(3)
    (again,) = await kit.lease(dataflow, worker="w1")
    assert again.task_id == task.task_id
    status = await dataflow.status(Empty())
    assert {w.worker_id: w.alive for w in status.workers} == {"dead": False, "w1": True}
    kit.clock.advance(200)
    assert (await dataflow.status(Empty())).workers == ()
    assert not (await dataflow.heartbeat(Heartbeat(worker_id="dead"))).known, "forgotten, it must register again"


async def test_a_restarted_workers_tasks_return_at_once(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow, "w0")
    (task,) = await kit.lease(dataflow)
    same = Registration(worker_id="w0", pool="main", capacity=8, policies=("solver",), pid=1)
    await dataflow.register(same)
    assert (await dataflow.status(Empty())).leased == 1
    await dataflow.register(Registration(worker_id="w0", pool="main", capacity=8, policies=("solver",), pid=2))
    (again,) = await kit.lease(dataflow)
    assert (again.task_id, again.attempt) == (task.task_id, 1)


async def test_a_lease_whose_reply_was_lost_returns_after_a_while(kit: Any) -> None:
    dataflow = kit.dataflow(worker_silence_s=10.0, task_deadline_s=1000.0)
    await kit.start(dataflow, "w0")
    kept, lost = await kit.lease(dataflow, 2)
    for _ in range(3):
        kit.clock.advance(2)
        await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(kept.task_id,)))
    (again,) = await kit.lease(dataflow)
    assert again.task_id == lost.task_id
    assert (await dataflow.status(Empty())).leased == 2


async def test_after_the_last_attempt_the_samples_that_are_in_make_the_group(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, worker_silence_s=100.0, max_attempts=2)
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    for index, reward in enumerate((0.0, 1.0)):
        result = kit.result(task, index, kit.trajectory({"solver": reward}))
        await dataflow.submit(SubmitRequest(results=(result,)))
    kit.clock.advance(11)
    (again,) = await kit.lease(dataflow)
    assert (again.task_id, again.attempt) == (task.task_id, 1)
    kit.clock.advance(11)
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.buffered == 2
    assert policy.dropped == {"failed": 2}
    (group,) = kit.notes.groups
    assert [t is None for t in group.trajectories] == [False, False, True, True]


async def test_a_failed_sample_fails_alone(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    outcomes = [
        kit.trajectory({"solver": 1.0}),
        Trajectory(status="failed", error="sandbox died"),
        kit.trajectory({"solver": 0.0}),
        Trajectory(status="timed_out"),
    ]
    results = tuple(kit.result(task, index, outcome) for index, outcome in enumerate(outcomes))
    assert (await dataflow.submit(SubmitRequest(results=results))).accepted == 4
    (policy,) = (await dataflow.status(Empty())).policies
    assert (policy.buffered, policy.dropped) == (2, {"failed": 2})


async def test_a_reward_that_is_no_number_is_rejected_and_never_zero(kit: Any) -> None:
    """NaN is refused by name and its sample failed; None is masked; neither is in the statistics."""
    dataflow = kit.dataflow(n_samples=4)
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    reply = await kit.submit(dataflow, task, [{"solver": r} for r in (1.0, 0.0, math.nan, None)])
    assert reply.accepted == 3
    assert "not finite" in reply.rejected[0]
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.dropped == {"failed": 1, "masked": 1}
    assert policy.buffered == 2
    assert policy.reward_mean == 0.5


async def test_a_sample_that_does_not_exist_is_rejected(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    reply = await dataflow.submit(SubmitRequest(results=(kit.result(task, 4, Trajectory()),)))
    assert reply.rejected == ("task sums/0 has no sample 4",)


async def test_one_sample_tasks_train(kit: Any) -> None:
    feed = PolicyFeed(model_id="solver", batch_size=2, steps=1)
    dataflow = kit.dataflow([feed], n_samples=1, filters=())
    await kit.start(dataflow)
    for task in await kit.lease(dataflow, 2):
        await kit.submit(dataflow, task, [{"solver": 1.0}])
    incarnation = await kit.attach(dataflow)
    batch = (await kit.ask(dataflow, incarnation, 0)).batch
    assert [(s.group_size, s.group_std, s.group_mean) for s in batch.samples] == [(1, 0.0, 1.0)] * 2


async def test_watch_returns_what_is_news(kit: Any) -> None:
    dataflow = kit.dataflow(real_time=True)
    assert (await dataflow.watch(WatchRequest(wait_s=0.0))).versions == ()
    incarnation = await kit.attach(dataflow)
    (version,) = (await dataflow.watch(WatchRequest(wait_s=30.0))).versions
    assert (version.version, version.incarnation) == (0, 1)
    async with anyio.create_task_group() as tasks:

        async def later() -> None:
            await anyio.sleep(0.05)
            await kit.publish(dataflow, incarnation, 1)

        tasks.start_soon(later)
        with anyio.fail_after(2):
            (version,) = (await dataflow.watch(WatchRequest(known={"solver": 0}, wait_s=30.0))).versions
    assert version.version == 1
    await kit.attach(dataflow, version=1)
    news = WatchRequest(known={"solver": 1}, incarnations={"solver": 1}, wait_s=30.0)
    assert (await dataflow.watch(news)).versions[0].incarnation == 2, "the same number, other weights"


async def test_the_status_has_everything(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    rows = [{"solver": 1.0}, {"solver": 0.0}, {"solver": 0.0}, {"solver": 0.0}]
    results = tuple(
        kit.result(task, i, kit.trajectory(row, metrics={"right": row["solver"]}, messages=(Message("user", "?"),)))
        for i, row in enumerate(rows)
    )
    await dataflow.submit(SubmitRequest(results=results))
    stats = WorkerStats(running=3, generated_tokens=500, seconds=2.0, versions={"solver": 4}, pulled_full_bytes=7)
    for _ in range(2):
        await dataflow.heartbeat(Heartbeat(worker_id="w0", stats=stats))
    status = await dataflow.status(Empty())
    (policy,), (worker,) = status.policies, status.workers
    assert status.metrics == {"right": 0.25}
    assert status.example is not None
    assert status.error == ""
    assert (policy.reward_mean, policy.reward_nonzero, policy.produced) == (0.25, 0.25, 4)
    assert (worker.tokens_per_s, worker.running, worker.pulled_full_bytes) == (250.0, 3, 14)


async def test_a_data_set_that_ends_ends_the_run_with_its_tail(kit: Any) -> None:
    """9 samples, batches of 4: 4, 4, then the last one alone, then finished; nothing is lost or repeated."""
    feed = PolicyFeed(model_id="solver", batch_size=4, steps=100)
    source = ListSource(kit.prompts(3), seed=0, epochs=1)
    dataflow = kit.dataflow([feed], source=source, n_samples=3)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    tasks = await kit.lease(dataflow, 10)
    assert len(tasks) == 3
    seen: list[str] = []
    for task in tasks:
        await kit.mixed(dataflow, task)
    for version, size in enumerate((4, 4, 1)):
        batch = (await kit.ask(dataflow, incarnation, version)).batch
        assert len(batch.samples) == size
        seen += [sample.sample_id for sample in batch.samples]
        await kit.publish(dataflow, incarnation, version + 1)
    assert sorted(seen) == sorted(f"{task.task_id}/{i}.0" for task in tasks for i in range(3))
    reply = await kit.ask(dataflow, incarnation, 3)
    assert reply.finished
    assert reply.batch is None
    assert (await dataflow.status(Empty())).policies[0].finished


async def test_the_tail_waits_for_what_still_runs(kit: Any) -> None:
    source = ListSource(kit.prompts(2), seed=0, epochs=1)
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4, steps=9)], source=source, n_samples=3)
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    first, second = await kit.lease(dataflow, 10)
    await kit.mixed(dataflow, first)
    assert (await kit.ask(dataflow, incarnation, 0)).batch is None
    await kit.mixed(dataflow, second)
    assert len((await kit.ask(dataflow, incarnation, 0)).batch.samples) == 4


async def test_a_worker_that_came_back_and_fell_silent_again_is_noticed(kit: Any) -> None:
    dataflow = kit.dataflow(worker_silence_s=5.0, task_deadline_s=1000.0)
    await kit.start(dataflow)
    kit.clock.advance(6)
    assert not (await dataflow.status(Empty())).workers[0].alive
    await kit.lease(dataflow)
    kit.clock.advance(6)
    assert (await dataflow.status(Empty())).leased == 0


async def test_what_is_being_trained_counts_against_the_horizon(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4, max_staleness=0, steps=9)])
    await kit.start(dataflow)
    incarnation = await kit.attach(dataflow)
    (task,) = await kit.lease(dataflow, 10)
    await kit.mixed(dataflow, task)
    await kit.ask(dataflow, incarnation, 0)
    assert await kit.lease(dataflow, 10) == (), "started now it would be stale when its turn comes"
    await kit.publish(dataflow, incarnation, 1)
    assert len(await kit.lease(dataflow, 10)) == 1


@pytest.mark.parametrize("most", [1, 100])
async def test_refills_to_the_horizon_and_no_further(kit: Any, most: int) -> None:
    feed = PolicyFeed(model_id="solver", batch_size=8, max_staleness=2, steps=10)
    dataflow = kit.dataflow([feed], n_samples=4)
    await kit.start(dataflow)
    leased = 0
    while tasks := await kit.lease(dataflow, most):
        leased += len(tasks)
    assert leased == 3 * 8 // 4


async def test_a_lost_task_returns_to_its_worker_if_no_other_can_run_it(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow, "w0")
    await kit.start(dataflow, "other", policies=("judge",))
    (task,) = await kit.lease(dataflow)
    kit.clock.advance(121.0)
    await dataflow.heartbeat(Heartbeat(worker_id="other"))
    (again,) = await kit.lease(dataflow)
    assert (again.task_id, again.attempt) == (task.task_id, 1)


async def test_what_a_worker_that_leaves_still_holds_goes_to_others_at_once(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow, "w0", "w1")
    (task,) = await kit.lease(dataflow)
    await dataflow.heartbeat(Heartbeat(worker_id="w0", leaving=True))
    (again,) = await kit.lease(dataflow, worker="w1")
    assert (again.task_id, again.attempt) == (task.task_id, 1)
    assert {w.worker_id: w.alive for w in (await dataflow.status(Empty())).workers} == {"w0": False, "w1": True}
    await kit.start(dataflow, "w0")
    assert all(w.alive for w in (await dataflow.status(Empty())).workers)


async def test_a_straggler_is_leased_again_only_when_no_tokens_come(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, task_limit_s=60.0, worker_silence_s=100.0)
    await kit.start(dataflow, "slow", "fast")
    (task,) = await kit.lease(dataflow, worker="slow")

    async def beat(tokens: int) -> Any:
        progress = (TaskProgress(task.task_id, tokens),)
        reply = await dataflow.heartbeat(Heartbeat(worker_id="slow", tasks=(task.task_id,), progress=progress))
        return reply.cancel

    for second in range(1, 6):
        kit.clock.advance(8)
        assert await beat(100 * second) == (), "it is only long"
    kit.clock.advance(8)
    assert await beat(500) == ()
    kit.clock.advance(3)
    assert await beat(500) == (task.task_id,), "nothing new for eleven seconds"
    (again,) = await kit.lease(dataflow, worker="fast")
    assert (again.task_id, again.attempt) == (task.task_id, 1)


async def test_tokens_keep_a_lease_up_to_its_limit(kit: Any) -> None:
    dataflow = kit.dataflow(task_deadline_s=10.0, task_limit_s=25.0, worker_silence_s=100.0)
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    for tokens in (1, 2, 3, 4):
        kit.clock.advance(8)
        progress = (TaskProgress(task.task_id, tokens),)
        await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=(task.task_id,), progress=progress))
    assert (await dataflow.status(Empty())).leased == 0
    with pytest.raises(ValueError, match=r"task_limit_s 5\.0 is shorter than task_deadline_s 10\.0"):
        kit.config(task_deadline_s=10.0, task_limit_s=5.0)


async def test_time_outs_are_reported_by_length(kit: Any) -> None:
    dataflow = kit.dataflow()
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    outcomes = ((0, "timed_out"), (300, "ok"), (900, "timed_out"), (200, "failed"))
    results = tuple(
        msgspec.structs.replace(kit.result(task, index, kit.trajectory({"solver": 1.0}, status=status)), tokens=tokens)
        for index, (tokens, status) in enumerate(outcomes)
    )
    await dataflow.submit(SubmitRequest(results=results))
    lengths = (await dataflow.status(Empty())).lengths
    assert [(row.least, row.ended, row.timed_out) for row in lengths] == [(0, 0, 1), (64, 1, 0), (256, 1, 1)]


async def test_a_group_that_can_only_be_stale_is_cancelled(kit: Any) -> None:
    feeds = [
        PolicyFeed(model_id=name, batch_size=4, max_staleness=staleness) for name, staleness in (("a", 1), ("b", 2))
    ]
    dataflow = kit.dataflow(feeds)
    await kit.start(dataflow, policies=("a", "b"))
    one, two = [await kit.attach(dataflow, name) for name in ("a", "b")]
    old, young, half = await kit.lease(dataflow, 3)
    (fresh,) = (kit.result(half, 0, kit.trajectory({"a": 1.0, "b": 0.0}, {"a": 9, "b": 9})),)
    await dataflow.submit(SubmitRequest(results=(fresh,)))

    async def cancelled(*progress: TaskProgress) -> Any:
        named = tuple(task.task_id for task in (old, young, half))
        return (await dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=named, progress=progress))).cancel

    told = [TaskProgress(task.task_id, 5, {"a": 0, "b": 0}) for task in (old, young, half)]
    for version in range(1, 3):
        await kit.publish(dataflow, one, version, "a")
        await kit.publish(dataflow, two, version, "b")
        assert await cancelled(*told) == (), "one of the policies can still train it"
    await kit.publish(dataflow, two, 3, "b")
    told[1] = TaskProgress(young.task_id, 5, {"a": 0})
    assert await cancelled(*told) == (old.task_id,), "young has yet to begin with b, of half a sample in is fresh"
    assert [policy.dropped for policy in (await dataflow.status(Empty())).policies] == [{"stale": 4}] * 2
    assert len(await kit.lease(dataflow, 1)) == 1, "its place is free at once"


@pytest.mark.parametrize(("most", "counts"), [(3, [1, 1]), (4, [1, 1, 2]), (5, [1, 1, 2]), (6, [1, 1, 2, 2])])
async def test_a_worker_is_given_no_more_samples_than_it_asks_for(kit: Any, most: int, counts: list[int]) -> None:
    """After single-sample tasks come larger ones, which count as what they are."""
    suites = [
        EvalSuite(name=f"s{n}", prompts=kit.prompts(2, "e"), workflow="w", sampling={"solver": Sampling()}, n_samples=n)
        for n in (1, 2)
    ]
    dataflow = kit.dataflow(suites=suites)
    await kit.start(dataflow, "w0", "w1")
    await dataflow.evaluate(EvaluateRequest(label="e", suites=("s1", "s2")))
    reply = await dataflow.lease(LeaseRequest(worker_id="w0", max_tasks=8, max_samples=most, wait_s=0.0))
    assert [task.n_samples for task in reply.tasks] == counts
    single = await dataflow.lease(LeaseRequest(worker_id="w1", max_tasks=8, max_samples=1, wait_s=0.0))
    assert [task.n_samples for task in single.tasks] == [4], "one task at least"


async def test_a_thousand_waiting_workers_share_what_room_there_is(kit: Any) -> None:
    """Whoever is granted something lets the next one look, so that all of the room is handed out at once."""
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=40, max_staleness=4)], real_time=True)
    names = [f"w{n}" for n in range(1000)]
    for name in names:
        await dataflow.register(Registration(worker_id=name, pool="main", capacity=8, policies=("solver",), pid=1))
    granted: dict[str, int] = {}
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def wait(name: str) -> None:
                reply = await dataflow.lease(LeaseRequest(worker_id=name, max_tasks=1, wait_s=60.0))
                granted[name] = len(reply.tasks)

            for name in names:
                tasks.start_soon(wait, name)
            await anyio.wait_all_tasks_blocked()
            await dataflow.control(Control(phase="running"))
            await anyio.wait_all_tasks_blocked()
            assert sum(granted.values()) == 5 * 40 // 4
            assert list(granted) == names[: len(granted)], "first come, first served"
            tasks.cancel_scope.cancel()


async def test_a_waiting_worker_that_is_cancelled_takes_no_work_with_it(kit: Any) -> None:
    dataflow = kit.dataflow([PolicyFeed(model_id="solver", batch_size=4, max_staleness=0)], real_time=True)
    await kit.start(dataflow, "w0", "w1")
    incarnation = await kit.attach(dataflow)
    (task,) = await kit.lease(dataflow, 9)
    waiting = []
    for name in ("w0", "w1"):
        request = LeaseRequest(worker_id=name, max_tasks=1, wait_s=60.0)
        waiting.append(asyncio.create_task(dataflow.lease(request)))
        await anyio.wait_all_tasks_blocked()
    await kit.mixed(dataflow, task)
    await kit.ask(dataflow, incarnation, 0)
    await anyio.wait_all_tasks_blocked()
    await kit.publish(dataflow, incarnation, 1)
    waiting[0].cancel()
    with anyio.fail_after(10):
        assert len((await waiting[1]).tasks) == 1
    assert waiting[0].cancelled()
