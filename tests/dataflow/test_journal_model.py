"""The journal against a simple model: whatever happened, in whatever order, and however often the process died in
between, a dataflow that goes on from the file is the one that wrote it."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow import (
    AttachRequest,
    CommitRequest,
    Dataflow,
    Empty,
    EvalSuite,
    EvaluateRequest,
    EvaluationQuery,
    ListSource,
    PolicyFeed,
    Registration,
    Replay,
    RolloutTask,
    Sampling,
    SubmitRequest,
    TrainBatch,
    Trajectory,
    open_journal,
)

NAMES = ("solver", "verifier")
KEPT = 2
REWARDS = st.lists(st.sampled_from((0.0, 1.0, None, "failed", "later")), min_size=3, max_size=3)


class Trainer:
    """One policy as its trainer knows it: `lineage[v]` made version v + 1."""

    def __init__(self) -> None:
        self.version = 0
        self.incarnation = 0
        self.checkpoints = [0]
        self.lineage: list[TrainBatch] = []
        self.later: dict[int, TrainBatch] = {}
        """What was served and is not in the lineage any more: it must come again, the same."""


class JournalMachine(RuleBasedStateMachine):
    kit_type: Any

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.lives = 0
        self.kit = self.kit_type()
        self.trainers = {name: Trainer() for name in NAMES}
        self.tasks: dict[str, RolloutTask] = {}
        self.settled: set[tuple[str, int]] = set()
        self.evaluations = 0

    @property
    def path(self) -> Path:
        return Path(self.directory.name) / f"{self.lives}.sqlite"

    async def open(self) -> None:
        self.stack = AsyncExitStack()
        journal = await self.stack.enter_async_context(open_journal(self.path))
        suite = EvalSuite(
            name="held_out",
            prompts=self.kit.prompts(2, "held"),
            workflow="math",
            sampling={"solver": Sampling(temperature=0)},
        )
        config = self.kit.config(
            [
                PolicyFeed(model_id="solver", batch_size=4, max_staleness=1, steps=50, replay=Replay(ratio=0.25)),
                PolicyFeed(model_id="verifier", batch_size=3, max_staleness=2, steps=50, order="fifo"),
            ],
            n_samples=3,
            task_deadline_s=1e6,
            worker_silence_s=1e6,
            worker_grace_s=1e7,
            max_dropped_batches=10**6,
            max_attempts=10**6,
            keep_checkpoints=KEPT,
        )
        source = ListSource(self.kit.prompts(7), seed=3, epochs=20)
        self.dataflow = Dataflow(config, source, [suite], journal=journal, clock=self.kit.clock)

    @initialize()
    def begin(self) -> None:
        async def start() -> None:
            await self.open()
            await self.kit.start(self.dataflow, policies=NAMES)
            for name in NAMES:
                self.trainers[name].incarnation = await self.kit.attach(self.dataflow, name)

        self.runner.run(start())

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()
        self.directory.cleanup()

    # --- what happens --------------------------------------------------------------------------------------------

    @rule(most=st.integers(1, 3))
    def lease(self, most: int) -> None:
        for task in self.runner.run(self.kit.lease(self.dataflow, most)):
            assert task.task_id not in self.tasks or task.attempt > self.tasks[task.task_id].attempt
            self.tasks[task.task_id] = task

    @precondition(lambda self: self.tasks)
    @rule(which=st.integers(0, 30), rewards=REWARDS, age=st.integers(0, 3))
    def submit(self, which: int, rewards: list[Any], age: int) -> None:
        """Some of a task's samples, also such as are in already."""
        task = list(self.tasks.values())[-1 - which % len(self.tasks)]
        for index, reward in enumerate(rewards[: task.n_samples]):
            if reward == "later":
                continue
            at = {name: max(0, task.versions.get(name, 0) - age) for name in NAMES}
            trajectory = self.kit.trajectory(dict.fromkeys(NAMES, reward), at)
            if reward == "failed":
                trajectory = Trajectory(status="failed", error="no")
            request = SubmitRequest(results=(self.kit.result(task, index, trajectory),))
            reply = self.runner.run(self.dataflow.submit(request))
            assert reply.accepted + reply.duplicates == 1
            known = (task.task_id, index) in self.settled
            # A failure of an attempt that was lost says nothing about the sample.
            assert reply.accepted == (not known) or (reward == "failed" and not reply.accepted)
            if reply.accepted:
                self.settled.add((task.task_id, index))

    @rule(name=st.sampled_from(NAMES))
    def train(self, name: str) -> None:
        trainer = self.trainers[name]
        batch = self.runner.run(self.kit.ask(self.dataflow, trainer.incarnation, trainer.version, name)).batch
        again = trainer.later.pop(trainer.version, None)
        assert again is None or batch == again, "served again, the same"
        if batch is None:
            return
        assert batch.batch_id not in {old.batch_id for old in trainer.lineage}
        trainer.lineage.append(batch)
        trainer.version += 1
        self.runner.run(self.kit.publish(self.dataflow, trainer.incarnation, trainer.version, name))

    @rule(name=st.sampled_from(NAMES))
    def checkpoint(self, name: str) -> None:
        trainer = self.trainers[name]
        if trainer.version != trainer.checkpoints[-1]:
            trainer.checkpoints = [*trainer.checkpoints, trainer.version][-KEPT:]
        request = CommitRequest(model_id=name, incarnation=trainer.incarnation, version=trainer.version)
        self.runner.run(self.dataflow.commit(request))

    @rule(name=st.sampled_from(NAMES), newest=st.booleans())
    def restart_trainer(self, name: str, newest: bool) -> None:
        """It comes back at a checkpoint that it has."""
        trainer = self.trainers[name]
        version = trainer.checkpoints[-1 if newest else 0]
        trainer.checkpoints = [at for at in trainer.checkpoints if at <= version]
        trainer.later |= dict(enumerate(trainer.lineage[version:], version))
        trainer.version, trainer.lineage = version, trainer.lineage[:version]
        consumed = tuple(batch.batch_id for batch in trainer.lineage)
        request = AttachRequest(model_id=name, version=version, consumed=consumed)
        incarnation = self.runner.run(self.dataflow.attach(request)).incarnation
        assert incarnation == trainer.incarnation + 1
        trainer.incarnation = incarnation
        self.runner.run(self.kit.publish(self.dataflow, incarnation, version, name))

    @rule()
    def restart_worker(self) -> None:
        registration = Registration(worker_id="w0", pool="main", capacity=8, policies=NAMES, pid=self.lives + 1000)
        self.runner.run(self.dataflow.register(registration))

    @rule()
    def evaluate(self) -> None:
        self.evaluations += 1
        request = EvaluateRequest(label=str(self.evaluations), suites=("held_out",))
        self.runner.run(self.dataflow.evaluate(request))

    @rule()
    def die(self) -> None:
        """The process is gone; another one opens what it left."""
        before = self.runner.run(self.seen())
        old, path = self.stack, self.path
        self.lives += 1
        self.kit.copied(path, self.path.name)
        self.runner.run(old.aclose())
        self.runner.run(self.open())
        assert self.runner.run(self.seen()) == before

    # --- what must hold ------------------------------------------------------------------------------------------

    async def seen(self) -> dict[str, Any]:
        """All that a dataflow is, clocks and windows aside."""
        status = await self.dataflow.status(Empty())
        labels = [str(number + 1) for number in range(self.evaluations)]
        reports = [await self.dataflow.evaluation(EvaluationQuery(label=label, wait_s=0.0)) for label in labels]
        tasks = self.dataflow._tasks
        return {
            "phase": status.phase,
            "evaluations": reports,
            "open": {
                name: (task.evaluation, task.group().trajectories, dict(task.newest_version))
                for name, task in tasks._open.items()
            },
            "counts": (tasks.training, tasks.evaluating),
            "dispatch": self.dataflow._dispatch.state(),
            **{
                policy.feed.model_id: (
                    msgspec.msgpack.encode(policy.state()),
                    policy._serving._buffer._entries,
                    policy._batches.names,
                    policy._serving.stages["replay"].state().entries,
                )
                for policy in self.dataflow._policies.values()
            },
        }

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        for trainer in self.trainers.values():
            fresh = [s.sample_id for batch in trainer.lineage for s in batch.samples if not s.replayed]
            assert not [name for name, count in Counter(fresh).items() if count > 1]


def test_whatever_dies_whenever(make_kit: Any) -> None:
    class Machine(JournalMachine):
        kit_type = make_kit

    Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    Machine.TestCase().runTest()
