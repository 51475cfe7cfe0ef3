"""Drives a run through its phases by the dataflow's interface alone: evaluate, train, evaluate, finish.

Invariant: the driver never waits for ever. Progress belongs to the services; the driver watches `status`, raises
`RunFailed` with the dataflow's reason when there is one, and on `stop` takes the shortest way to a clean end.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterable

import anyio
import msgspec
import structlog
from rich.console import Console

from astraflow.dataflow import (
    Control,
    DataflowService,
    Empty,
    EvaluateRequest,
    Evaluation,
    EvaluationQuery,
    Policies,
    RunFailed,
    Status,
    WatchRequest,
)

log = structlog.get_logger("astraflow.recipes")

POLL_S = 0.25
SAME_SIGNAL_S = 1.0


class Abandoned(Exception):
    """The person interrupted the clean end, too."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to. `stopped`: it was interrupted, so there is no evaluation after training."""

    before: Evaluation | None
    after: Evaluation | None
    status: Status
    stopped: bool
    train_s: float
    total_s: float


class Driver:
    """One run's course. `stop` may be called from a signal handler on the loop."""

    def __init__(self, dataflow: DataflowService, policies: Iterable[str], suites: Iterable[str]) -> None:
        self._dataflow = dataflow
        self._policies = tuple(policies)
        self._suites = tuple(suites)
        self._stopping = anyio.Event()
        self.published = anyio.Event()
        """Set when every policy has weights that a worker can pull."""
        self.stage = "starting"

    def stop(self) -> None:
        """End the run early and cleanly: training stops after the running step, what was learned is saved."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self, trainers_done: Callable[[], Awaitable[None]]) -> RunResult:
        """Take the run from start to end; `trainers_done` returns when every trainer has saved its policy.

        Raises:
            RunFailed: the dataflow gave the run up, or a phase's services never came.
        """
        began = anyio.current_time()
        await self._until_published()
        before = await self._evaluate("before")
        train_began = anyio.current_time()
        self.stage = "training"
        await self._dataflow.control(Control(phase="running"))
        await self._train()
        train_s = anyio.current_time() - train_began
        after = await self._evaluate("after")
        self.stage = "saving"
        await self._dataflow.control(Control(phase="finished"))
        await trainers_done()
        status = await self._dataflow.status(Empty())
        self.stage = "done"
        return RunResult(
            before=before,
            after=after,
            status=status,
            stopped=self._stopping.is_set(),
            train_s=train_s,
            total_s=anyio.current_time() - began,
        )

    async def _train(self) -> None:
        """Return when every policy is trained, or on `stop`."""
        while not self._stopping.is_set():
            if self._trained(await self._status()):
                break
            await self._pause()

    def _trained(self, status: Status) -> bool:
        return all(p.finished for p in status.policies)

    async def _status(self) -> Status:
        status = await self._dataflow.status(Empty())
        if status.error:
            raise RunFailed(status.error)
        return status

    async def _pause(self) -> None:
        with anyio.move_on_after(POLL_S):
            await self._stopping.wait()

    async def _until_published(self) -> None:
        """Return when every policy has weights that workers can pull, or on `stop`."""
        self.stage = "loading models"
        while not self._stopping.is_set():
            policies: Policies = await self._dataflow.watch(WatchRequest(wait_s=0.0))
            if {v.model_id for v in policies.versions} >= set(self._policies):
                self.published.set()
                return
            await self._status()
            await self._pause()

    async def _evaluate(self, label: str) -> Evaluation | None:
        if not self._suites or self._stopping.is_set():
            return None
        self.stage = f"evaluating ({label} training)"
        await self._dataflow.evaluate(EvaluateRequest(label=label, suites=self._suites))
        while not self._stopping.is_set():
            evaluation = await self._dataflow.evaluation(EvaluationQuery(label=label, wait_s=0.5))
            if evaluation.finished:
                return evaluation
            await self._status()
        return None


async def stop_on_signal(driver: Driver, console: Console) -> None:
    """First signal: stop cleanly. Another after `SAME_SIGNAL_S`: abandon the run.

    One Ctrl-C can arrive twice: from the terminal, and passed on by the program that started this one.
    """
    stopped_at = 0.0
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if not driver.stopping:
                stopped_at = anyio.current_time()
                console.print("stopping: saving what was learned (again to abandon it) …")
                driver.stop()
            elif anyio.current_time() - stopped_at > SAME_SIGNAL_S:
                raise Abandoned("interrupted twice: the run was abandoned; checkpoints made so far are kept")
