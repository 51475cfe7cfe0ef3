"""When the services leave: the dataflow after everybody else, a trainer never before the run is finished."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import astraflow.trainer
from astraflow.dataflow import (
    Control,
    Dataflow,
    DataflowConfig,
    DataflowService,
    Empty,
    ListSource,
    PolicyFeed,
    Prompt,
    Sampling,
)
from astraflow.recipes import serve as services
from astraflow.recipes.config import PolicyConfig
from astraflow.recipes.rundir import RunDirectory
from astraflow.rpc import connect, serve
from astraflow.trainer import TrainerConfig


def make_dataflow() -> Dataflow:
    config = DataflowConfig(
        policies=(PolicyFeed(model_id="solver", batch_size=4),),
        workflow="math",
        n_samples=4,
        sampling={"solver": Sampling()},
    )
    return Dataflow(config, ListSource([Prompt(id="p", source="sums", messages=())], seed=0))


async def test_a_finished_dataflow_stays_for_whoever_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "LINGER_S", 0.2)
    monkeypatch.setattr(services, "LOOK_S", 0.02)
    dataflow = make_dataflow()
    with anyio.fail_after(20):
        async with (
            serve(dataflow, DataflowService, f"unix:{tmp_path}/socket") as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(services.leave_when_finished, dataflow, server, tasks.cancel_scope)
            async with connect(server.address, DataflowService) as trainer:
                await trainer.control(Control(phase="finished"))
                await anyio.sleep(0.6)
                assert (await trainer.status(Empty())).phase == "finished"
            await anyio.sleep(10)
    assert tasks.cancel_scope.cancel_called


async def test_a_trainer_that_is_told_to_leave_early_fails_so_that_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = anyio.Event()

    async def train(*_: object, **__: object) -> None:
        begun.set()
        await anyio.sleep_forever()

    async def resolve_models(_: object) -> dict[str, Path]:
        return {"solver": tmp_path}

    monkeypatch.setattr(astraflow.trainer, "train", train)
    monkeypatch.setattr(services, "resolve_models", resolve_models)
    monkeypatch.setattr(services, "prepare_torch", lambda: None)
    monkeypatch.setattr(services, "resolve_device", lambda _: "cpu")
    monkeypatch.setattr(services, "policy_spec", lambda *_: None)
    policies = {"solver": PolicyConfig()}
    config: Any = SimpleNamespace(policies=policies, device="cpu", trainer=TrainerConfig())
    recipe: Any = None
    run = RunDirectory(tmp_path)

    async def send_signal() -> None:
        await begun.wait()
        await anyio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    address = f"unix:{tmp_path}/socket"
    with anyio.fail_after(20):
        async with serve(make_dataflow(), DataflowService, address), anyio.create_task_group() as tasks:
            tasks.start_soon(send_signal)
            with pytest.raises(services.Terminated, match="trainer of solver"):
                await services.serve_trainer(recipe, config, run, address, "solver")
