"""The buffer and the admission of groups beside simple models, through any order of events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from astraflow.dataflow import (
    Dataflow,
    Empty,
    FailurePolicy,
    Heartbeat,
    PolicyFeed,
    RolloutTask,
    SubmitRequest,
    TaskProgress,
    TrainSample,
    Trajectory,
)
from astraflow.dataflow.algorithms.order import EarliestDeadline, FirstIn, LastIn
from astraflow.dataflow.buffer import PolicyBuffer

BOUND = 6


class BufferMachine(RuleBasedStateMachine):
    """A list of (oldest version, arrival, group), looked through from end to end."""

    kit: Any

    @initialize(order=st.sampled_from([EarliestDeadline, FirstIn, LastIn]), by=st.sampled_from(["samples", "groups"]))
    def start(self, order: Any, by: Any) -> None:
        self.order, self.by = order.__name__, by
        self.buffer = PolicyBuffer(order(), by, BOUND)
        self.held: list[tuple[int, int, str]] = []
        self.arrivals = 0

    def unit(self, entry: tuple[int, int, str]) -> object:
        return entry[2] if self.by == "groups" else entry[1]

    def units(self) -> int:
        return len({self.unit(entry) for entry in self.held})

    def remove(self, units: set[object]) -> int:
        before = len(self.held)
        self.held = [entry for entry in self.held if self.unit(entry) not in units]
        return before - len(self.held)

    @rule(version=st.integers(0, 9), newest=st.integers(0, 9), group=st.integers(0, 4))
    def add(self, version: int, newest: int, group: int) -> None:
        self.arrivals += 1
        sample = TrainSample(
            sequence=self.kit.sequence(version=version),
            sample_id=str(self.arrivals),
            group_id=str(group),
            group_mean=0.0,
            group_std=0.0,
            group_size=1,
        )
        _, dropped = self.buffer.add(sample, newest)
        self.held.append((min(version, newest), self.arrivals, str(group)))
        expected = 0
        while self.units() > BOUND:
            expected += self.remove({self.unit(min(self.held))})
        assert len(dropped) == expected

    @rule(oldest=st.integers(0, 10))
    def drop_stale(self, oldest: int) -> None:
        expected = self.remove({self.unit(entry) for entry in self.held if entry[0] < oldest})
        assert len(self.buffer.drop_stale(oldest)) == expected

    @rule(version=st.integers(0, 9))
    def rebase(self, version: int) -> None:
        self.buffer.rebase(version)
        self.held = [(min(oldest, version), arrival, group) for oldest, arrival, group in self.held]

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        keys = {
            "EarliestDeadline": lambda e: (e[0], e[1]),
            "FirstIn": lambda e: (e[1],),
            "LastIn": lambda e: (-e[1],),
        }
        ordered = sorted(self.held, key=keys[self.order])
        first = list(dict.fromkeys(self.unit(entry) for entry in ordered))[:count]
        expected = [e[1] for unit in first for e in ordered if self.unit(e) == unit]
        assert [entry.arrival for entry in self.buffer.take(count)] == expected
        self.remove(set(first))

    @invariant()
    def holds_the_same(self) -> None:
        if hasattr(self, "buffer"):
            assert len(self.buffer) == len(self.held)
            assert self.buffer.units == self.units() <= BOUND


class Side:
    """What admission may know of one policy, kept by the plainest means."""

    def __init__(self, feed: PolicyFeed, samples: int) -> None:
        self.feed = feed
        self.average = float(samples)
        self.buffer: list[int] = []
        self.version = self.incarnation = 0
        self.cut: dict[int, int] = {}
        self.dropped: Counter[str] = Counter()

    def has_room(self, running: int) -> bool:
        waiting = 0
        version = self.version
        while version in self.cut:
            waiting += self.cut[version]
            version += 1
        return running * max(1.0, self.average) + len(self.buffer) + waiting < self.feed.horizon

    def take(self, versions: list[int], failed: int) -> None:
        self.dropped["failed"] += failed
        self.average += 0.1 * (len(versions) - self.average)
        self.buffer = sorted(self.buffer + [min(version, self.version) for version in versions])
        excess = max(0, len(self.buffer) - self.feed.horizon - self.feed.batch_size)
        self.dropped["overflow"] += excess
        del self.buffer[:excess]

    def step(self) -> bool:
        """Cut the batch of this version and publish the next, if there is enough that is not stale."""
        fresh = [version for version in self.buffer if version >= self.version - self.feed.max_staleness]
        self.dropped["stale"] += len(self.buffer) - len(fresh)
        self.buffer = fresh[self.feed.batch_size :] if len(fresh) >= self.feed.batch_size else fresh
        if len(fresh) < self.feed.batch_size:
            return False
        self.cut[self.version] = self.feed.batch_size
        self.version += 1
        return True


SAMPLES = 2


class AdmissionMachine(RuleBasedStateMachine):
    """Two policies with bounds of their own; groups that fail in part, workers that vanish, groups that are too old."""

    kit: Any

    @initialize(staleness=st.tuples(st.integers(0, 2), st.integers(0, 2)), batches=st.tuples(*[st.integers(1, 5)] * 2))
    def start(self, staleness: tuple[int, int], batches: tuple[int, int]) -> None:
        self.loop = asyncio.new_event_loop()
        self.sides = {
            name: Side(PolicyFeed(model_id=name, batch_size=size, max_staleness=bound, steps=10**6), SAMPLES)
            for name, size, bound in zip("ab", batches, staleness, strict=True)
        }
        self.dataflow: Dataflow = self.kit.dataflow(
            [side.feed for side in self.sides.values()],
            n_samples=SAMPLES,
            filters=(),
            max_dropped_batches=10**6,
            max_attempts=10**6,
            worker_grace_s=1e9,
            failures=FailurePolicy(error_results=10**6, quarantine_share=1.0, quarantine_results=10**6),
        )
        self.running: list[RolloutTask] = []
        self.waiting: list[RolloutTask] = []
        self.run(self.kit.start(self.dataflow, "w0", policies="ab"))
        for name, side in self.sides.items():
            side.incarnation = self.run(self.kit.attach(self.dataflow, name))

    def run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.close()

    @rule(most=st.integers(1, 30))
    def lease(self, most: int) -> None:
        """As many as there is room for, in one pass: lost groups first."""
        expected = self.waiting[:most]
        new = 0
        while len(expected) + new < most:
            running = len(self.running) + len(self.waiting) + new
            if not any(side.has_room(running) for side in self.sides.values()):
                break
            new += 1
        granted = list(self.run(self.kit.lease(self.dataflow, most)))
        assert [task.task_id for task in granted[: len(expected)]] == [task.task_id for task in expected]
        assert len(granted) == len(expected) + new
        self.waiting = self.waiting[len(expected) :]
        self.running += granted

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ends=st.lists(st.sampled_from(["good", "bad"]), min_size=SAMPLES, max_size=SAMPLES))
    def submit(self, data: st.DataObject, ends: list[str]) -> None:
        task = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        at = {name: data.draw(st.integers(0, side.version)) for name, side in self.sides.items()}
        outcomes = [
            self.kit.trajectory(dict.fromkeys("ab", 1.0), at) if end == "good" else Trajectory(status="failed")
            for end in ends
        ]
        results = tuple(self.kit.result(task, index, outcome) for index, outcome in enumerate(outcomes))
        assert self.run(self.dataflow.submit(SubmitRequest(results=results))).accepted == SAMPLES
        for name, side in self.sides.items():
            side.take([at[name]] * ends.count("good"), ends.count("bad"))

    @rule(name=st.sampled_from("ab"))
    def step(self, name: str) -> None:
        side = self.sides[name]
        version = side.version
        batch = self.run(self.kit.ask(self.dataflow, side.incarnation, version, name)).batch
        assert (batch is not None) == side.step()
        if batch is not None:
            self.run(self.kit.publish(self.dataflow, side.incarnation, version + 1, name))

    @rule()
    def lose_the_worker(self) -> None:
        self.run(self.dataflow.heartbeat(Heartbeat(worker_id="w0", leaving=True)))
        self.waiting += sorted(self.running, key=lambda task: task.task_id)
        self.running = []
        self.run(self.kit.start(self.dataflow, "w0", policies="ab"))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fall_behind(self, data: st.DataObject) -> None:
        """A group began long ago: it is cancelled if neither policy could train it."""
        place = data.draw(st.integers(0, len(self.running) - 1))
        task = self.running[place]
        began = {name: data.draw(st.integers(0, side.version)) for name, side in self.sides.items()}
        progress = (TaskProgress(task.task_id, 1, began),)
        names = tuple(running.task_id for running in self.running)
        reply = self.run(self.dataflow.heartbeat(Heartbeat(worker_id="w0", tasks=names, progress=progress)))
        past = all(side.version - began[name] > side.feed.max_staleness for name, side in self.sides.items())
        assert reply.cancel == ((task.task_id,) if past else ())
        if past:
            del self.running[place]
            for side in self.sides.values():
                side.dropped["stale"] += SAMPLES
                side.take([], 0)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "dataflow"):
            return
        status = self.run(self.dataflow.status(Empty()))
        assert status.leased == len(self.running)
        for policy in status.policies:
            side = self.sides[policy.model_id]
            assert (policy.version, policy.buffered) == (side.version, len(side.buffer))
            assert policy.dropped == {reason: n for reason, n in side.dropped.items() if n}
            assert policy.buffered <= side.feed.horizon + side.feed.batch_size


@pytest.mark.parametrize("machine", [BufferMachine, AdmissionMachine])
def test_whatever_happens_it_agrees_with_the_model(make_kit: Any, machine: Any) -> None:
    run_state_machine_as_test(
        type(machine.__name__, (machine,), {"kit": make_kit()}),
        settings=settings(max_examples=50, stateful_step_count=40, deadline=None),
    )
