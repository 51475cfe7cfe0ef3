"""Starts services as processes and keeps them running: one that dies is started again, up to a limit.

Invariant: no child outlives the supervisor's block; a child's output goes to its log file, and a child that cannot be
kept alive ends the run with the last lines of that log.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import structlog

log = structlog.get_logger("astraflow.recipes")

BACKOFF_S = 0.5
STOP_S = 30.0
TAIL_BYTES = 2000
PERSON_MUST_MEND = 2
"""Exit code of a configuration that cannot be run: starting it again would not help."""


class ServiceDied(Exception):
    """A service ended and could not be kept running; the message ends with the last lines of its log."""


class Child(msgspec.Struct, kw_only=True):
    """One supervised process. `restarts` counts how often it was started again; `done`: it ended by itself, well."""

    name: str
    argv: Sequence[str]
    log: Path
    max_restarts: int
    process: anyio.abc.Process | None = None
    restarts: int = 0
    done: anyio.Event = msgspec.field(default_factory=anyio.Event)


class Supervisor:
    """Use inside `supervise`. `children` by name; `start` adds one."""

    def __init__(self, tasks: anyio.abc.TaskGroup, logs: Path, env: Mapping[str, str]) -> None:
        self._tasks = tasks
        self._logs = logs
        self._env = env
        self.children: dict[str, Child] = {}

    def start(self, name: str, argv: Sequence[str], max_restarts: int) -> None:
        """Run `python -m astraflow.recipes ARGV…`, again whenever it dies, at most `max_restarts` times."""
        command = [sys.executable, "-m", "astraflow.recipes", *argv]
        child = Child(name=name, argv=command, log=self._logs / f"{name}.log", max_restarts=max_restarts)
        self.children[name] = child
        self._tasks.start_soon(self._keep, child)

    async def wait_done(self, prefix: str) -> None:
        """Wait until every child whose name begins with `prefix` ended by itself, well."""
        for child in list(self.children.values()):
            if child.name.startswith(prefix):
                await child.done.wait()

    async def _keep(self, child: Child) -> None:
        while True:
            code = await self._run_once(child)
            if code == 0:
                child.done.set()
                return
            if code == PERSON_MUST_MEND or child.restarts >= child.max_restarts:
                raise ServiceDied(
                    f"{child.name} ended with {describe(code)} after {child.restarts} restarts; "
                    f"its log {child.log} ends with:\n{tail(child.log)}"
                )
            child.restarts += 1
            log.warning("service died, starting it again", service=child.name, exit=describe(code))
            await anyio.sleep(BACKOFF_S * child.restarts)

    async def _run_once(self, child: Child) -> int:
        with child.log.open("ab") as output:
            process = await anyio.open_process(
                child.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._env,
                start_new_session=True,
            )
        child.process = process
        try:
            return await process.wait()
        finally:
            await stop(process)
            child.process = None


async def stop(process: anyio.abc.Process) -> None:
    """SIGTERM, then SIGKILL after `STOP_S`; returns when the process is gone."""
    if process.returncode is not None:
        return
    with anyio.CancelScope(shield=True):
        process.terminate()
        with anyio.move_on_after(STOP_S):
            await process.wait()
            return
        process.kill()
        await process.wait()


def describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return file.read().decode("utf-8", "replace").strip()


@asynccontextmanager
async def supervise(logs: Path, env: Mapping[str, str]) -> AsyncIterator[Supervisor]:
    """Children started inside the block are stopped, all at once, at its end."""
    async with anyio.create_task_group() as tasks:
        yield Supervisor(tasks, logs, env)
        tasks.cancel_scope.cancel()
