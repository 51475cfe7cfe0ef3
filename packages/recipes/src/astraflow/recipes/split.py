"""The same run as processes of their own over a Unix socket, supervised; and the driver of a run started by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
from rich.console import Console

from .config import AnyRun, trained
from .credentials import Credentials
from .driver import Driver, RunResult, stop_on_signal
from .recipe import Recipe
from .rundir import RunDirectory
from .serve import LOCAL, child_environment, join_dataflow, serve_commands
from .summary import Summary, summarise
from .supervisor import supervise
from .view import watch

MAX_RESTARTS = 5
MAX_LEAVE_S = 30.0
"""How long the workers have to leave by themselves when the run is finished."""


async def run_split(recipe: Recipe[AnyRun], config: AnyRun, run: RunDirectory, console: Console) -> Summary:
    """Start every service of the run, keep them running, drive the run and return its figures."""
    with tempfile.TemporaryDirectory(prefix="astraflow-") as sockets:
        address = f"unix:{sockets}/dataflow.sock"
        commands = serve_commands(trained(config), config.rollout.workers, run.path, address)
        async with supervise(run.logs, child_environment()) as supervisor:
            for name, argv in commands.items():
                supervisor.start(name, argv, max_restarts=MAX_RESTARTS)
            result = await drive(recipe, config, address, console, lambda: supervisor.wait_done("trainer-"))
            with anyio.move_on_after(MAX_LEAVE_S):
                await supervisor.wait_done("worker-")
    return summarise(recipe.name, config.seed, recipe.headlines, result, None)


async def drive(
    recipe: Recipe[AnyRun],
    config: AnyRun,
    address: str,
    console: Console,
    trainers_done: Callable[[], Awaitable[None]],
    credentials: Credentials = LOCAL,
) -> RunResult:
    """Drive the run of the dataflow at `address` through its phases and show it."""
    async with join_dataflow(address, credentials) as dataflow, anyio.create_task_group() as tasks:
        driver = Driver(dataflow, trained(config), recipe.suites if config.eval.problems else ())
        tasks.start_soon(stop_on_signal, driver, console)
        tasks.start_soon(watch, dataflow, lambda: driver.stage, config.steps, recipe.view_metrics, console)
        result = await driver.run(trainers_done)
        tasks.cancel_scope.cancel()
    return result


async def drive_by_hand(
    recipe: Recipe[AnyRun], config: AnyRun, address: str, console: Console, credentials: Credentials
) -> Summary:
    """Drive a run whose services somebody else started; they save and leave by themselves."""
    result = await drive(recipe, config, address, console, anyio.lowlevel.checkpoint, credentials)
    return summarise(recipe.name, config.seed, recipe.headlines, result, None)
