"""What these tests share: a clock of their own, and short ways to make tasks, results and a running dataflow."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.dataflow import (
    Array,
    AttachRequest,
    BatchReply,
    BatchRequest,
    Control,
    Dataflow,
    DataflowConfig,
    DataflowService,
    EvalSuite,
    Evaluation,
    LeaseRequest,
    ListSource,
    Message,
    PolicyFeed,
    PolicyGroup,
    PolicyVersion,
    Prompt,
    PromptSource,
    Registration,
    RolloutGroup,
    RolloutTask,
    SampleResult,
    Sampling,
    StepReport,
    SubmitReply,
    SubmitRequest,
    TrainSample,
    Trajectory,
    open_journal,
)
from astraflow.dataflow import Sequence as TokenSequence


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.steps: list[StepReport] = []
        self.evaluations: list[Evaluation] = []

    def on_group(self, group: RolloutGroup, /) -> None:
        self.groups.append(group)

    def on_step(self, report: StepReport, /) -> None:
        self.steps.append(report)

    def on_evaluation(self, evaluation: Evaluation, /) -> None:
        self.evaluations.append(evaluation)


class Kit:
    """Makers of everything, with defaults that suit most tests."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.notes = Notes()

    def prompts(self, count: int, source: str = "sums") -> tuple[Prompt, ...]:
        return tuple(
            Prompt(id=f"p{i}", source=source, messages=(Message("user", f"{i} + 1"),), reference=str(i + 1))
            for i in range(count)
        )

    def sequence(
        self, model_id: str = "solver", reward: float | None = 1.0, version: int = 0, length: int = 6
    ) -> TokenSequence:
        mask = np.arange(length) >= length // 2
        return TokenSequence(
            model_id=model_id,
            role="",
            tokens=Array.of(np.arange(1, length + 1, dtype=np.int32)),
            loss_mask=Array.of(mask),
            logprobs=Array.of(np.where(mask, np.float32(-0.5), np.float32(0.0)).astype(np.float32)),
            versions=Array.of(np.where(mask, version, -1).astype(np.int32)),
            temperature=1.0,
            finish_reason="stop",
            reward=reward,
        )

    def samples(self, *rewards: float, version: int = 0, task: str = "t") -> tuple[TrainSample, ...]:
        """One sample a reward, each of a trajectory of its own; statistics come with `PolicyGroup.keeping`."""
        return tuple(
            TrainSample(
                sequence=self.sequence(reward=reward, version=version),
                sample_id=f"{task}/{index}.0",
                group_id=task,
                group_mean=0.0,
                group_std=0.0,
                group_size=0,
            )
            for index, reward in enumerate(rewards)
        )

    def group(self, prompt: Prompt, *rewards: float, version: int = 0, task: str = "t") -> PolicyGroup:
        """A policy's group of a prompt, with these rewards."""
        return PolicyGroup(prompt=prompt).keeping(self.samples(*rewards, version=version, task=task))

    def trajectory(
        self, rewards: Mapping[str, float | None], versions: Mapping[str, int] | None = None, **fields: Any
    ) -> Trajectory:
        """One sequence for each policy in `rewards`."""
        at = versions or {}
        sequences = tuple(self.sequence(name, reward, at.get(name, 0)) for name, reward in rewards.items())
        return Trajectory(sequences=sequences, **fields)

    def holding(self, *sequences: TokenSequence) -> Trajectory:
        return Trajectory(sequences=sequences)

    def task(self, task_id: str, n_samples: int, *names: str) -> RolloutTask:
        """A task as a worker has it."""
        (prompt,) = self.prompts(1)
        return RolloutTask(
            task_id=task_id,
            prompt=prompt,
            workflow="math",
            n_samples=n_samples,
            sampling={name: Sampling() for name in names or ("solver",)},
            seed=0,
            deadline_s=10.0,
        )

    def result(
        self, task: RolloutTask, index: int, trajectory: Trajectory, worker: str = "w0", **fields: Any
    ) -> SampleResult:
        return SampleResult(
            task_id=task.task_id,
            sample_index=index,
            attempt=task.attempt,
            worker_id=worker,
            trajectory=trajectory,
            **fields,
        )

    def config(
        self, policies: Sequence[PolicyFeed] | None = None, *, served: Sequence[str] = (), **fields: Any
    ) -> DataflowConfig:
        feeds = tuple(policies or (PolicyFeed(model_id="solver", batch_size=4, steps=10),))
        names = [feed.model_id for feed in feeds] + list(served)
        defaults = {"workflow": "math", "n_samples": 4, "sampling": {name: Sampling() for name in names}}
        chosen: dict[str, Any] = defaults | fields
        return DataflowConfig(policies=feeds, **chosen)

    def dataflow(
        self,
        policies: Sequence[PolicyFeed] | None = None,
        *,
        source: PromptSource | None = None,
        suites: Sequence[EvalSuite] = (),
        real_time: bool = False,
        **fields: Any,
    ) -> Dataflow:
        config = self.config(policies, **fields)
        chosen = source or ListSource(self.prompts(8), seed=0)
        if real_time:
            return Dataflow(config, chosen, suites, observer=self.notes)
        return Dataflow(config, chosen, suites, observer=self.notes, clock=self.clock)

    def copied(self, journal: Path, name: str) -> Path:
        """The file as a process that dies now would leave it."""
        there = journal.with_name(name)
        for suffix in ("", "-wal"):
            if Path(f"{journal}{suffix}").exists():
                shutil.copy(f"{journal}{suffix}", f"{there}{suffix}")
        return there

    async def start(self, dataflow: DataflowService, *workers: str, policies: Sequence[str] = ("solver",)) -> None:
        for name in workers or ("w0",):
            await dataflow.register(
                Registration(worker_id=name, pool="main", capacity=8, policies=tuple(policies), pid=1)
            )
        await dataflow.control(Control(phase="running"))

    async def lease(self, dataflow: DataflowService, most: int = 1, worker: str = "w0") -> tuple[RolloutTask, ...]:
        return (await dataflow.lease(LeaseRequest(worker_id=worker, max_tasks=most, wait_s=0.0))).tasks

    async def submit(
        self,
        dataflow: DataflowService,
        task: RolloutTask,
        rewards: Sequence[Mapping[str, float | None]],
        versions: Mapping[str, int] | None = None,
        worker: str = "w0",
    ) -> SubmitReply:
        """All samples of a task at once, sample i with `rewards[i]`."""
        results = tuple(
            self.result(task, index, self.trajectory(row, versions), worker) for index, row in enumerate(rewards)
        )
        return await dataflow.submit(SubmitRequest(results=results))

    async def mixed(
        self, dataflow: DataflowService, task: RolloutTask, *names: str, versions: Mapping[str, int] | None = None
    ) -> SubmitReply:
        """All samples of a task, rewards 0 and 1 by turns for every policy named."""
        rows = [{name: float(i % 2) for name in names or ("solver",)} for i in range(task.n_samples)]
        return await self.submit(dataflow, task, rows, versions)

    async def attach(self, dataflow: DataflowService, model_id: str = "solver", version: int = 0) -> int:
        """Attach and publish the weights it starts with; returns the incarnation."""
        attachment = await dataflow.attach(AttachRequest(model_id=model_id, version=version))
        await self.publish(dataflow, attachment.incarnation, version, model_id)
        return attachment.incarnation

    async def publish(
        self, dataflow: DataflowService, incarnation: int, version: int, model_id: str = "solver"
    ) -> None:
        await dataflow.publish(
            PolicyVersion(model_id=model_id, version=version, incarnation=incarnation, weights="mem:x")
        )

    async def ask(
        self,
        dataflow: DataflowService,
        incarnation: int,
        version: int,
        model_id: str = "solver",
        wait_s: float = 0.0,
    ) -> BatchReply:
        return await dataflow.next_batch(
            BatchRequest(model_id=model_id, incarnation=incarnation, version=version, wait_s=wait_s)
        )


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session")
def make_kit() -> type[Kit]:
    """For tests that need a new kit for each of many examples."""
    return Kit


@pytest.fixture
def opened(kit: Kit) -> Callable[..., AbstractAsyncContextManager[Dataflow]]:
    """A dataflow with two policies that goes on from a file."""

    @asynccontextmanager
    async def open_it(path: Path, **fields: Any) -> AsyncIterator[Dataflow]:
        defaults: dict[str, Any] = {
            "policies": (
                PolicyFeed(model_id="solver", batch_size=4, steps=10),
                PolicyFeed(model_id="verifier", batch_size=2, steps=10),
            ),
            "n_samples": 2,
            "filters": (),
        }
        source = fields.pop("source", None) or ListSource(kit.prompts(8), seed=0)
        suites = fields.pop("suites", ())
        config = kit.config(**{**defaults, **fields})
        async with open_journal(path) as journal:
            yield Dataflow(config, source, suites, journal=journal, clock=kit.clock)

    return open_it
