from __future__ import annotations

import anyio
import anyio.lowlevel

from astraflow.dataflow import Dataflow, DataflowConfig, Empty, ListSource, PolicyFeed, Prompt, Sampling
from astraflow.recipes.driver import Driver


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
