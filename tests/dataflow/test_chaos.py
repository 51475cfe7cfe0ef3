"""Trainers and workers that die at any moment, in any mode: afterwards the run still ends, and trains nothing twice."""

from __future__ import annotations

import random
from typing import Any

import pytest

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Control,
    Dataflow,
    Heartbeat,
    ListSource,
    PolicyFeed,
    Registration,
    RolloutTask,
    SubmitRequest,
    Trajectory,
    WatchRequest,
)

NAMES = ("a", "b")


class Trainer:
    """Trains in memory; a crash takes it back to its last checkpoint. `trained`: version -> the batch's samples."""

    def __init__(self, kit: Any, dataflow: Dataflow, name: str, steps: int, every: int) -> None:
        self.kit, self.dataflow, self.name, self.steps, self.every = kit, dataflow, name, steps, every
        self.version = self.checkpoint = self.incarnation = 0
        self.done = self.published = False
        self.trained: dict[int, tuple[str, ...]] = {}

    async def start(self) -> None:
        self.version = self.checkpoint
        self.done = self.published = False
        request = AttachRequest(model_id=self.name, version=self.version)
        self.incarnation = (await self.dataflow.attach(request)).incarnation

    async def step(self) -> None:
        if self.done:
            return
        if not self.published:
            await self.kit.publish(self.dataflow, self.incarnation, self.version, self.name)
            self.published = True
            return
        reply = await self.kit.ask(self.dataflow, self.incarnation, self.version, self.name)
        self.done = reply.finished
        if reply.batch is None:
            return
        samples = tuple(sample.sample_id for sample in reply.batch.samples)
        assert self.trained.setdefault(self.version, samples) == samples
        self.version += 1
        self.published = False
        if self.every and self.version % self.every == 0:
            self.checkpoint = self.version
            await self.dataflow.commit(
                CommitRequest(model_id=self.name, incarnation=self.incarnation, version=self.version)
            )


class Worker:
    """Rolls out in no time; a crash forgets what it holds, but its old results may still arrive (`ghosts`)."""

    def __init__(self, kit: Any, dataflow: Dataflow, name: str, rng: random.Random) -> None:
        self.kit, self.dataflow, self.name, self.rng = kit, dataflow, name, rng
        self.pid = 0
        self.held: dict[str, tuple[RolloutTask, set[int]]] = {}
        self.ghosts: list[tuple[RolloutTask, int]] = []
        self.versions = dict.fromkeys(NAMES, 0)

    async def start(self) -> None:
        self.pid += 1
        self.ghosts += [(task, index) for task, open_ in self.held.values() for index in open_]
        self.held = {}
        await self.dataflow.register(
            Registration(worker_id=self.name, pool="main", capacity=8, policies=NAMES, pid=self.pid)
        )

    async def pull(self) -> None:
        for version in (await self.dataflow.watch(WatchRequest(wait_s=0.0))).versions:
            self.versions[version.model_id] = version.version

    async def beat(self) -> None:
        reply = await self.dataflow.heartbeat(Heartbeat(worker_id=self.name, tasks=tuple(self.held)))
        for task_id in reply.cancel:
            self.held.pop(task_id, None)
        if not reply.known:
            await self.start()

    async def lease(self) -> None:
        for task in await self.kit.lease(self.dataflow, 2, self.name):
            self.held[task.task_id] = (task, set(range(task.n_samples)) - set(task.done))

    async def send(self, task: RolloutTask, index: int) -> None:
        if self.rng.random() < 0.1:
            trajectory = Trajectory(status="failed", error="no luck")
        else:
            rewards = {name: float(self.rng.random() < 0.5) for name in NAMES}
            trajectory = self.kit.trajectory(rewards, self.versions)
        result = self.kit.result(task, index, trajectory, self.name)
        await self.dataflow.submit(SubmitRequest(results=(result,)))

    async def work(self, most: int = 1000) -> None:
        for task_id, (task, open_) in list(self.held.items()):
            while open_ and most:
                most -= 1
                await self.send(task, open_.pop())
            if not open_:
                del self.held[task_id]


async def happen(kit: Any, rng: random.Random, trainers: list[Trainer], workers: list[Worker]) -> None:
    """One event, of all that can happen."""
    kit.clock.advance(rng.choice([0.05, 0.5, 0.5, 3.0]) if rng.random() < 0.97 else 30.0)
    trainer, worker = rng.choice(trainers), rng.choice(workers)
    event = rng.random()
    if event < 0.3:
        await trainer.step()
    elif event < 0.34:
        await trainer.start()
    elif event < 0.38:
        await worker.start()
    elif event < 0.55:
        await worker.lease()
    elif event < 0.65:
        await worker.beat()
    elif event < 0.75:
        await worker.pull()
    elif event < 0.8 and worker.ghosts:
        await worker.send(*worker.ghosts.pop())
    else:
        await worker.work(rng.choice([1, 2, 5, 100]))


@pytest.mark.parametrize("seed", range(60))
async def test_after_any_crashes_the_run_ends(kit: Any, seed: int) -> None:
    rng = random.Random(seed)
    every, epochs = rng.choice([0, 1, 2, 5]), rng.choice([None, None, 1, 3])
    staleness = rng.choice([0, 1, 3])
    feeds = [
        PolicyFeed(model_id=name, batch_size=rng.choice([3, 4, 6]), max_staleness=staleness, steps=rng.choice([3, 8]))
        for name in NAMES
    ]
    dataflow = kit.dataflow(
        feeds,
        source=ListSource(kit.prompts(20), seed=0, epochs=epochs),
        synchronous=rng.random() < 0.5,
        max_dropped_batches=1000,
        worker_grace_s=1e6,
    )
    trainers = [Trainer(kit, dataflow, feed.model_id, feed.steps, every) for feed in feeds]
    workers = [Worker(kit, dataflow, f"w{n}", rng) for n in range(2)]
    for worker in workers:
        await worker.start()
    for trainer in trainers:
        await trainer.start()
    await dataflow.control(Control(phase="running"))
    for _ in range(rng.choice([50, 200, 400])):
        await happen(kit, rng, trainers, workers)
    for _ in range(2500):
        kit.clock.advance(0.1)
        for trainer in trainers:
            await trainer.step()
        for worker in workers:
            await worker.pull()
            await worker.beat()
            await worker.lease()
            await worker.work()
        if all(trainer.done for trainer in trainers):
            break
    assert all(trainer.done for trainer in trainers)
    for trainer in trainers:
        assert trainer.version == trainer.steps or epochs is not None
        samples = [sample for batch in trainer.trained.values() for sample in batch]
        assert len(samples) == len(set(samples))
