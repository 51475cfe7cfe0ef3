"""Weights reach the engines while they serve: full, then delta; a broken pull leaves the old ones serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anyio
import numpy as np
import pytest

from astraflow.dataflow import PolicyVersion, RolloutTask
from astraflow.raas import Outcome, PolicyHandle
from astraflow.weightsync import MemoryStore, Publisher

Handles = Mapping[str, PolicyHandle]


async def answer(task: RolloutTask, policies: Handles) -> Outcome:
    for handle in policies.values():
        turn = await handle.chat(task.prompt.messages)
        turn.reward = 1.0
    return Outcome()


class Policy:
    """One policy's stream: publishes an array of its version's number."""

    def __init__(self, name: str, dataflow: Any) -> None:
        self.name = name
        self.store = MemoryStore(f"test-{name}")
        self._dataflow = dataflow
        self._publisher = Publisher(self.store, stream=name, incarnation=1)

    async def publish(self, version: int) -> None:
        await self._publisher.publish({"w": np.full(8, version, dtype=np.float32)}, version)
        self.announce(version)

    def announce(self, version: int) -> None:
        others = [known for known in self._dataflow.policies if known.model_id != self.name]
        named = PolicyVersion(model_id=self.name, version=version, incarnation=1, weights=self.store.url)
        self._dataflow.policies = [*others, named]


@pytest.fixture
def dataflow(kit: Any) -> Any:
    return kit.ListDataflow()


@pytest.fixture
def solver(dataflow: Any) -> Iterator[Policy]:
    policy = Policy("solver", dataflow)
    yield policy
    policy.store.close()


@asynccontextmanager
async def running(worker: Any, seconds: float = 20.0) -> AsyncIterator[None]:
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(worker.run)
            yield
            worker.drain()


async def serves(engine: Any, version: int) -> None:
    with anyio.fail_after(5):
        while engine.version != version:  # noqa: ASYNC110
            await anyio.sleep(0.005)
    assert engine.sink().values.tolist() == [float(version)] * 8


async def test_published_weights_are_there_before_the_first_lease(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(3)
    engine = kit.ScriptedEngine()
    dataflow.tasks = [kit.make_task()]
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(4)
    versions = {v for r in dataflow.results for s in r.trajectory.sequences for v in s.versions.numpy().tolist()}
    assert versions == {-1, 3}


async def test_running_generations_go_on_with_the_new_weights(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(0)
    engine = kit.ScriptedEngine(answer=lambda request: (97,) * 8, token_s=0.05)
    dataflow.tasks = [kit.make_task()]
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        with anyio.fail_after(5):
            while engine.generated < 8:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        await solver.publish(1)
        await serves(engine, 1)
        await dataflow.until(4)
    for result in dataflow.results:
        (sequence,) = result.trajectory.sequences
        sampled = sequence.versions.numpy()[sequence.loss_mask.numpy()].tolist()
        assert sampled == sorted(sampled)
        assert set(sampled) == {0, 1}
        assert len(sampled) == 8
    full = sum(beat.stats.pulled_full_bytes for beat in dataflow.heartbeats)
    delta = sum(beat.stats.pulled_delta_bytes for beat in dataflow.heartbeats)
    assert full > 0
    assert delta > 0
    assert dataflow.heartbeats[-1].stats.versions == {"solver": 1}
    assert sum(beat.stats.swap_pause_s for beat in dataflow.heartbeats) > 0


async def test_a_corrupt_version_leaves_the_old_weights_serving(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(0)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 0)
        await solver._publisher.publish({"w": np.full(8, 1, dtype=np.float32)}, 1)
        (payload,) = [key for key in solver.store.list("") if "/1/" in key and "manifest" not in key]
        good = bytes(solver.store.read(payload))
        solver.store.put(payload, [bytes([good[0] ^ 255]) + good[1:]])
        solver.announce(1)
        await anyio.sleep(0.3)
        assert engine.version == 0
        dataflow.tasks = [kit.make_task()]
        await dataflow.until(4)
        assert {r.trajectory.status for r in dataflow.results} == {"ok"}
        solver.store.put(payload, [good])
        await serves(engine, 1)


async def test_a_commit_that_fails_is_tried_again(kit: Any, dataflow: Any, solver: Policy) -> None:
    class Sticky(kit.ScriptedEngine):  # type: ignore[misc]
        tries = 0

        async def swap(self, commit: Any, version: int, /) -> float:
            self.tries += 1
            if self.tries == 1:
                raise OSError("device busy")
            return float(await super().swap(commit, version))

    await solver.publish(2)
    engine = Sticky()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 2)
    assert engine.tries == 2


async def test_updates_keep_their_minimum_interval(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(0)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine}, min_update_s=0.2)):
        for version in range(1, 12):
            await solver.publish(version)
            await anyio.sleep(0.03)
        await serves(engine, 11)
    times = [when for when, _ in engine.swaps[1:]]
    assert len(times) >= 2
    assert all(after - before >= 0.2 for before, after in pairwise(times))


async def test_a_stalled_pull_of_one_policy_does_not_hold_up_another(
    kit: Any, dataflow: Any, solver: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = Policy("verifier", dataflow)
    engines = {"solver": kit.ScriptedEngine(), "verifier": kit.ScriptedEngine()}
    held = anyio.Event()

    async def stuck(commit: Any, version: int, /) -> float:
        await held.wait()
        raise OSError("gave up")

    try:
        async with running(kit.make_worker(dataflow, {"answer": answer}, engines)):
            monkeypatch.setattr(engines["verifier"], "swap", stuck)
            await verifier.publish(1)
            for version in range(1, 4):
                await solver.publish(version)
                await serves(engines["solver"], version)
            held.set()
        assert engines["verifier"].version == 0
    finally:
        verifier.store.close()


async def test_a_task_waits_for_its_minimum_versions(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(0)
    engine = kit.ScriptedEngine()
    dataflow.tasks = [kit.make_task("later", min_versions={"solver": 2}), kit.make_task("now")]
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(4)
        assert {r.task_id for r in dataflow.results} == {"now"}
        await solver.publish(1)
        await serves(engine, 1)
        await anyio.sleep(0.05)
        assert len(dataflow.results) == 4
        await solver.publish(2)
        await dataflow.until(8)
    later = [s for r in dataflow.results if r.task_id == "later" for s in r.trajectory.sequences]
    assert {s.oldest_version for s in later} == {2}


async def test_a_version_that_never_comes_times_out(kit: Any, dataflow: Any, solver: Policy) -> None:
    dataflow.tasks = [kit.make_task(min_versions={"solver": 2}, deadline_s=0.2)]
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": kit.ScriptedEngine()})):
        await dataflow.until(4)
    assert {r.trajectory.status for r in dataflow.results} == {"timed_out"}
    assert "wanted {'solver': 2}" in dataflow.results[0].trajectory.error


async def test_a_trainer_that_went_back_is_followed(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(5)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 5)
        publisher = Publisher(solver.store, stream="solver", incarnation=2)
        await publisher.publish({"w": np.full(8, 3, dtype=np.float32)}, 3)
        dataflow.policies = [
            PolicyVersion(model_id="solver", version=3, incarnation=2, weights=solver.store.url),
        ]
        await serves(engine, 3)


async def test_weights_of_a_trainer_that_was_replaced_do_not_count_for_a_minimum(
    kit: Any, dataflow: Any, solver: Policy
) -> None:
    await solver.publish(5)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 5)
        # Announced but not to be had yet, so that the engine stays at the abandoned version.
        dataflow.policies = [PolicyVersion(model_id="solver", version=3, incarnation=2, weights=solver.store.url)]
        await anyio.sleep(0.1)
        dataflow.tasks = [kit.make_task(min_versions={"solver": 3})]
        await anyio.sleep(0.2)
        assert not dataflow.results
        publisher = Publisher(solver.store, stream="solver", incarnation=2)
        await publisher.publish({"w": np.full(8, 3, dtype=np.float32)}, 3)
        await dataflow.until(4)
    assert {s.oldest_version for r in dataflow.results for s in r.trajectory.sequences} == {3}


async def test_a_result_says_whose_weights_it_began_with(kit: Any, dataflow: Any, solver: Policy) -> None:
    await solver.publish(5)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 5)
        # The trainer went back, but its weights are not to be had yet.
        dataflow.policies = [PolicyVersion(model_id="solver", version=3, incarnation=2, weights=solver.store.url)]
        dataflow.tasks = [kit.make_task("before")]
        await dataflow.until(4)
        publisher = Publisher(solver.store, stream="solver", incarnation=2)
        await publisher.publish({"w": np.full(8, 3, dtype=np.float32)}, 3)
        await serves(engine, 3)
        dataflow.tasks = [kit.make_task("after")]
        await dataflow.until(8)
    of = {result.task_id: result.incarnations for result in dataflow.results}
    assert of == {"before": {"solver": 1}, "after": {"solver": 2}}


def pinned(solver: Policy, version: int) -> tuple[PolicyVersion, ...]:
    return (PolicyVersion(model_id="solver", version=version, incarnation=1, weights=solver.store.url),)


async def test_an_evaluation_is_sampled_by_exactly_the_version_it_is_pinned_to(
    kit: Any, dataflow: Any, solver: Policy
) -> None:
    """The worker goes back to it, stays there while newer ones are published, and then follows them again."""
    for version in range(4):
        await solver.publish(version)
    engine = kit.ScriptedEngine(token_s=0.02)
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 3)
        tasks = [kit.make_task(f"eval/{n}", purpose="eval", pinned=pinned(solver, 2)) for n in range(4)]
        dataflow.tasks = tasks[:2]
        await serves(engine, 2)
        await solver.publish(4)
        await dataflow.until(8)
        dataflow.tasks = tasks[2:]
        await dataflow.until(16)
        await serves(engine, 4)
    sequences = [s for result in dataflow.results for s in result.trajectory.sequences]
    assert {s.version_range for s in sequences} == {(2, 2)}


async def test_a_pinned_version_that_is_gone_is_declined(kit: Any, dataflow: Any, solver: Policy) -> None:
    for version in range(40):
        await solver.publish(version)
    engine = kit.ScriptedEngine()
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await serves(engine, 39)
        dataflow.tasks = [kit.make_task("eval/0", purpose="eval", pinned=pinned(solver, 1)), kit.make_task("now")]
        await dataflow.until(4)
        with anyio.fail_after(10):
            while not any(beat.declined for beat in dataflow.heartbeats):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        await anyio.sleep(0.2)
    assert {r.task_id for r in dataflow.results} == {"now"}
    assert [beat.declined for beat in dataflow.heartbeats if beat.declined] == [("eval/0",)]
    assert dataflow.heartbeats[-1].tasks == ()


async def test_a_second_vector_of_versions_is_declined(kit: Any, dataflow: Any, solver: Policy) -> None:
    for version in range(4):
        await solver.publish(version)
    engine = kit.ScriptedEngine(token_s=0.03)
    dataflow.tasks = [
        kit.make_task(f"eval/{version}", purpose="eval", pinned=pinned(solver, version)) for version in (2, 3)
    ]
    async with running(kit.make_worker(dataflow, {"answer": answer}, {"solver": engine})):
        await dataflow.until(4)
    assert {r.task_id for r in dataflow.results} == {"eval/2"}
    assert ("eval/3",) in [beat.declined for beat in dataflow.heartbeats]
