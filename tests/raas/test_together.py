"""The worker with the real dataflow and real weightsync, in one process and over a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from astraflow.dataflow import (
    AttachRequest,
    BatchRequest,
    Control,
    Dataflow,
    DataflowConfig,
    DataflowService,
    Empty,
    EvalSuite,
    EvaluateRequest,
    Evaluation,
    EvaluationQuery,
    ListSource,
    Message,
    PolicyFeed,
    PolicyVersion,
    Prompt,
    RolloutGroup,
    RolloutTask,
    Sampling,
    StepReport,
    TrainBatch,
)
from astraflow.raas import Outcome, PolicyHandle
from astraflow.rpc import connect, serve
from astraflow.weightsync import DirectoryStore, Publisher

SAMPLING = {"solver": Sampling(max_new_tokens=8)}
STEPS = 4


async def answer(task: RolloutTask, policies: Mapping[str, PolicyHandle]) -> Outcome:
    turn = await policies["solver"].chat(task.prompt.messages, role="solver")
    turn.reward = float(len(turn.text))
    return Outcome(metrics={"correct": float(len(turn.text) > 3)})


class Groups:
    """What the dataflow closed."""

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []

    def on_group(self, group: RolloutGroup, /) -> None:
        self.groups.append(group)

    def on_step(self, report: StepReport, /) -> None:
        pass

    def on_evaluation(self, evaluation: Evaluation, /) -> None:
        pass


def prompts(source: str, count: int) -> list[Prompt]:
    return [
        Prompt(id=f"{source}-{n}", source=source, messages=(Message("user", f"{n} + {n}"),), reference=str(2 * n))
        for n in range(count)
    ]


def make_dataflow(observer: Groups) -> Dataflow:
    return Dataflow(
        DataflowConfig(
            policies=(PolicyFeed(model_id="solver", batch_size=8, steps=STEPS),),
            workflow="answer",
            n_samples=4,
            sampling=SAMPLING,
            worker_silence_s=5.0,
            filters=(),
        ),
        ListSource(prompts("sums", 16), seed=0),
        [EvalSuite(name="held", prompts=tuple(prompts("held", 6)), workflow="answer", n_samples=1, sampling=SAMPLING)],
        observer=observer,
    )


async def train(dataflow: DataflowService, directory: Path) -> list[TrainBatch]:
    """A trainer without a model: publishes an array of its version's number for each batch."""
    attachment = await dataflow.attach(AttachRequest(model_id="solver"))
    store = DirectoryStore(directory)
    publisher = Publisher(store, stream="solver", incarnation=attachment.incarnation)
    batches: list[TrainBatch] = []
    for version in range(attachment.steps + 1):
        await publisher.publish({"w": np.full(8, version, dtype=np.float32)}, version)
        await dataflow.publish(
            PolicyVersion(model_id="solver", version=version, incarnation=attachment.incarnation, weights=store.url)
        )
        batch = None
        while batch is None and version < attachment.steps:
            asked = BatchRequest(model_id="solver", incarnation=attachment.incarnation, version=version, wait_s=1.0)
            batch = (await dataflow.next_batch(asked)).batch
        if batch is not None:
            batches.append(batch)
    return batches


@asynccontextmanager
async def reached(dataflow: Dataflow, directory: Path, how: str) -> AsyncIterator[DataflowService]:
    if how == "in process":
        yield dataflow
        return
    async with (
        serve(dataflow, DataflowService, f"unix:{directory}/d.sock") as server,
        connect(server.address, DataflowService) as proxy,
    ):
        yield proxy


@pytest.mark.parametrize("how", ["in process", "unix socket"])
async def test_a_run_from_prompts_to_batches_to_weights(kit: Any, tmp_path: Path, how: str) -> None:
    observer = Groups()
    dataflow = make_dataflow(observer)
    engine = kit.ScriptedEngine(token_s=0.001)
    with anyio.fail_after(30):
        async with reached(dataflow, tmp_path, how) as service, anyio.create_task_group() as tasks:
            tasks.start_soon(kit.make_worker(service, {"answer": answer}, {"solver": engine}).run)
            await service.control(Control(phase="running"))
            batches = await train(service, tmp_path / "weights")
            await service.evaluate(EvaluateRequest(label="end", suites=("held",)))
            evaluation = await service.evaluation(EvaluationQuery(label="end"))
            status = await service.status(Empty())
            await service.control(Control(phase="finished"))
    assert [len(batch.samples) for batch in batches] == [8] * STEPS
    sampled = [sample.sample_id for batch in batches for sample in batch.samples]
    assert len(set(sampled)) == 8 * STEPS
    assert all(sample.sequence.reward is not None for batch in batches for sample in batch.samples)
    assert evaluation.finished
    assert (evaluation.suites[0].done, evaluation.suites[0].missing) == (6, 0)
    assert engine.version == STEPS
    (worker,) = status.workers
    assert worker.alive
    assert engine.closed


async def test_a_dataflow_whose_socket_goes_away_loses_and_repeats_nothing(kit: Any, tmp_path: Path) -> None:
    observer = Groups()
    dataflow = make_dataflow(observer)
    engine = kit.ScriptedEngine(token_s=0.005)
    address = f"unix:{tmp_path}/d.sock"
    batches: list[TrainBatch] = []

    async def trainer() -> None:
        batches.extend(await train(dataflow, tmp_path / "weights"))

    async def work() -> None:
        async with connect(address, DataflowService) as proxy:
            await kit.make_worker(proxy, {"answer": answer}, {"solver": engine}).run()

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            await dataflow.control(Control(phase="running"))
            tasks.start_soon(trainer)
            tasks.start_soon(work)
            async with serve(dataflow, DataflowService, address, drain_timeout=0.1):
                while not observer.groups:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            away_at = len(observer.groups)
            await anyio.sleep(1.0)
            assert len(batches) < STEPS
            async with serve(dataflow, DataflowService, address, drain_timeout=0.1):
                while len(batches) < STEPS:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await dataflow.control(Control(phase="finished"))
                while not engine.closed:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
    assert len(observer.groups) > away_at
    assert {group.task.attempt for group in observer.groups} == {0}, "nothing had to be rolled out again"
    whole = [group for group in observer.groups if None not in group.trajectories]
    assert len(whole) >= 8
