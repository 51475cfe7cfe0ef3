"""What a worker holds: the leased tasks and which of their samples are not yet with the dataflow.

Pure bookkeeping. Invariant: a sample is held from its task's lease until its result was acknowledged or its task was
dropped, so what the worker holds in memory, unsent results included, is bounded by its capacity and one group.
"""

from __future__ import annotations

import anyio

from astraflow.dataflow import RolloutTask, TaskProgress

from .meter import Meter

Key = tuple[str, int]
"""(task id, attempt): a task that comes back to the same worker is another one."""


RESERVE = 0.05
"""Share of its time by which a task is given up before the lease ends, at most `MOST_RESERVE_S` seconds: so that what
timed out is told while the group still waits for it."""

MOST_RESERVE_S = 1.0


class Held:
    """One leased task: `leased_at` and `deadline` are on anyio's clock. The deadline moves as tokens come, up to the
    task's limit; cancelling `scope` ends its rollouts."""

    def __init__(self, task: RolloutTask, leased_at: float) -> None:
        self.task = task
        self.leased_at = leased_at
        self.scope = anyio.CancelScope()
        self.open = set(range(task.n_samples)) - set(task.done)
        self.meters = {index: Meter() for index in self.open}
        self.deadline = leased_at + shortened(min(task.deadline_s, task.limit_s))
        self._tokens = 0

    def progress(self, now: float) -> TaskProgress:
        """How far the task is; its deadline moves if it has more tokens than when this was last asked."""
        tokens = sum(meter.read() for meter in self.meters.values())
        if tokens > self._tokens:
            self._tokens = tokens
            limit = self.leased_at + shortened(self.task.limit_s)
            self.deadline = max(self.deadline, min(now + shortened(self.task.deadline_s), limit))
        began = [self.meters[index].began for index in self.open]
        everywhere = set.intersection(*(set(versions) for versions in began)) if began else set()
        newest = {model_id: max(versions[model_id] for versions in began) for model_id in everywhere}
        return TaskProgress(self.task.task_id, tokens, newest)

    def time_out(self) -> None:
        """Time is up: whatever of it runs or waits ends now."""
        for meter in self.meters.values():
            meter.scope.cancel()

    @property
    def key(self) -> Key:
        return self.task.task_id, self.task.attempt


class Ledger:
    """The tasks held, and room for more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[Key, Held] = {}
        self._samples = 0
        self._changed = anyio.Event()

    @property
    def free(self) -> int:
        """Samples that may still be taken on; at most 0 when full."""
        return self._capacity - self._samples

    @property
    def pinned(self) -> bool:
        """Is any task held that must run at certain versions?"""
        return any(held.task.pinned for held in self._held.values())

    def task_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task_id for task_id, _ in self._held))

    def progress(self, now: float) -> tuple[TaskProgress, ...]:
        return tuple(held.progress(now) for held in self._held.values())

    def take(self, held: Held) -> None:
        self._held[held.key] = held
        self._samples += len(held.open)

    def settle(self, key: Key, index: int) -> None:
        """A sample's result is with the dataflow; nothing happens if its task was dropped meanwhile."""
        held = self._held.get(key)
        if held is None or index not in held.open:
            return
        held.open.discard(index)
        self._release(1)
        if not held.open:
            del self._held[key]

    def drop(self, task_id: str) -> bool:
        """End the rollouts of a task, all attempts; returns whether it was held."""
        keys = [key for key in self._held if key[0] == task_id]
        for key in keys:
            held = self._held.pop(key)
            held.scope.cancel()
            self._release(len(held.open))
        return bool(keys)

    async def room(self) -> int:
        """Wait until there is room; returns how much."""
        while self.free <= 0:
            await self._changed.wait()
        return self.free

    def _release(self, samples: int) -> None:
        self._samples -= samples
        self._changed.set()
        self._changed = anyio.Event()


def shortened(seconds: float) -> float:
    """A lease's time less the reserve."""
    return seconds - min(MOST_RESERVE_S, RESERVE * seconds)
