"""The whole run in one process on one event loop; model arithmetic in threads.

Invariant: every task belongs to one task group, so a failure cancels the others and its cause surfaces alone; on the
first Ctrl-C what was learned is saved, on the second the run is cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import anyio
import anyio.to_thread
from rich.console import Console

from astraflow.dataflow import DataflowService
from astraflow.trainer import train
from astraflow.weightsync import MemoryStore

from .config import AnyRun, trained
from .driver import Driver, RunResult, stop_on_signal
from .lag import LagProbe
from .recipe import Recipe
from .rundir import RunDirectory, RunWriter
from .serve import prepare_torch
from .services import (
    build_dataflow,
    build_worker,
    journal_of,
    policy_spec,
    resolve_device,
    resolve_models,
    trainer_config,
)
from .summary import Summary, summarise
from .view import watch


async def run_in_process(recipe: Recipe[AnyRun], config: AnyRun, run: RunDirectory, console: Console) -> Summary:
    """Run to the end and return the figures; the run directory holds everything else."""
    await anyio.to_thread.run_sync(prepare_torch)
    device = resolve_device(config.device)
    models = await resolve_models(config)
    probe = LagProbe()
    with RunWriter(run).running() as writer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(probe.run)
            result = await run_services(recipe, config, run, models, device, writer, console)
            tasks.cancel_scope.cancel()
        lag = probe.summary()
        writer.metrics("loop", p50_ms=lag.p50_ms, p99_ms=lag.p99_ms, max_ms=lag.max_ms, probes=lag.probes)
    return summarise(recipe.name, config.seed, recipe.headlines, result, lag)


async def run_services(
    recipe: Recipe[AnyRun],
    config: AnyRun,
    run: RunDirectory,
    models: dict[str, Path],
    device: str,
    writer: RunWriter,
    console: Console,
    make_driver: Callable[[DataflowService, Iterable[str], Iterable[str]], Driver] = Driver,
) -> RunResult:
    """The services of a run and its driver, which takes it from start to end, or on from where its journal is.

    A run that is debugged keeps no journal: it is to do the same again from the start.
    """
    if config.debug:
        dataflow = await build_dataflow(recipe, config, writer)
        return await run_with(recipe, config, run, models, device, dataflow, console, make_driver)
    async with journal_of(run) as journal:
        dataflow = await build_dataflow(recipe, config, writer, journal)
        return await run_with(recipe, config, run, models, device, dataflow, console, make_driver)


async def run_with(
    recipe: Recipe[AnyRun],
    config: AnyRun,
    run: RunDirectory,
    models: dict[str, Path],
    device: str,
    dataflow: DataflowService,
    console: Console,
    make_driver: Callable[[DataflowService, Iterable[str], Iterable[str]], Driver],
) -> RunResult:
    driver = make_driver(dataflow, trained(config), recipe.suites if config.eval.problems else ())
    stores = {name: MemoryStore(f"{run.path.resolve()}/{name}") for name in trained(config)}
    training = set(stores)
    all_trained = anyio.Event()

    async def run_trainer(name: str) -> None:
        spec = policy_spec(config, run, name, models[name], device)
        await train(spec, trainer_config(config, name), dataflow, stores[name], export=run.policy(name))
        training.discard(name)
        if not training:
            all_trained.set()

    async def run_worker() -> None:
        # After the trainers: loading a model changes torch's defaults for the whole process while it goes on.
        await driver.published.wait()
        worker = await build_worker(recipe, config, dataflow, models, "worker-0", device)
        await worker.run()

    async def show() -> None:
        await watch(dataflow, lambda: driver.stage, config.steps, recipe.view_metrics, console, debug=config.debug)

    try:
        async with anyio.create_task_group() as services:
            if not config.debug:
                services.start_soon(stop_on_signal, driver, console)
            for name in stores:
                services.start_soon(run_trainer, name)
            services.start_soon(run_worker)
            services.start_soon(show)
            result = await driver.run(all_trained.wait)
            services.cancel_scope.cancel()
    finally:
        for store in stores.values():
            store.close()
    return result
