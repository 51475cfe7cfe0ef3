"""A rollout worker: leases tasks, runs their samples, submits results, keeps its engines' weights fresh.

Invariants: every task the worker runs has an owner here, in one tree of task groups, so that a failure cancels the rest
and surfaces as the one cause; no more samples run at once than the capacity; a finished sample is kept until the
dataflow has answered for it; when `run` ends, by whatever way, the engines are closed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AsyncExitStack

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from astraflow.dataflow import (
    DataflowService,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Registration,
    RolloutTask,
    SampleResult,
    Trajectory,
    WorkerStats,
)
from astraflow.rpc import Unavailable
from astraflow.weightsync import TransferMode

from .handles import Policy
from .interface import Engine, Workflow
from .ledger import Held, Ledger
from .outbox import Outbox
from .patience import persist
from .rollout import result_of, run_sample, unfinished
from .tokenizer import Tokenizer
from .weights import WeightWatcher

LEASE_S = 5.0
CALL_TIMEOUT_S = 20.0
CLOSE_S = 30.0
FLUSH_S = 5.0
"""How long a worker that leaves tries to hand over its last results: the dataflow may have gone for good."""

FAREWELL_S = 2.0
NEXT_LEASE_S = 0.02
"""Between two leases, in case the dataflow answers at once without tasks."""

log = structlog.get_logger(__name__)


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one worker works.

    `capacity` is samples at once. `min_update_s` passes at least between two weight updates of a policy. After `drain`
    running groups have `drain_s` seconds to finish. `patience_s` bounds how long the dataflow may be away.
    `max_failures` failed samples in a row end the worker with the last one's error: something is wrong with all of
    them. For debugging: `one_at_a_time` runs samples strictly one after the other, `reraise` lets a workflow's
    exception surface from `run`.
    """

    worker_id: str
    pool: str = "local"
    region: str = "local"
    capacity: int = 32
    gpus: float = 0.0
    heartbeat_s: float = 2.0
    min_update_s: float = 0.0
    transfer: TransferMode = "auto"
    drain_s: float = 30.0
    patience_s: float = 300.0
    max_failures: int = 256
    one_at_a_time: bool = False
    reraise: bool = False

    def __post_init__(self) -> None:
        for name in ("capacity", "heartbeat_s", "max_failures"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be positive")
        for name in ("min_update_s", "drain_s", "patience_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must not be negative")


class WorkerFailed(Exception):
    """The worker cannot do its work; the message says why."""


class Worker:
    """Serves `engines` (model_id -> engine) to `workflows` (name -> function) for a dataflow.

    `tokenizers` has one per engine. The engines are started and closed by `run`, which is called once.
    """

    def __init__(
        self,
        config: WorkerConfig,
        dataflow: DataflowService,
        *,
        engines: Mapping[str, Engine],
        tokenizers: Mapping[str, Tokenizer],
        workflows: Mapping[str, Workflow],
    ) -> None:
        if engines.keys() != tokenizers.keys():
            raise ValueError(f"engines for {sorted(engines)}, tokenizers for {sorted(tokenizers)}: they must agree")
        self._config = config
        self._dataflow = dataflow
        self._engines = dict(engines)
        self._workflows = dict(workflows)
        self._policies = {name: Policy(engine, tokenizers[name]) for name, engine in engines.items()}
        at_once = 1 if config.one_at_a_time else config.capacity
        self._ledger = Ledger(at_once)
        self._running = anyio.CapacityLimiter(at_once)
        self._outbox = Outbox(dataflow, self._sent, patience_s=config.patience_s)
        self._weights = WeightWatcher(
            dataflow,
            engines,
            transfer=config.transfer,
            min_update_s=config.min_update_s,
            patience_s=config.patience_s,
        )
        self._failures = 0
        self._declined: set[str] = set()
        self._leaving = anyio.Event()
        self._finished = False
        self._reported = WorkerStats()

    def drain(self) -> None:
        """Lease nothing more, let running groups finish (at most `drain_s` seconds), then return from `run`."""
        self._leaving.set()

    async def run(self) -> None:
        """Work until the dataflow says the run is finished, or `drain` was called.

        Raises:
            EngineError: an engine did not start, or died (EngineGone).
            WorkerFailed: nothing but failed samples.
            Unavailable, TimeoutError: the dataflow was away for longer than the patience.
            Exception: with `reraise`, what a workflow raised.
        """
        cause: BaseException | None = None
        try:
            async with anyio.create_task_group() as engines:
                for engine in self._engines.values():
                    engines.start_soon(engine.start)
            await self._weights.initial()
            await self._work()
        except BaseExceptionGroup as group:
            cause = first_cause(group)
        finally:
            await self._close()
        # Raised here, not in the handler, so that the exception keeps the context it was raised in.
        if cause is not None:
            raise cause

    async def _close(self) -> None:
        """Close every engine, whatever happens to the others."""
        with anyio.move_on_after(CLOSE_S, shield=True) as scope:
            async with AsyncExitStack() as closing:
                for engine in self._engines.values():
                    closing.push_async_callback(engine.aclose)
        if scope.cancelled_caught:
            log.error("engines_not_closed", worker_id=self._config.worker_id, waited_s=CLOSE_S)

    async def _work(self) -> None:
        await self._register()
        self._reported = WorkerStats(seconds=anyio.current_time())
        async with anyio.create_task_group() as services:
            services.start_soon(self._weights.run)
            services.start_soon(self._outbox.run)
            services.start_soon(self._heartbeats)
            async with anyio.create_task_group() as rollouts:
                await self._lease_tasks(rollouts)
                drain_s = 0.0 if self._finished else self._config.drain_s
                rollouts.cancel_scope.deadline = anyio.current_time() + drain_s
            if not self._finished:
                with anyio.move_on_after(FLUSH_S):
                    await self._outbox.flushed()
            services.cancel_scope.cancel()
        await self._farewell()

    # --- tasks ---------------------------------------------------------------------------------------------------

    async def _lease_tasks(self, rollouts: TaskGroup) -> None:
        """Lease while there is room, until the worker is to leave."""
        async with anyio.create_task_group() as leasing:
            leasing.start_soon(self._cancel_when_leaving, leasing.cancel_scope)
            while True:
                reply = await self._lease(await self._ledger.room())
                if reply.finished:
                    self._finish()
                for task in reply.tasks:
                    self._take(task, rollouts)
                self._release()
                await anyio.sleep(NEXT_LEASE_S)

    async def _cancel_when_leaving(self, scope: anyio.CancelScope) -> None:
        await self._leaving.wait()
        scope.cancel()

    async def _lease(self, room: int) -> LeaseReply:
        request = LeaseRequest(worker_id=self._config.worker_id, max_tasks=room, max_samples=room, wait_s=LEASE_S)
        return await persist(
            "lease",
            lambda: self._dataflow.lease(request),
            timeout_s=LEASE_S + CALL_TIMEOUT_S,
            patience_s=self._config.patience_s,
        )

    def _take(self, task: RolloutTask, rollouts: TaskGroup) -> None:
        held = Held(task, anyio.current_time())
        self._ledger.take(held)
        if task.pinned and not self._weights.pin(task.pinned):
            self._declined.add(task.task_id)
        else:
            rollouts.start_soon(self._run_task, held)

    def _release(self) -> None:
        """Follow the newest weights, unless a task is held that needs others."""
        if not self._ledger.pinned:
            self._weights.release()

    async def _run_task(self, held: Held) -> None:
        with held.scope:
            async with anyio.create_task_group() as timing:
                timing.start_soon(self._keep_time, held)
                await self._run_samples(held)
                timing.cancel_scope.cancel()

    async def _run_samples(self, held: Held) -> None:
        wanted = sorted(held.open)
        if self._config.one_at_a_time:
            for index in wanted:
                await self._run_sample(held, index)
            return
        async with anyio.create_task_group() as samples:
            for index in wanted:
                samples.start_soon(self._run_sample, held, index)

    async def _keep_time(self, held: Held) -> None:
        """Time out what runs when no token came for the task's deadline, or its limit is reached."""
        while anyio.current_time() < held.deadline:
            await anyio.sleep_until(held.deadline)
            held.progress(anyio.current_time())
        held.time_out()

    async def _run_sample(self, held: Held, index: int) -> None:
        """Wait for a place, roll out, hand the result over."""
        task, meter = held.task, held.meters[index]
        incarnations: dict[str, int] = {}
        with meter.scope as queue:
            await self._weights.at_least(task.min_versions)
            if not await self._weights.exactly(task.pinned):
                self._declined.add(task.task_id)
                return
            await self._running.acquire()
        if queue.cancel_called:
            if not queue.cancelled_caught:
                self._running.release()
            waited = f"task {task.task_id!r} sample {index}: not begun in time; the engines serve"
            trajectory = unfinished("timed_out", f"{waited} {self._weights.versions()}, wanted {task.min_versions}")
        else:
            meter.scope = anyio.CancelScope()
            incarnations = self._weights.incarnations()
            try:
                trajectory = await run_sample(
                    task,
                    index,
                    self._workflows,
                    self._policies,
                    meter=meter,
                    reraise=self._config.reraise,
                )
            finally:
                self._running.release()
        self._note_failure(trajectory)
        self._outbox.put(
            result_of(
                task,
                index,
                trajectory,
                worker_id=self._config.worker_id,
                leased_at=held.leased_at,
                tokens=meter.read(),
                incarnations=incarnations,
            )
        )

    def _note_failure(self, trajectory: Trajectory) -> None:
        """Raises WorkerFailed when nothing but failures came for too long."""
        if trajectory.status == "ok":
            self._failures = 0
        elif trajectory.status == "failed":
            self._failures += 1
            if self._failures == self._config.max_failures:
                raise WorkerFailed(f"{self._failures} samples in a row failed, the last one: {trajectory.error}")

    def _sent(self, result: SampleResult) -> None:
        self._ledger.settle((result.task_id, result.attempt), result.sample_index)

    # --- what the dataflow hears ---------------------------------------------------------------------------------

    async def _register(self) -> None:
        registration = Registration(
            worker_id=self._config.worker_id,
            pool=self._config.pool,
            region=self._config.region,
            capacity=self._config.capacity,
            policies=tuple(self._engines),
            gpus=self._config.gpus,
            pid=os.getpid(),
        )
        await persist(
            "register",
            lambda: self._dataflow.register(registration),
            timeout_s=CALL_TIMEOUT_S,
            patience_s=self._config.patience_s,
        )

    async def _heartbeats(self) -> None:
        while True:
            await anyio.sleep(self._config.heartbeat_s)
            reply = await persist("heartbeat", self._beat, timeout_s=CALL_TIMEOUT_S, patience_s=self._config.patience_s)
            for task_id in reply.cancel:
                if self._ledger.drop(task_id):
                    log.info("task_cancelled", task_id=task_id)
            self._release()
            if not reply.known:
                await self._register()
            if reply.finished:
                self._finish()

    async def _beat(self, leaving: bool = False) -> HeartbeatReply:
        totals, declined = self._totals(), tuple(self._declined)
        reply = await self._dataflow.heartbeat(
            Heartbeat(
                worker_id=self._config.worker_id,
                tasks=self._ledger.task_ids(),
                progress=self._ledger.progress(anyio.current_time()),
                declined=declined,
                stats=since(self._reported, totals),
                leaving=leaving,
            )
        )
        self._reported = totals
        for task_id in declined:
            self._declined.discard(task_id)
            self._ledger.drop(task_id)
        return reply

    async def _farewell(self) -> None:
        """Tell the dataflow that nothing runs here any more, so that what was dropped goes to others at once."""
        for task_id in self._ledger.task_ids():
            self._ledger.drop(task_id)
        with anyio.move_on_after(FAREWELL_S):
            try:
                await self._beat(leaving=True)
            except Unavailable:
                log.info("left_without_farewell", worker_id=self._config.worker_id)

    def _totals(self) -> WorkerStats:
        """Figures since the start; `seconds` is the time."""
        full_bytes, delta_bytes, pause_s = self._weights.totals()
        return WorkerStats(
            running=self._running.borrowed_tokens,
            generated_tokens=sum(engine.stats().generated_tokens for engine in self._engines.values()),
            seconds=anyio.current_time(),
            versions=self._weights.versions(),
            pulled_full_bytes=full_bytes,
            pulled_delta_bytes=delta_bytes,
            swap_pause_s=pause_s,
        )

    def _finish(self) -> None:
        self._finished = True
        self._leaving.set()


def since(before: WorkerStats, now: WorkerStats) -> WorkerStats:
    """What happened between two totals."""
    return msgspec.structs.replace(
        now,
        generated_tokens=now.generated_tokens - before.generated_tokens,
        seconds=now.seconds - before.seconds,
        pulled_full_bytes=now.pulled_full_bytes - before.pulled_full_bytes,
        pulled_delta_bytes=now.pulled_delta_bytes - before.pulled_delta_bytes,
        swap_pause_s=now.swap_pause_s - before.swap_pause_s,
    )


def first_cause(error: BaseException) -> BaseException:
    """The exception that came first in a (nested) group: the others followed from it. Any other is its own cause."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
