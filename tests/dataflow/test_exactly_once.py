"""Every sequence ends in one way, whatever order things happen in: trained once, dropped for a counted reason, or
still in the buffer; and every failed sample is counted once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.dataflow import (
    AttachRequest,
    Dataflow,
    Empty,
    Heartbeat,
    ListSource,
    PolicyFeed,
    RolloutTask,
    SubmitRequest,
    TrainBatch,
    Trajectory,
)

NAMES = ("solver", "verifier")
WORKERS = ("w0", "w1")
REWARDS = (0.0, 1.0, None, "failed")

actions = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.sampled_from(WORKERS), st.integers(1, 3)),
        st.tuples(st.just("submit"), st.integers(0, 20), st.lists(st.sampled_from(REWARDS), min_size=3, max_size=3)),
        st.tuples(st.just("train"), st.sampled_from(NAMES), st.booleans()),
        st.tuples(st.just("restart"), st.sampled_from(NAMES), st.integers(0, 2)),
        st.tuples(st.just("pass"), st.floats(0, 15), st.just(0)),
        st.tuples(st.just("beat"), st.sampled_from(WORKERS), st.booleans()),
    ),
    min_size=30,
    max_size=80,
)


class Model:
    """Drives a dataflow and keeps books of its own."""

    def __init__(self, kit: Any) -> None:
        feeds = [
            PolicyFeed(model_id="solver", batch_size=4, max_staleness=1, steps=6),
            PolicyFeed(model_id="verifier", batch_size=3, max_staleness=0, steps=6, order="fifo"),
        ]
        self.kit = kit
        self.dataflow: Dataflow = kit.dataflow(
            feeds,
            source=ListSource(kit.prompts(5), seed=1, epochs=6),
            n_samples=3,
            task_deadline_s=20.0,
            worker_silence_s=10.0,
            worker_grace_s=1e9,
            max_dropped_batches=10**6,
        )
        self.tasks: dict[str, RolloutTask] = {}
        self.incarnation = dict.fromkeys(NAMES, 0)
        self.version = dict.fromkeys(NAMES, 0)
        self.floor = dict.fromkeys(NAMES, 0)
        self.batches: dict[tuple[str, int], TrainBatch] = {}
        self.committed: list[TrainBatch] = []

    async def start(self) -> None:
        await self.kit.start(self.dataflow, *WORKERS, policies=NAMES)
        for name in NAMES:
            self.incarnation[name] = await self.kit.attach(self.dataflow, name)

    async def act(self, action: tuple[Any, Any, Any]) -> None:
        kind, first, second = action
        await getattr(self, f"do_{kind}")(first, second)

    async def do_lease(self, worker: str, most: int) -> None:
        for task in await self.kit.lease(self.dataflow, most, worker):
            self.tasks[task.task_id] = task

    async def do_submit(self, which: int, rewards: list[Any]) -> None:
        if not self.tasks:
            return
        task = list(self.tasks.values())[which % len(self.tasks)]
        results = []
        for index, reward in enumerate(rewards):
            trajectory = self.kit.trajectory(dict.fromkeys(NAMES, reward), task.versions)
            if reward == "failed":
                trajectory = Trajectory(status="failed", error="no")
            if (which + index) % 4:
                results.append(self.kit.result(task, index, trajectory))
        await self.dataflow.submit(SubmitRequest(results=tuple(results)))

    async def do_train(self, name: str, publish: bool) -> None:
        version = self.version[name]
        batch = (await self.kit.ask(self.dataflow, self.incarnation[name], version, name)).batch
        if batch is None:
            return
        assert batch == self.batches.setdefault((name, version), batch), "the same batch for the same version"
        assert 0 < len(batch.samples) <= (4 if name == "solver" else 3)
        if publish:
            self.version[name] = version + 1
            await self.kit.publish(self.dataflow, self.incarnation[name], version + 1, name)

    async def do_restart(self, name: str, back: int) -> None:
        # A trainer goes back to its newest checkpoint at most: to where it attached before.
        self.version[name] = max(self.floor[name], self.version[name] - back)
        request = AttachRequest(model_id=name, version=self.version[name])
        for key in [key for key in self.batches if key[0] == name and key[1] < self.version[name]]:
            self.committed.append(self.batches.pop(key))
        self.floor[name] = self.version[name]
        self.incarnation[name] = (await self.dataflow.attach(request)).incarnation
        await self.kit.publish(self.dataflow, self.incarnation[name], self.version[name], name)

    async def do_pass(self, seconds: float, _: int) -> None:
        self.kit.clock.advance(seconds)

    async def do_beat(self, worker: str, naming: bool) -> None:
        await self.dataflow.heartbeat(Heartbeat(worker_id=worker, tasks=tuple(self.tasks) if naming else ()))

    async def check(self) -> None:
        status = await self.dataflow.status(Empty())
        groups = [group for group in self.kit.notes.groups if group.task.purpose == "train"]
        assert len({group.task.task_id for group in groups}) == len(groups)
        for policy in status.policies:
            batches = [b for b in (*self.committed, *self.batches.values()) if b.model_id == policy.model_id]
            trained = Counter(sample.sample_id for batch in batches for sample in batch.samples)
            assert all(count == 1 for count in trained.values())
            made = {
                f"{group.task.task_id}/{index}.{position}"
                for group in groups
                for index, trajectory in enumerate(group.trajectories)
                for position, sequence in enumerate(trajectory.sequences if trajectory else ())
                if sequence.model_id == policy.model_id
            }
            failed = sum(trajectory is None for group in groups for trajectory in group.trajectories)
            assert trained.keys() <= made
            assert policy.consumed == trained.total()
            gone = sum(policy.dropped.values())
            assert policy.consumed + policy.buffered + gone == len(made) + failed


@given(actions)
@settings(max_examples=200, deadline=None)
def test_every_sequence_ends_once(make_kit: Any, sequence: list[tuple[Any, Any, Any]]) -> None:
    async def run() -> None:
        model = Model(make_kit())
        await model.start()
        for action in sequence:
            await model.act(action)
        await model.check()

    asyncio.run(run())
