"""The processes of `dataflow.py`: servers, their clients, a thousand workers, and what is measured in one process.

    python dataflow_parts.py ROLE ARGUMENTS

Each prints figures as JSON, one line each; servers say that they are ready, clients take rounds on standard input.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import uvloop

from astraflow.dataflow import (
    Array,
    AttachRequest,
    BatchRequest,
    CommitRequest,
    Control,
    Dataflow,
    DataflowConfig,
    DataflowService,
    Empty,
    Heartbeat,
    LeaseRequest,
    ListSource,
    Message,
    PolicyFeed,
    PolicyVersion,
    Prompt,
    Registration,
    RolloutTask,
    SampleResult,
    Sampling,
    SubmitRequest,
    TaskProgress,
    Trajectory,
    WorkerStats,
    open_journal,
)
from astraflow.dataflow import Sequence as TokenSequence
from astraflow.rpc import connect, serve

CALLERS = 4
"""Groups each client process has under way at once."""

LEASED = 4
"""Groups a worker leases at once: it runs 32 samples."""

BATCH = 256
SAMPLES = 8
TOKENS = 1000
SAMPLED = 800

LOCAL_BATCHES = 12
LOCAL_ROUNDS = 5

WORKERS = 1000
HELD = 10
FLEET_S = 20.0
THINK_S = 2.5
BEAT_S = 4.0

GROUPS = 100_000
NEWEST = 1 << 30
"""A version newer than any: what carries it counts as sampled by the newest."""

Figures = dict[str, Any]


def say(figures: object) -> None:
    print(msgspec.json.encode(figures).decode(), flush=True)


def sequence(reward: float, tokens: int, sampled: int, draw: np.random.Generator) -> TokenSequence:
    mask = np.arange(tokens) >= tokens - sampled
    return TokenSequence(
        model_id="solver",
        role="solver",
        tokens=Array.of(draw.integers(0, 150_000, tokens).astype(np.int32)),
        loss_mask=Array.of(mask),
        logprobs=Array.of(np.where(mask, -draw.random(tokens), 0).astype(np.float32)),
        versions=Array.of(np.where(mask, NEWEST, -1).astype(np.int32)),
        temperature=1.0,
        finish_reason="stop",
        reward=reward,
    )


def trajectories(count: int, tokens: int = TOKENS, sampled: int = SAMPLED) -> list[Trajectory]:
    draw = np.random.default_rng(0)
    return [Trajectory(sequences=(sequence(float(i % 2), tokens, sampled, draw),)) for i in range(count)]


def results(task: RolloutTask, made: list[Trajectory], worker: str) -> SubmitRequest:
    return SubmitRequest(
        results=tuple(
            SampleResult(
                task_id=task.task_id,
                sample_index=index,
                attempt=task.attempt,
                worker_id=worker,
                trajectory=trajectory,
                tokens=SAMPLED,
            )
            for index, trajectory in enumerate(made)
        )
    )


def dataflow(batch: int, samples: int, staleness: int = 8, journal: Any = None) -> Dataflow:
    prompts = tuple(Prompt(id=f"p{n}", source="bench", messages=(Message("user", f"{n}?"),)) for n in range(1000))
    config = DataflowConfig(
        policies=(PolicyFeed(model_id="solver", batch_size=batch, max_staleness=staleness, steps=10**9),),
        workflow="bench",
        n_samples=samples,
        sampling={"solver": Sampling()},
    )
    return Dataflow(config, ListSource(prompts, seed=0), journal=journal)


class Worker:
    """Leases tasks and submits finished groups at once."""

    def __init__(self, service: DataflowService, name: str, made: list[Trajectory]) -> None:
        self.service, self.name, self.made = service, name, made

    async def start(self) -> None:
        await self.service.register(
            Registration(
                worker_id=self.name, pool="bench", capacity=LEASED * SAMPLES, policies=("solver",), pid=os.getpid()
            )
        )

    async def groups(self, most: int) -> list[float]:
        """Lease up to so many and submit them; returns the seconds of each submit."""
        reply = await self.service.lease(LeaseRequest(worker_id=self.name, max_tasks=most, wait_s=0.5))
        taken = []
        for task in reply.tasks:
            began = time.perf_counter()
            await self.service.submit(results(task, self.made, self.name))
            taken.append(time.perf_counter() - began)
        return taken


class Trainer:
    """Takes batches, publishes and commits at once."""

    def __init__(self, service: DataflowService) -> None:
        self.service = service
        self.version = self.incarnation = 0

    async def start(self) -> None:
        self.incarnation = (await self.service.attach(AttachRequest(model_id="solver"))).incarnation
        await self.publish()
        await self.service.control(Control(phase="running"))

    async def publish(self) -> None:
        await self.service.publish(
            PolicyVersion(model_id="solver", version=self.version, incarnation=self.incarnation, weights="mem:x")
        )

    async def step(self, wait_s: float) -> float | None:
        """Returns the seconds it took to get a batch that was there, None if there was none."""
        began = time.perf_counter()
        reply = await self.service.next_batch(
            BatchRequest(model_id="solver", incarnation=self.incarnation, version=self.version, wait_s=wait_s)
        )
        if reply.batch is None:
            return None
        seconds = time.perf_counter() - began
        self.version += 1
        await self.publish()
        await self.service.commit(CommitRequest(model_id="solver", incarnation=self.incarnation, version=self.version))
        return seconds


# --- in process ------------------------------------------------------------------------------------------------------


async def local(journal: str) -> None:
    """Processor microseconds, of this thread and of all, for a rollout submitted, and for one served in a batch."""
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(open_journal(Path(journal))) if journal else None
        flow = dataflow(BATCH, SAMPLES, journal=kept)
        worker, trainer = Worker(flow, "w0", trajectories(SAMPLES)), Trainer(flow)
        await worker.start()
        await trainer.start()
        rows = [await local_round(worker, trainer) for _ in range(LOCAL_ROUNDS + 1)][1:]
    say({name: statistics.median(row[name] for row in rows) for name in rows[0]})


async def local_round(worker: Worker, trainer: Trainer) -> dict[str, float]:
    submitting = serving = submitting_all = serving_all = 0.0
    for _ in range(LOCAL_BATCHES):
        began, began_all = time.thread_time(), time.process_time()
        for _ in range(BATCH // SAMPLES // LEASED):
            assert len(await worker.groups(LEASED)) == LEASED
        middle, middle_all = time.thread_time(), time.process_time()
        assert await trainer.step(0.0) is not None
        submitting += middle - began
        submitting_all += middle_all - began_all
        serving += time.thread_time() - middle
        serving_all += time.process_time() - middle_all
    scale = 1e6 / (LOCAL_BATCHES * BATCH)
    return {
        "submit": submitting * scale,
        "submit, all threads": submitting_all * scale,
        "serve": serving * scale,
        "serve, all threads": serving_all * scale,
    }


# --- over rpc --------------------------------------------------------------------------------------------------------


async def serve_rpc(path: str, journal: str) -> None:
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(open_journal(Path(journal))) if journal else None
        await stack.enter_async_context(serve(dataflow(BATCH, SAMPLES, journal=kept), DataflowService, f"unix:{path}"))
        say("ready")
        await asyncio.Event().wait()


async def load_rpc(path: str, number: str) -> None:
    """One client process, told by standard input to work for so many seconds; the first one trains as well."""
    index = int(number)
    async with connect(f"unix:{path}", DataflowService) as service:
        made = trajectories(SAMPLES)
        workers = [Worker(service, f"w{index}.{n}", made) for n in range(CALLERS)]
        trainer = Trainer(service)
        for worker in workers:
            await worker.start()
        if index == 0:
            await trainer.start()
        say("ready")
        while line := await asyncio.to_thread(sys.stdin.readline):
            row = await rpc_round(workers, trainer if index == 0 else None, float(line))
            say(row)


async def rpc_round(workers: list[Worker], trainer: Trainer | None, seconds: float) -> Figures:
    end, spent = time.perf_counter() + seconds, time.process_time()
    row: Figures = {"submits": [], "batches": []}

    async def work(worker: Worker) -> None:
        while time.perf_counter() < end:
            row["submits"] += await worker.groups(LEASED)

    async def train() -> None:
        while trainer and time.perf_counter() < end:
            taken = await trainer.step(0.0)
            if taken is None:
                await asyncio.sleep(0.005)
            else:
                row["batches"].append(taken)

    await asyncio.gather(train(), *(work(worker) for worker in workers))
    return {**row, "cpu": time.process_time() - spent}


# --- a thousand workers ----------------------------------------------------------------------------------------------


class Lag(msgspec.Struct, frozen=True):
    """Milliseconds that the event loop came late, and that the process computed meanwhile; the leases now; processor
    seconds spent by the process."""

    p50: float
    p99: float
    most: float
    busy_p50: float
    busy_p99: float
    leases: int
    spent: float


class Probe(Protocol):
    async def lag(self, request: Empty, /) -> Lag: ...


class ProbeImpl:
    """Looks every few milliseconds how late it is; `lag` tells of the time since it was last asked."""

    def __init__(self, flow: Dataflow) -> None:
        self._flow = flow
        self._late: list[float] = []
        self._busy: list[float] = []

    async def watch(self) -> None:
        while True:
            began, spent = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.005)
            self._late.append((time.perf_counter() - began - 0.005) * 1e3)
            self._busy.append((time.process_time() - spent) * 1e3)

    async def lag(self, request: Empty, /) -> Lag:
        late, self._late = self._late, []
        busy, self._busy = self._busy, []
        leases = (await self._flow.status(Empty())).leased
        return Lag(
            p50=percentile(late, 50),
            p99=percentile(late, 99),
            most=max(late, default=0.0),
            busy_p50=percentile(busy, 50),
            busy_p99=percentile(busy, 99),
            leases=leases,
            spent=time.process_time(),
        )


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


async def serve_fleet(path: str) -> None:
    flow = dataflow(512, 2, staleness=51)
    probe = ProbeImpl(flow)
    async with serve(flow, DataflowService, f"unix:{path}"), serve(probe, Probe, f"unix:{path}.probe"):
        say("ready")
        await probe.watch()


async def member(service: DataflowService, number: int, made: list[Trajectory], leases: list[float]) -> None:
    """A worker that holds `HELD` tasks, finishes one now and then, and leases another."""
    name, draw = f"w{number}", random.Random(number)
    await service.register(Registration(worker_id=name, pool="bench", capacity=20, policies=("solver",), pid=1))
    held: list[RolloutTask] = []
    beat_at = time.perf_counter() + draw.random() * BEAT_S
    while True:
        began = time.perf_counter()
        reply = await service.lease(LeaseRequest(worker_id=name, max_tasks=HELD - len(held), wait_s=5.0))
        leases.append(time.perf_counter() - began)
        held += reply.tasks
        await asyncio.sleep(draw.expovariate(1 / THINK_S))
        if time.perf_counter() > beat_at:
            beat_at += BEAT_S
            progress = tuple(TaskProgress(task.task_id, int(time.perf_counter() * 10)) for task in held)
            await service.heartbeat(
                Heartbeat(
                    worker_id=name,
                    tasks=tuple(task.task_id for task in held),
                    progress=progress,
                    stats=WorkerStats(running=len(held)),
                )
            )
        if held:
            await service.submit(results(held.pop(0), made, name))


@asynccontextmanager
async def fleet(path: str, leases: list[float]) -> AsyncIterator[None]:
    """A thousand workers, a connection each, and a trainer."""
    made = trajectories(2, tokens=200, sampled=150)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        trainer = Trainer(await stack.enter_async_context(connect(f"unix:{path}", DataflowService)))
        await trainer.start()

        async def train() -> None:
            while True:
                await trainer.step(5.0)

        running = [tasks.create_task(train())]
        for number in range(WORKERS):
            service = await stack.enter_async_context(connect(f"unix:{path}", DataflowService))
            running.append(tasks.create_task(member(service, number, made, leases)))
            if number % 20 == 0:
                await asyncio.sleep(0.01)
        yield
        for one in running:
            one.cancel()


async def crowd(path: str) -> None:
    """Milliseconds: p50 and p99 of a lease, and of the server's loop lag; leases in flight and taken per second."""
    leases: list[float] = []
    async with connect(f"unix:{path}.probe", Probe) as probe, fleet(path, leases):
        await asyncio.sleep(3 * THINK_S)
        before = await probe.lag(Empty())
        leases.clear()
        await asyncio.sleep(FLEET_S)
        after, taken = await probe.lag(Empty()), list(leases)
    say(
        {
            "lease p50": percentile(taken, 50) * 1e3,
            "lease p99": percentile(taken, 99) * 1e3,
            "lag p50": after.p50,
            "lag p99": after.p99,
            "lag most": after.most,
            "busy p50": after.busy_p50,
            "busy p99": after.busy_p99,
            "in flight": after.leases,
            "leases per second": len(taken) / FLEET_S,
            "busy": (after.spent - before.spent) / FLEET_S,
            "workers": WORKERS,
            "held": HELD,
            "think": THINK_S,
        }
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def resident() -> float:
    """MiB of resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


async def memory() -> None:
    """Says the MiB of resident memory after every tenth of the groups."""
    flow = dataflow(64, 2)
    worker, trainer = Worker(flow, "w0", trajectories(2, tokens=32, sampled=16)), Trainer(flow)
    await worker.start()
    await trainer.start()
    levels = []
    for number in range(1, GROUPS + 1):
        await worker.groups(1)
        if number % 32 == 0:
            assert await trainer.step(0.0) is not None
        if number % (GROUPS // 10) == 0:
            gc.collect()
            levels.append(resident())
    say(levels)


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    "local": local,
    "serve": serve_rpc,
    "load": load_rpc,
    "fleet": serve_fleet,
    "crowd": crowd,
    "memory": memory,
}

if __name__ == "__main__":
    uvloop.run(ROLES[sys.argv[1]](*sys.argv[2:]))  # type: ignore[arg-type]
