"""One service of a run in this process, over the network interface: what --split starts and `recipes serve` types.

Invariant: a service takes everything from the run directory's configuration, so all services of a run agree; it leaves
by itself when the dataflow says the run is finished, and drains on SIGTERM. A trainer or dataflow that was made to
leave before that fails, so that a supervisor knows it is still needed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.to_thread

from astraflow.dataflow import DataflowService, Empty
from astraflow.raas import Worker
from astraflow.rpc import Server, connect, serve
from astraflow.weightsync import DirectoryStore

from .config import AnyRun, ConfigError, trained
from .credentials import Credentials
from .lag import LagProbe
from .logs import quiet_transformers
from .recipe import Recipe
from .rundir import RunDirectory, RunWriter
from .services import (
    build_dataflow,
    build_worker,
    journal_of,
    policy_spec,
    resolve_device,
    resolve_models,
    trainer_config,
)

PR_SET_PDEATHSIG = 1
SUPERVISOR = "ASTRAFLOW_SUPERVISOR"
JOIN_S = 60.0
"""How long a service looks for the dataflow before it gives up."""

LINGER_S = 20.0
"""How long a finished dataflow waits for somebody to come back, once nobody is connected."""

LOOK_S = 1.0
LAG_EVERY_S = 10.0


LOCAL = Credentials()


class Terminated(Exception):
    """A signal ended a service before the run was finished."""


async def serve_dataflow(
    recipe: Recipe[AnyRun], config: AnyRun, run: RunDirectory, listen: str, credentials: Credentials = LOCAL
) -> None:
    """Serve the dataflow at `listen` until the run is finished and everybody has left, or until SIGTERM. It goes on
    from the run's journal.

    Raises:
        Terminated: SIGTERM came before the run was finished; all were sent home.
        ConfigError: the journal cannot be used.
        RunFailed: it cannot be written any more.
    """
    early = False
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(RunWriter(run).running())
        journal = await stack.enter_async_context(journal_of(run))
        dataflow = await build_dataflow(recipe, config, writer, journal)
        async with (
            serve(dataflow, DataflowService, listen, tls=credentials.tls, token=credentials.token) as server,
            anyio.create_task_group() as tasks,
        ):
            print(f"dataflow at {server.address}", flush=True)
            tasks.start_soon(record_lag, writer)
            tasks.start_soon(leave_when_finished, dataflow, server, tasks.cancel_scope)
            await terminated()
            early = (await dataflow.status(Empty())).phase != "finished"
            dataflow.suspend()
            tasks.cancel_scope.cancel()
    if early:
        raise Terminated("the dataflow was made to leave before the run was finished")


async def record_lag(writer: RunWriter) -> None:
    probe = LagProbe()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probe.run)
        while True:
            await anyio.sleep(LAG_EVERY_S)
            lag = probe.summary()
            writer.metrics("loop", p50_ms=lag.p50_ms, p99_ms=lag.p99_ms, max_ms=lag.max_ms, probes=lag.probes)


async def leave_when_finished(dataflow: DataflowService, server: Server, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the run is finished and nobody was connected for `LINGER_S`: trainers may save for long."""
    alone_since = anyio.current_time()
    while anyio.current_time() - alone_since < LINGER_S:
        await anyio.sleep(LOOK_S)
        status = await dataflow.status(Empty())
        if status.phase != "finished" or server.connections:
            alone_since = anyio.current_time()
    scope.cancel()


async def serve_raas(
    recipe: Recipe[AnyRun], config: AnyRun, join: str, worker_id: str, credentials: Credentials = LOCAL
) -> None:
    """Join the dataflow at `join` as a rollout worker until the run is finished; SIGTERM drains."""
    await anyio.to_thread.run_sync(prepare_torch)
    device = resolve_device(config.device)
    models = await resolve_models(config)
    async with join_dataflow(join, credentials) as dataflow:
        worker = await build_worker(recipe, config, dataflow, models, worker_id, device)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain_on_signal, worker)
            await worker.run()
            tasks.cancel_scope.cancel()


def join_dataflow(address: str, credentials: Credentials) -> AbstractAsyncContextManager[DataflowService]:
    """A connection to the dataflow of a run."""
    return connect(address, DataflowService, tls=credentials.tls, token=credentials.token, connect_timeout=JOIN_S)


async def drain_on_signal(worker: Worker) -> None:
    await terminated()
    worker.drain()


async def serve_trainer(
    recipe: Recipe[AnyRun],
    config: AnyRun,
    run: RunDirectory,
    join: str,
    policy: str,
    credentials: Credentials = LOCAL,
) -> None:
    """Train one policy for the dataflow at `join` until its steps are done; SIGTERM saves a checkpoint and leaves.

    Raises:
        Terminated: SIGTERM came before the run was finished.
    """
    from astraflow.trainer import follow, train, world

    if policy not in trained(config):
        raise ConfigError(f"--policy {policy}: this run trains {', '.join(trained(config))}")
    rank, size = world()
    if size == 1 and config.trainer.processes > 1:
        become_torchrun(config.trainer.processes)
    await anyio.to_thread.run_sync(prepare_torch)
    device = resolve_device(config.device)
    models = await resolve_models(config)
    store = DirectoryStore(run.weights(policy))
    spec = policy_spec(config, run, policy, models[policy], device)
    if rank:
        leave_with_rank_0()
        await follow(spec, trainer_config(config, policy), store)
        return
    async with join_dataflow(join, credentials) as dataflow, anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_on_signal, tasks.cancel_scope)
        await train(spec, trainer_config(config, policy), dataflow, store, export=run.policy(policy))
        tasks.cancel_scope.cancel()
        return
    raise Terminated(f"the trainer of {policy} was made to leave before the run was finished; it saved a checkpoint")


def become_torchrun(processes: int) -> NoReturn:
    """Turn this process into torchrun for as many of itself; they die with it, as it does with its supervisor."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *torchrun, "-m", "--", "astraflow.recipes", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, SUPERVISOR: str(os.getpid())})


def leave_with_rank_0() -> None:
    """torchrun tells every rank to go; saving a checkpoint takes them all, so only rank 0 listens."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


async def cancel_on_signal(scope: anyio.CancelScope) -> None:
    await terminated()
    scope.cancel()


async def terminated() -> None:
    """Wait for SIGTERM or SIGINT."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


def prepare_torch() -> None:
    """One torch thread per service: several share the cores, and two threads on loaded cores are slower than one."""
    import torch

    torch.set_num_threads(1)
    quiet_transformers()


def serve_commands(policies: list[str], workers: int, run: Path, address: str) -> dict[str, list[str]]:
    """The commands, by service name, that make up a run: what --split starts and --print-commands prints."""
    place = ["--run", str(run)]
    commands = {"dataflow": ["serve", "dataflow", *place, "--listen", address]}
    for index in range(workers):
        commands[f"worker-{index}"] = ["serve", "raas", *place, "--join", address, "--worker-id", f"worker-{index}"]
    for policy in policies:
        commands[f"trainer-{policy}"] = ["serve", "trainer", *place, "--join", address, "--policy", policy]
    return commands


def free_port() -> int:
    """A TCP port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def child_environment() -> dict[str, str]:
    """One thread for numerical libraries, set before they are loaded; and whose child it is."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", SUPERVISOR: str(os.getpid())}


def die_with_supervisor() -> None:
    """In a supervised child: be terminated when the supervisor is killed, so that no service is left behind (Linux)."""
    parent = os.environ.get(SUPERVISOR)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signal.SIGTERM)
