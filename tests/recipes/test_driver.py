from __future__ import annotations

import os
import signal

import anyio
import anyio.lowlevel
import pytest
from rich.console import Console

from astraflow.dataflow import Dataflow, DataflowConfig, Empty, ListSource, PolicyFeed, Prompt, Sampling
from astraflow.recipes.driver import Abandoned, Driver, stop_on_signal


async def test_stopped_while_models_load_the_run_ends_and_no_worker_is_called_for() -> None:
    config = DataflowConfig(
        policies=(PolicyFeed(model_id="solver", batch_size=4),),
        workflow="math",
        n_samples=4,
        sampling={"solver": Sampling()},
    )
    dataflow = Dataflow(config, ListSource([Prompt(id="p", source="sums", messages=())], seed=0))
    driver = Driver(dataflow, ["solver"], ["held-out"])
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def interrupt() -> None:
                await anyio.sleep(0.05)
                driver.stop()

            tasks.start_soon(interrupt)
            result = await driver.run(anyio.lowlevel.checkpoint)
    assert result.stopped
    assert not driver.published.is_set()  # a worker would load its models beside the trainers
    assert (await dataflow.status(Empty())).phase == "finished"


async def test_one_ctrl_c_that_arrives_twice_is_one_and_a_later_one_abandons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow.recipes.driver.SAME_SIGNAL_S", 0.2)
    config = DataflowConfig(
        policies=(PolicyFeed(model_id="solver", batch_size=4),),
        workflow="math",
        n_samples=4,
        sampling={"solver": Sampling()},
    )
    dataflow = Dataflow(config, ListSource([Prompt(id="p", source="sums", messages=())], seed=0))
    driver = Driver(dataflow, ["solver"], [])
    abandoned = False
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_on_signal, driver, Console(quiet=True))
            await anyio.sleep(0.05)
            for pause in (0.0, 0.05):
                await anyio.sleep(pause)
                os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep(0.1)
            assert driver.stopping
            await anyio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep(5)
    except* Abandoned:
        abandoned = True
    assert abandoned
