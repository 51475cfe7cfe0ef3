"""The tasks that are open: which of their samples are in, which wait to be leased (again), how often they were.

Invariants: every sample of a task is settled once, by whoever comes first; a task leaves by being complete or given
up, and what comes for it later is late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

import msgspec

from .interface import RolloutGroup, RolloutTask, Trajectory


class OpenTask:
    """A task and the samples that are in. `newest_version` bounds, per policy, the versions that its tokens may
    count as: a trainer went back to there while the task was under way."""

    def __init__(self, task: RolloutTask, evaluation: str = "") -> None:
        self.task = task
        self.evaluation = evaluation
        self.newest_version: dict[str, int] = {}
        self.last_worker = ""
        self.error = ""
        self._trajectories: dict[int, Trajectory | None] = {}

    def has(self, sample_index: int) -> bool:
        return sample_index in self._trajectories

    def settle(self, sample_index: int, trajectory: Trajectory | None, error: str = "") -> None:
        """The sample's outcome: its trajectory, or None if it failed."""
        self._trajectories[sample_index] = trajectory
        self.error = self.error or error

    @property
    def settled(self) -> tuple[int, ...]:
        return tuple(sorted(self._trajectories))

    @property
    def complete(self) -> bool:
        return len(self._trajectories) == self.task.n_samples

    def group(self) -> RolloutGroup:
        """The group as it is: what is not in counts as failed."""
        ordered = tuple(self._trajectories.get(index) for index in range(self.task.n_samples))
        return RolloutGroup(task=self.task, trajectories=ordered)


class TaskBoard:
    """The open tasks, and those of them that wait for a worker: evaluation first, then retries."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._open: dict[str, OpenTask] = {}
        self._evaluations: deque[str] = deque()
        self._retries: deque[str] = deque()
        self.training = 0
        self.evaluating = 0

    def get(self, task_id: str) -> OpenTask | None:
        return self._open.get(task_id)

    def add(self, task: OpenTask) -> None:
        """Open a task; an evaluation task waits for a worker, a training task is opened as it is leased."""
        self._open[task.task.task_id] = task
        if task.task.purpose == "eval":
            self._evaluations.append(task.task.task_id)
            self.evaluating += 1
        else:
            self.training += 1

    def retry(self, task: OpenTask) -> bool:
        """The task's worker was lost: let another take it. False if it was leased often enough."""
        attempt = task.task.attempt + 1
        if attempt >= self._max_attempts:
            return False
        task.task = msgspec.structs.replace(task.task, attempt=attempt, done=task.settled)
        if task.task.purpose == "eval":
            self._evaluations.appendleft(task.task.task_id)
        else:
            self._retries.append(task.task.task_id)
        return True

    def close(self, task: OpenTask) -> None:
        """The task is complete or given up; it is open no more."""
        del self._open[task.task.task_id]
        if task.task.purpose == "eval":
            self.evaluating -= 1
        else:
            self.training -= 1

    def waiting(
        self, worker_id: str, policies: Collection[str], *, training: bool, others: Sequence[frozenset[str]]
    ) -> OpenTask | None:
        """Take the first task that waits and this worker may run: it serves the task's policies, and it is not the
        one that just lost it, unless none of the `others` serves them. Retries of training tasks only if `training`."""
        queues = (self._evaluations, self._retries) if training else (self._evaluations,)
        for queue in queues:
            for _ in range(len(queue)):
                task = self._open.get(queue[0])
                if task is None:
                    queue.popleft()
                    continue
                needed = task.task.sampling.keys()
                spared = task.last_worker == worker_id and any(needed <= served for served in others)
                if needed <= set(policies) and not spared:
                    queue.popleft()
                    return task
                queue.rotate(-1)
        return None

    def training_tasks(self) -> Iterator[OpenTask]:
        return iter([task for task in self._open.values() if task.task.purpose == "train"])
