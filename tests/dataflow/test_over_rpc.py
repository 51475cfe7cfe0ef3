"""The service through the transport: nothing leans on shared objects, errors arrive as themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from astraflow.dataflow import (
    CommitRequest,
    Control,
    Dataflow,
    DataflowService,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    Fenced,
    Heartbeat,
    LeaseRequest,
    PolicyFeed,
    RunFailed,
    Sampling,
    StepReport,
    SubmitRequest,
    Trajectory,
    WatchRequest,
)
from astraflow.rpc import connect, serve, strict


@asynccontextmanager
async def reached(how: str, dataflow: Dataflow, directory: Path) -> AsyncIterator[DataflowService]:
    """The same service: every message through the codec, or over a Unix socket."""
    if how == "strict":
        yield strict(dataflow, DataflowService)
        return
    address = f"unix:{directory}/d.sock"
    async with serve(dataflow, DataflowService, address), connect(address, DataflowService) as proxy:
        yield proxy


@pytest.mark.parametrize("how", ["strict", "unix"])
async def test_a_whole_run(kit: Any, tmp_path: Path, how: str) -> None:
    suite = EvalSuite(name="s", prompts=kit.prompts(2, "e"), workflow="w", sampling={"solver": Sampling()})
    feed = PolicyFeed(model_id="solver", batch_size=4, steps=3)
    dataflow = kit.dataflow([feed], suites=[suite], real_time=True, max_dropped_batches=2)
    async with reached(how, dataflow, tmp_path) as service:
        with anyio.fail_after(10):
            await kit.start(service)
            incarnation = await kit.attach(service)
            assert (await service.watch(WatchRequest(wait_s=1.0))).versions[0].weights == "mem:x"
            await service.evaluate(EvaluateRequest(label="e", suites=("s",)))
            for version in range(3):
                async with anyio.create_task_group() as group:

                    async def work() -> None:
                        for _ in range(2):
                            request = LeaseRequest(worker_id="w0", max_tasks=3, wait_s=0.2)
                            for task in (await service.lease(request)).tasks:
                                await kit.mixed(service, task)

                    group.start_soon(work)
                    reply = await kit.ask(service, incarnation, version, wait_s=5.0)
                assert len(reply.batch.samples) == 4
                assert [s.sequence.tokens.numpy().tolist() for s in reply.batch.samples] == [[1, 2, 3, 4, 5, 6]] * 4
                await kit.publish(service, incarnation, version + 1)
                report = StepReport(
                    model_id="solver",
                    incarnation=incarnation,
                    version=version + 1,
                    batch_id=reply.batch.batch_id,
                    wait_s=0.1,
                    step_s=0.1,
                    metrics={"loss": 0.5},
                )
                await service.report(report)
                await service.commit(CommitRequest(model_id="solver", incarnation=incarnation, version=version + 1))
            assert (await kit.ask(service, incarnation, 3)).finished
            assert (await service.evaluation(EvaluationQuery(label="e"))).finished
            assert (await service.heartbeat(Heartbeat(worker_id="w0"))).known
            status = await service.status(Empty())
            assert status.policies[0].version == 3
            assert status.policies[0].metrics == {"loss": 0.5}
            await service.control(Control(phase="finished"))


@pytest.mark.parametrize("how", ["strict", "unix"])
async def test_declared_errors_arrive_as_themselves(kit: Any, tmp_path: Path, how: str) -> None:
    feed = PolicyFeed(model_id="solver", batch_size=4, steps=3)
    dataflow = kit.dataflow([feed], real_time=True, max_dropped_batches=1)
    async with reached(how, dataflow, tmp_path) as service:
        with anyio.fail_after(10):
            await kit.start(service)
            old = await kit.attach(service)
            new = await kit.attach(service)
            with pytest.raises(Fenced, match="2 is in charge"):
                await kit.ask(service, old, 0)
            (task,) = await kit.lease(service)
            failed = tuple(kit.result(task, i, Trajectory(status="failed", error="boom")) for i in range(4))
            await service.submit(SubmitRequest(results=failed))
            with pytest.raises(RunFailed, match="first error: boom"):
                await kit.ask(service, new, 0, wait_s=5.0)
