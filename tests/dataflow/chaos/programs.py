"""The processes of a chaos run: a real dataflow over a socket, workers and trainers that do nothing heavy, a proxy.

Each may be killed at any instruction and started again; what a trainer must keep is in its checkpoints.
"""

from __future__ import annotations

import os
import random
import signal
import socket
from contextlib import AbstractAsyncContextManager
from hashlib import blake2b

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from astraflow.dataflow import (
    Array,
    AttachRequest,
    BatchRequest,
    CommitRequest,
    Control,
    Dataflow,
    DataflowService,
    Heartbeat,
    LeaseRequest,
    ListSource,
    PolicyVersion,
    Registration,
    RolloutTask,
    SampleResult,
    StepReport,
    SubmitRequest,
    TrainBatch,
    Trajectory,
    WatchRequest,
    open_journal,
)
from astraflow.dataflow import Sequence as TokenSequence
from astraflow.rpc import connect, serve

from .plan import POLICIES, Counters, Plan

PATIENCE_S = 60.0
KEPT = 2


# --- the dataflow ----------------------------------------------------------------------------------------------------


async def run_dataflow(plan: Plan) -> None:
    async with open_journal(plan.journal) as journal:
        source = ListSource(plan.source(), seed=plan.seed, epochs=plan.epochs)
        dataflow = Dataflow(plan.config(), source, journal=journal)
        async with serve(dataflow, DataflowService, plan.served_at):
            await dataflow.control(Control(phase="running"))
            await anyio.sleep_forever()


def join(plan: Plan) -> AbstractAsyncContextManager[DataflowService]:
    return connect(plan.joined_at, DataflowService, connect_timeout=PATIENCE_S, default_timeout=PATIENCE_S)


# --- a worker --------------------------------------------------------------------------------------------------------


class Worker:
    """Rolls out in a few milliseconds; whatever is rolled out twice comes out different."""

    def __init__(self, plan: Plan, name: str, number: int, counters: Counters, dataflow: DataflowService) -> None:
        self.plan, self.name, self.number, self.counters, self.dataflow = plan, name, number, counters, dataflow
        self.rng = random.Random(os.urandom(8))
        self.held: set[str] = set()
        self.versions: dict[str, PolicyVersion] = {}

    async def run(self) -> None:
        await self.register()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.beat)
            tasks.start_soon(self.follow)
            await self.work()
            tasks.cancel_scope.cancel()

    async def register(self) -> None:
        await self.dataflow.register(
            Registration(worker_id=self.name, pool="chaos", capacity=8, policies=POLICIES, pid=os.getpid())
        )

    async def beat(self) -> None:
        while True:
            reply = await self.dataflow.heartbeat(Heartbeat(worker_id=self.name, tasks=tuple(self.held)))
            if not reply.known:
                await self.register()
            self.held.difference_update(reply.cancel)
            await anyio.sleep(0.2)

    async def follow(self) -> None:
        while True:
            known = {name: version.version for name, version in self.versions.items()}
            numbers = {name: version.incarnation for name, version in self.versions.items()}
            reply = await self.dataflow.watch(WatchRequest(known=known, incarnations=numbers, wait_s=5.0))
            await anyio.sleep(self.rng.uniform(0.0, 0.05))  # it takes a while to pull them
            self.versions = {version.model_id: version for version in reply.versions}

    async def work(self) -> None:
        while True:
            reply = await self.dataflow.lease(LeaseRequest(worker_id=self.name, max_tasks=4, wait_s=1.0))
            if reply.finished:
                return
            self.counters.add("leases", self.number, len(reply.tasks))
            self.held.update(task.task_id for task in reply.tasks)
            for task in reply.tasks:
                await self.roll_out(task)
                self.held.discard(task.task_id)

    async def roll_out(self, task: RolloutTask) -> None:
        wanted = [index for index in range(task.n_samples) if index not in task.done]
        incarnations = {name: version.incarnation for name, version in self.versions.items()}
        samples = [(index, self.sample(task, index)) for index in wanted]
        await anyio.sleep(self.rng.uniform(0.0, 0.004))
        if task.task_id not in self.held:
            return
        cut = self.rng.randint(0, len(samples))
        for part in (samples[:cut], samples[cut:]):
            results = tuple(
                SampleResult(
                    task_id=task.task_id,
                    sample_index=index,
                    attempt=task.attempt,
                    worker_id=self.name,
                    trajectory=trajectory,
                    incarnations=incarnations,
                )
                for index, trajectory in part
            )
            if results:
                reply = await self.dataflow.submit(SubmitRequest(results=results))
                self.counters.add("submitted", self.number, reply.accepted)

    def sample(self, task: RolloutTask, index: int) -> Trajectory:
        if self.plan.drops and self.rng.random() < 0.05:
            self.counters.add("failed", self.number)
            return Trajectory(status="failed", error="no luck")
        return Trajectory(sequences=tuple(self.sequence(task, index, name) for name in POLICIES))

    def sequence(self, task: RolloutTask, index: int, policy: str) -> TokenSequence:
        """Its first tokens say what it is of, the others are random."""
        length = self.rng.randint(4, 40)
        tokens = [int(task.prompt.id), index, *(self.rng.randrange(1000) for _ in range(length))]
        mask = np.arange(len(tokens)) >= 2
        version = self.versions[policy].version if policy in self.versions else 0
        return TokenSequence(
            model_id=policy,
            role="",
            tokens=Array.of(np.asarray(tokens, np.int32)),
            loss_mask=Array.of(mask),
            logprobs=Array.of(np.where(mask, np.float32(-self.rng.random()), np.float32(0)).astype(np.float32)),
            versions=Array.of(np.where(mask, version, -1).astype(np.int32)),
            temperature=1.0,
            finish_reason="stop",
            reward=float(self.rng.random() < 0.5) if self.plan.drops else self.rng.random(),
        )


async def run_worker(plan: Plan, name: str, number: int, counters: Counters) -> None:
    async with join(plan) as remote:
        await Worker(plan, name, number, counters, remote).run()


# --- a trainer -------------------------------------------------------------------------------------------------------


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The whole lineage: `samples[v]` made version v + 1, of which `prompts[v]` are (prompt, sample index)."""

    version: int = 0
    consumed: tuple[str, ...] = ()
    samples: tuple[tuple[str, ...], ...] = ()
    prompts: tuple[tuple[tuple[int, int], ...], ...] = ()
    finished: bool = False


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as a trainer was given it."""

    batch_id: str
    version: int
    incarnation: int
    digest: str


def newest(plan: Plan, policy: str, rng: random.Random) -> Checkpoint:
    """The checkpoint to go on from: the newest; now and then it is lost, and it is the one before."""
    found = sorted(plan.checkpoints(policy).glob("version-*.json"))
    if len(found) > 1 and rng.random() < 0.2:
        found.pop().unlink()
    return msgspec.json.decode(found[-1].read_bytes(), type=Checkpoint) if found else Checkpoint()


def save(plan: Plan, policy: str, checkpoint: Checkpoint) -> None:
    directory = plan.checkpoints(policy)
    directory.mkdir(exist_ok=True)
    path = directory / f"version-{checkpoint.version:06d}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(checkpoint))
    temporary.rename(path)
    older = sorted(directory.glob("version-*.json"))
    for gone in [other for other in older if other.name > path.name] + older[: older.index(path) + 1 - KEPT]:
        gone.unlink()


async def run_trainer(plan: Plan, policy: str, number: int, counters: Counters) -> None:
    rng = random.Random(os.urandom(8))
    held = newest(plan, policy, rng)
    async with join(plan) as remote:
        request = AttachRequest(model_id=policy, version=held.version, consumed=held.consumed)
        incarnation = (await remote.attach(request)).incarnation
        await publish(remote, policy, held.version, incarnation)
        while (batch := await next_batch(remote, policy, held.version, incarnation)) is not None:
            note(plan, policy, batch, incarnation)
            await anyio.sleep(rng.uniform(0.0, 0.02))
            counters.add("steps", number)
            held = step(held, batch)
            await publish(remote, policy, held.version, incarnation)
            await remote.report(
                StepReport(
                    model_id=policy,
                    incarnation=incarnation,
                    version=held.version,
                    batch_id=batch.batch_id,
                    wait_s=0.0,
                    step_s=0.01,
                    metrics={},
                )
            )
            if held.version % plan.checkpoint_every == 0:
                save(plan, policy, held)
                await remote.commit(CommitRequest(model_id=policy, incarnation=incarnation, version=held.version))
    save(plan, policy, msgspec.structs.replace(held, finished=True))


async def publish(remote: DataflowService, policy: str, version: int, incarnation: int) -> None:
    await remote.publish(PolicyVersion(model_id=policy, version=version, incarnation=incarnation, weights="none:"))


async def next_batch(remote: DataflowService, policy: str, version: int, incarnation: int) -> TrainBatch | None:
    while True:
        request = BatchRequest(model_id=policy, incarnation=incarnation, version=version, wait_s=5.0)
        reply = await remote.next_batch(request)
        if reply.finished or reply.batch is not None:
            return reply.batch


def note(plan: Plan, policy: str, batch: TrainBatch, incarnation: int) -> None:
    digest = blake2b(msgspec.msgpack.encode(batch), digest_size=16).hexdigest()
    line = Served(batch_id=batch.batch_id, version=batch.version, incarnation=incarnation, digest=digest)
    with plan.served(policy).open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")


def step(held: Checkpoint, batch: TrainBatch) -> Checkpoint:
    assert batch.version == held.version, "batches come in order"
    assert batch.batch_id not in held.consumed
    tokens = [sample.sequence.tokens.numpy() for sample in batch.samples]
    return Checkpoint(
        version=held.version + 1,
        consumed=(*held.consumed, batch.batch_id),
        samples=(*held.samples, tuple(sample.sample_id for sample in batch.samples)),
        prompts=(*held.prompts, tuple((int(t[0]), int(t[1])) for t in tokens)),
    )


# --- a proxy that cuts -----------------------------------------------------------------------------------------------


async def run_proxy(plan: Plan, number: int, counters: Counters) -> None:
    """Hands bytes on; at SIGUSR1 one of the connections is cut, wherever it is in its bytes."""
    rng = random.Random(plan.seed)
    open_now: list[tuple[SocketStream, SocketStream]] = []

    async def serve_one(client: SocketStream) -> None:
        async with client, await reach() as server:
            pair = (client, server)
            open_now.append(pair)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(hand_on, client, server, tasks.cancel_scope)
                    tasks.start_soon(hand_on, server, client, tasks.cancel_scope)
            finally:
                if pair in open_now:
                    open_now.remove(pair)

    async def reach() -> SocketStream:
        while True:
            try:
                return await anyio.connect_unix(plan.served_at.removeprefix("unix:"))
            except OSError:  # the dataflow does not listen yet
                await anyio.sleep(0.02)

    async def hand_on(source: ByteStream, target: ByteStream, scope: anyio.CancelScope) -> None:
        try:
            while True:
                data = await source.receive(1 << 14)
                # In pieces, so that a cut can come in the middle of a frame.
                for start in range(0, len(data), 1 << 10):
                    await target.send(data[start : start + (1 << 10)])
                    await anyio.lowlevel.checkpoint()
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            scope.cancel()

    async def cut() -> None:
        with anyio.open_signal_receiver(signal.SIGUSR1) as signals:
            async for _ in signals:
                while not open_now:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                counters.add("cuts", number)
                for stream in open_now.pop(rng.randrange(len(open_now))):
                    stream.extra(SocketAttribute.raw_socket).shutdown(socket.SHUT_RDWR)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cut)
        listener = await anyio.create_unix_listener(plan.joined_at.removeprefix("unix:"))
        await listener.serve(serve_one)
