"""The worker against a scripted dataflow: leases, failures, time limits, draining, a dataflow that goes away."""

from __future__ import annotations

import collections
import gc
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from astraflow.dataflow import RolloutTask
from astraflow.raas import EngineError, EngineGone, Generation, Outcome, PolicyHandle, WorkerConfig, WorkerFailed
from astraflow.rpc import FrameTooLarge, Unavailable

Handles = Mapping[str, PolicyHandle]


async def answer(task: RolloutTask, policies: Handles) -> Outcome:
    turn = await policies["solver"].chat(task.prompt.messages, role="solver")
    turn.reward = float(len(turn.text) > 3)
    return Outcome(metrics={"length": len(turn.text)})


@asynccontextmanager
async def running(worker: Any, seconds: float = 20.0) -> AsyncIterator[None]:
    """The worker at work; drained at the end."""
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            yield
            worker.drain()


def ends(results: list[Any]) -> dict[tuple[str, int], str]:
    """(task, sample) -> status; each sample once."""
    found = {(r.task_id, r.sample_index): r.trajectory.status for r in results}
    assert len(found) == len(results)
    return found


async def test_every_sample_is_submitted_once_and_the_worker_leaves_when_told(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(10)])
    engine = kit.ScriptedEngine()
    worker = kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            await dataflow.until(40)
            dataflow.finished = True
    assert set(ends(dataflow.results).values()) == {"ok"}
    assert engine.started
    assert engine.closed
    (registration,) = dataflow.registrations
    assert (registration.worker_id, registration.capacity, registration.policies) == ("w0", 8, ("solver",))


async def test_the_capacity_bounds_what_runs_and_what_is_held(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(20)])
    engine = kit.ScriptedEngine(answer=lambda request: (97,) * 8, token_s=0.01)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine}, capacity=6)):
        await dataflow.until(40)
        held = max((len(beat.tasks) for beat in dataflow.heartbeats), default=0)
    assert engine.most_running == 6
    assert held <= 3


async def test_one_failing_sample_fails_alone(kit: Any) -> None:
    calls = 0

    async def sometimes(task: RolloutTask, policies: Handles) -> Outcome:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("boom")
        return await answer(task, policies)

    dataflow = kit.ListDataflow(tasks=[kit.make_task(), kit.make_task("sums/1")])
    async with running(kit.make_worker(dataflow, {"answer": sometimes}, {"solver": kit.ScriptedEngine()})):
        await dataflow.until(8)
    statuses = list(ends(dataflow.results).values())
    assert sorted(statuses) == ["failed"] + ["ok"] * 7
    (failed,) = [r.trajectory for r in dataflow.results if r.trajectory.status == "failed"]
    assert "RuntimeError: boom" in failed.error


async def test_a_hung_sample_times_out_and_the_worker_goes_on(kit: Any) -> None:
    async def hangs(task: RolloutTask, policies: Handles) -> Outcome:
        if task.task_id == "sums/0":
            await anyio.sleep_forever()
        return await answer(task, policies)

    dataflow = kit.ListDataflow(tasks=[kit.make_task(deadline_s=0.3), kit.make_task("sums/1")])
    worker = kit.make_worker(dataflow, {"answer": hangs}, {"solver": kit.ScriptedEngine()}, capacity=4)
    async with running(worker):
        await dataflow.until(8)
    found = ends(dataflow.results)
    assert [found["sums/0", n] for n in range(4)] == ["timed_out"] * 4
    assert [found["sums/1", n] for n in range(4)] == ["ok"] * 4
    assert all(r.seconds < 0.3 for r in dataflow.results if r.task_id == "sums/0")


async def test_samples_that_never_got_a_place_time_out_too(kit: Any) -> None:
    async def hangs(task: RolloutTask, policies: Handles) -> Outcome:
        await anyio.sleep_forever()
        raise AssertionError

    dataflow = kit.ListDataflow(tasks=[kit.make_task(deadline_s=0.2, n_samples=5)])
    async with running(kit.make_worker(dataflow, {"answer": hangs}, {"solver": kit.ScriptedEngine()}, capacity=2)):
        await dataflow.until(5)
    errors = [r.trajectory.error for r in dataflow.results]
    assert sum("not done in time" in e for e in errors) == 2
    assert sum("not begun in time" in e for e in errors) == 3


async def test_nothing_but_failures_ends_the_worker_with_the_cause(kit: Any) -> None:
    async def broken(task: RolloutTask, policies: Handles) -> Outcome:
        raise RuntimeError("no judge")

    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(99)])
    engine = kit.ScriptedEngine()
    worker = kit.make_worker(dataflow, {"answer": broken}, {"solver": engine}, max_failures=20)
    with anyio.fail_after(10), pytest.raises(WorkerFailed, match=r"20 samples in a row failed.*RuntimeError: no judge"):
        await worker.run()
    assert engine.closed


async def test_in_debug_mode_samples_run_one_by_one_and_the_one_cause_surfaces(kit: Any) -> None:
    order: list[tuple[str, int]] = []

    async def watched(task: RolloutTask, policies: Handles) -> Outcome:
        order.append((task.task_id, len(order)))
        outcome = await answer(task, policies)
        if len(order) == 6:
            raise KeyError("what is wrong")
        return outcome

    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(4)])
    engine = kit.ScriptedEngine(token_s=0.001)
    worker = kit.make_worker(dataflow, {"answer": watched}, {"solver": engine}, one_at_a_time=True, reraise=True)
    with anyio.fail_after(10), pytest.raises(KeyError) as caught:
        await worker.run()
    assert engine.most_running == 1
    assert [task_id for task_id, _ in order] == ["sums/0"] * 4 + ["sums/1"] * 2
    assert any("task 'sums/1', sample 1" in note for note in caught.value.__notes__)
    assert engine.closed


async def test_cancelled_tasks_stop_and_the_others_go_on(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task("long")])
    engine = kit.ScriptedEngine(token_s=0.02)

    async def loops(task: RolloutTask, policies: Handles) -> Outcome:
        while task.task_id == "long":
            await policies["solver"].chat(task.prompt.messages)
        return await answer(task, policies)

    async with running(kit.make_worker(dataflow, {"answer": loops}, {"solver": engine}, capacity=4)):
        while not any("long" in beat.tasks for beat in dataflow.heartbeats):  # noqa: ASYNC110
            await anyio.sleep(0.01)
        dataflow.tasks.append(kit.make_task("short"))
        await anyio.sleep(0.1)
        assert not dataflow.results
        dataflow.cancel = ("long",)
        await dataflow.until(4)
    assert {task_id for task_id, _ in ends(dataflow.results)} == {"short"}
    assert engine.aborted == 4


async def test_draining_finishes_what_runs_and_leases_no_more(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(50)])
    engine = kit.ScriptedEngine(token_s=0.01)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(1)
    begun = {r.task_id for r in dataflow.results}
    assert len(ends(dataflow.results)) == 4 * len(begun)
    assert len(dataflow.tasks) == 50 - len(begun)
    assert dataflow.heartbeats[-1].tasks == ()
    assert engine.closed


async def test_draining_drops_what_does_not_finish(kit: Any) -> None:
    async def hangs(task: RolloutTask, policies: Handles) -> Outcome:
        await anyio.sleep_forever()
        raise AssertionError

    dataflow = kit.ListDataflow(tasks=[kit.make_task()])
    begun = time.monotonic()
    worker = kit.make_worker(dataflow, {"answer": hangs}, {"solver": kit.ScriptedEngine()}, drain_s=0.2)
    async with running(worker):
        while not any(beat.tasks for beat in dataflow.heartbeats):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert dataflow.results == []
    assert time.monotonic() - begun < 5
    assert (dataflow.heartbeats[-1].tasks, dataflow.heartbeats[-1].leaving) == ((), True)


async def test_a_dataflow_away_for_a_while_gets_every_result_once(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(30)])
    engine = kit.ScriptedEngine(token_s=0.001)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(8)
        dataflow.away = True
        await anyio.sleep(1.5)
        held = len(dataflow.results)
        made = engine.generated
        await anyio.sleep(0.3)
        assert engine.generated == made, "a worker that cannot submit must not go on for ever"
        dataflow.away, dataflow.known = False, False
        await dataflow.until(120)
        while len(dataflow.registrations) < 2:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert held < 120
    assert set(ends(dataflow.results).values()) == {"ok"}
    assert max(dataflow.submits) > 1, "results that waited together go together"


async def test_a_dataflow_away_for_too_long_ends_the_worker(kit: Any) -> None:
    dataflow = kit.ListDataflow(away=True)
    engine = kit.ScriptedEngine()
    worker = kit.make_worker(dataflow, {"answer": answer}, {"solver": engine}, patience_s=0.2)
    with anyio.fail_after(5), pytest.raises(Unavailable) as caught:
        await worker.run()
    assert "giving up" in caught.value.__notes__[0]
    assert engine.closed


async def test_a_result_that_is_too_large_fails_alone(kit: Any) -> None:
    class Narrow(kit.ListDataflow):  # type: ignore[misc]
        async def submit(self, request: Any, /) -> Any:
            sequences = [s for r in request.results for s in r.trajectory.sequences]
            if any(s.tokens.numpy().size > 40 for s in sequences):
                raise FrameTooLarge("more than the limit")
            return await super().submit(request)

    def answers(request: Any) -> tuple[int, ...]:
        return (97,) * (60 if request.request_id.startswith("sums/0/0/1/") else 2)

    dataflow = Narrow(tasks=[kit.make_task()])
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": kit.ScriptedEngine(answer=answers)})):
        await dataflow.until(4)
    found = ends(dataflow.results)
    assert [found["sums/0", n] for n in range(4)] == ["ok", "failed", "ok", "ok"]


async def test_an_engine_that_does_not_start_is_the_cause_and_all_are_closed(kit: Any) -> None:
    class Broken(kit.ScriptedEngine):  # type: ignore[misc]
        async def start(self) -> None:
            raise EngineError("no such model")

    engines = {"solver": kit.ScriptedEngine(), "verifier": Broken()}
    worker = kit.make_worker(kit.ListDataflow(), {"answer": answer}, engines)
    with anyio.fail_after(5), pytest.raises(EngineError, match="no such model"):
        await worker.run()
    assert all(engine.closed for engine in engines.values())


async def test_cancelling_the_worker_closes_the_engines(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task()])
    engine = kit.ScriptedEngine(token_s=3600)
    with anyio.move_on_after(0.3) as scope:
        await kit.make_worker(dataflow, {"answer": answer}, {"solver": engine}).run()
    assert scope.cancelled_caught
    assert engine.closed
    assert engine.running == 0


async def test_a_task_that_comes_back_is_run_again(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(), kit.make_task(attempt=1)])
    engine = kit.ScriptedEngine(token_s=0.005)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(8)
    assert collections.Counter(r.attempt for r in dataflow.results) == {0: 4, 1: 4}


async def test_heartbeats_tell_what_was_generated(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(6)])
    engine = kit.ScriptedEngine(token_s=0.01)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(24)
    stats = [beat.stats for beat in dataflow.heartbeats]
    assert sum(s.generated_tokens for s in stats) == engine.generated
    assert max(s.running for s in stats) > 0
    assert all(s.seconds > 0 for s in stats)
    assert stats[-1].versions == {"solver": 0}


async def test_a_thousand_rollouts_queue_and_the_loop_stays_responsive(kit: Any) -> None:
    class Stepping(kit.ScriptedEngine):  # type: ignore[misc]
        """Answers at the next of its steps, all that wait together, as one that runs a batch does."""

        async def generate(self, request: Any, /) -> Any:
            self.running += 1
            most.append(self.running)
            await anyio.sleep(0.1 - anyio.current_time() % 0.1)
            self.running -= 1
            return Generation(tokens=(97,) * 8, logprobs=(-1.0,) * 8, versions=(0,) * 8, finish_reason="length")

    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}", n_samples=200) for n in range(5)])
    engine = Stepping()
    most: list[int] = []
    lags: list[float] = []

    async def probe() -> None:
        """Lag by the loop's own doing: while other processes hold the cores, the thread's clock stands still."""
        while True:
            begun = time.perf_counter(), time.thread_time()
            await anyio.sleep(0.01)
            lags.append(min(time.perf_counter() - begun[0], time.thread_time() - begun[1]) - 0.01)

    worker = kit.make_worker(dataflow, {"answer": answer}, {"solver": engine}, capacity=100)
    # What other tests imported would be walked by the garbage collector, in some tenths of a second.
    gc.collect()
    gc.freeze()
    async with running(worker, 60), anyio.create_task_group() as tasks:
        tasks.start_soon(probe)
        await dataflow.until(1000, timeout_s=50)
        tasks.cancel_scope.cancel()
    gc.unfreeze()
    assert set(ends(dataflow.results).values()) == {"ok"}
    assert max(most) == 100
    assert max(dataflow.submits) <= 64
    assert sorted(lags)[int(0.99 * len(lags))] < 0.05


def test_an_impossible_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity is 0"):
        WorkerConfig(worker_id="w", capacity=0)
    with pytest.raises(ValueError, match="drain_s is -1"):
        WorkerConfig(worker_id="w", drain_s=-1)


async def test_an_engine_that_died_ends_the_worker_at_once(kit: Any) -> None:
    class Dying(kit.ScriptedEngine):  # type: ignore[misc]
        async def generate(self, request: Any, /) -> Generation:
            raise EngineGone("its thread died")

    dataflow = kit.ListDataflow(tasks=[kit.make_task(f"sums/{n}") for n in range(99)])
    engine = Dying()
    worker = kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})
    with anyio.fail_after(10), pytest.raises(EngineGone, match="its thread died"):
        await worker.run()
    assert engine.closed
    assert not dataflow.results


async def test_samples_that_an_earlier_attempt_brought_in_do_not_run_again(kit: Any) -> None:
    dataflow = kit.ListDataflow(tasks=[kit.make_task("again", attempt=1, done=(0, 2)), kit.make_task("new")])
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": kit.ScriptedEngine()})):
        await dataflow.until(6)
    ran = {(r.task_id, r.sample_index) for r in dataflow.results}
    assert ran == {("again", 1), ("again", 3), *(("new", index) for index in range(4))}


async def test_a_long_answer_goes_on_as_long_as_tokens_come(kit: Any) -> None:
    """Twice as long as its deadline: it ends all the same, and the heartbeats say how far it is."""
    dataflow = kit.ListDataflow(tasks=[kit.make_task(n_samples=2, deadline_s=1.0)])
    engine = kit.ScriptedEngine(answer=lambda request: (97,) * 100, token_s=0.02)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(2)
    assert set(ends(dataflow.results).values()) == {"ok"}
    assert [result.tokens for result in dataflow.results] == [100, 100]
    assert max(result.seconds for result in dataflow.results) > 1.5
    told = [progress for beat in dataflow.heartbeats for progress in beat.progress if progress.tokens]
    assert {progress.task_id for progress in told} == {"sums/0"}
    assert [progress.tokens for progress in told] == sorted(progress.tokens for progress in told)
    assert told[-1].began == {"solver": 0}


async def test_a_rollout_without_end_is_ended_by_its_limit_and_its_length_is_told(kit: Any) -> None:
    async def endless(task: RolloutTask, policies: Handles) -> Outcome:
        while True:
            await answer(task, policies)

    dataflow = kit.ListDataflow(tasks=[kit.make_task(n_samples=1, deadline_s=0.4, limit_s=0.8)])
    engine = kit.ScriptedEngine(answer=lambda request: (97,) * 4, token_s=0.01)
    async with running(kit.make_worker(dataflow, {"answer": endless}, {"solver": engine})):
        await dataflow.until(1)
    (result,) = dataflow.results
    assert result.trajectory.status == "timed_out"
    assert result.tokens >= 10
    assert 0.4 < result.seconds < 0.8


async def test_a_worker_asks_for_no_more_samples_than_it_has_places(kit: Any) -> None:
    """After a task of one sample it may not ask for as many groups of four."""
    tasks = [kit.make_task("eval/0", n_samples=1), *(kit.make_task(f"sums/{n}") for n in range(9))]
    dataflow = kit.ListDataflow(tasks=tasks)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": kit.ScriptedEngine(token_s=0.02)})):
        await dataflow.until(37)
    held = [len(beat.tasks) for beat in dataflow.heartbeats]
    assert max(held) <= 3, "two groups fill it, a third may start when one place is left"
