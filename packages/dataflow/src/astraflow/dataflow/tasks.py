"""The tasks that are open: which of their samples are in, which wait to be leased (again), how often they were.

Invariants: every sample of a task is settled once, by whoever comes first; a task leaves by being complete or given
up, and what comes for it later is late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from .interface import RolloutGroup, RolloutTask, SampleResult, Trajectory
from .pins import Vector
from .policy import PolicyStream


class OpenTask:
    """A task and the samples that are in. `newest_version` bounds, per policy, the versions that its tokens may
    count as: a trainer went back to there while the task was under way."""

    def __init__(self, task: RolloutTask, evaluation: str = "") -> None:
        self.task = task
        self.evaluation = evaluation
        self.newest_version: dict[str, int] = {}
        self.last_worker = ""
        self.error = ""
        self.missing = "failed"
        """What the samples that are not in are counted as."""
        self.queued = False
        self.declined: set[str] = set()
        """Workers that cannot have the versions it is pinned to."""
        self._trajectories: dict[int, Trajectory | None] = {}
        self._again: set[int] = set()

    def newest_for(self, model_id: str, version: int) -> int:
        """The newest version that this task's tokens may count as, the policy being at `version`."""
        return min(version, self.newest_version.get(model_id, version))

    def freshest(self, began: Mapping[str, int]) -> dict[str, int]:
        """For each policy the freshest that a sample of the task can be: those open `began` there, those in are as
        old as their oldest tokens. A policy in which an open sample may still begin is left out."""
        found = dict(began)
        for trajectory in self._trajectories.values():
            for sequence in trajectory.sequences if trajectory else ():
                if sequence.model_id in found:
                    found[sequence.model_id] = max(found[sequence.model_id], sequence.oldest_version)
        return found

    def past(self, began: Mapping[str, int], policies: Iterable[PolicyStream]) -> bool:
        """Is what began at these versions too old for every policy? One not begun with may still train it."""
        for policy in policies:
            name = policy.feed.model_id
            if name not in began or not policy.too_old(min(began[name], self.newest_for(name, policy.version))):
                return False
        return True

    def bound(self, versions: Mapping[str, int]) -> bool:
        """Its tokens count as at most these versions; False if they did already."""
        tighter = {
            name: version for name, version in versions.items() if version < self.newest_version.get(name, math.inf)
        }
        self.newest_version.update(tighter)
        return bool(tighter)

    def has(self, sample_index: int) -> bool:
        """Has this attempt's outcome of the sample come?"""
        return sample_index in self._trajectories or sample_index in self._again

    def outlived(self, result: SampleResult) -> bool:
        """A failure of an earlier attempt says nothing about the one that runs now."""
        return result.attempt < self.task.attempt and result.trajectory.status != "ok"

    def run_again(self, sample_index: int, error: str) -> None:
        """The sample failed, and is to run once more with the next attempt."""
        self._again.add(sample_index)
        self.error = self.error or error

    @property
    def returned(self) -> bool:
        """Everything this attempt was to bring is in, and some of it is to run again."""
        return bool(self._again) and len(self._again) + len(self._trajectories) == self.task.n_samples

    def begin_attempt(self) -> None:
        """Whatever is not settled runs in the next attempt."""
        self._again.clear()
        self.task = msgspec.structs.replace(self.task, attempt=self.task.attempt + 1, done=self.settled)

    def settle(self, sample_index: int, trajectory: Trajectory | None, error: str = "") -> None:
        """The sample's outcome: its trajectory, or None if it failed."""
        self._trajectories[sample_index] = trajectory
        self.error = self.error or error

    @property
    def needs(self) -> tuple[frozenset[str], Vector]:
        """The policies a worker must serve, and at which versions."""
        return frozenset(self.task.sampling), self.task.pinned

    @property
    def open_samples(self) -> int:
        """How many samples are not in."""
        return self.task.n_samples - len(self._trajectories)

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


class Seeker:
    """A worker that asks for tasks: it serves these policies, has `left` places for samples, may take `training` tasks
    and, says `may_evaluate`, evaluation tasks of these versions. `others` serve these policies each."""

    def __init__(
        self,
        worker_id: str,
        served: frozenset[str],
        *,
        training: bool,
        may_evaluate: Callable[[Vector], bool],
        others: Callable[[], Sequence[frozenset[str]]],
    ) -> None:
        self.worker_id = worker_id
        self.served = served
        self.left = math.inf
        self.training = training
        self.may_evaluate = may_evaluate
        self._others = others

    def fits(self, task: OpenTask) -> bool:
        """Not one that it lost last or declined, unless no other worker could run it."""
        if task.open_samples > self.left or self.worker_id in task.declined:
            return False
        spared = task.last_worker == self.worker_id
        return not (spared and any(task.task.sampling.keys() <= served for served in self._others()))


class Queue:
    """Tasks that wait for a worker, apart by what they need: what one worker cannot run is not looked through for the
    next task that it can."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[frozenset[str], Vector], deque[OpenTask]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, task: OpenTask, *, first: bool = False) -> None:
        task.queued = True
        self._size += 1
        waiting = self._waiting.setdefault(task.needs, deque())
        if first:
            waiting.appendleft(task)
        else:
            waiting.append(task)

    def take(
        self, served: frozenset[str], fits: Callable[[OpenTask], bool], allowed: Callable[[Vector], bool]
    ) -> OpenTask | None:
        """Remove and return the first task that needs no more than what is `served`, at versions that are `allowed`,
        and that `fits`."""
        for needs, vector in self._waiting:
            if not needs <= served or not allowed(vector):
                continue
            for task in self._waiting[needs, vector]:
                if fits(task):
                    self.discard(task)
                    return task
        return None

    def discard(self, task: OpenTask) -> None:
        """Forget a task, if it waits here."""
        if task.queued:
            waiting = self._waiting[task.needs]
            waiting.remove(task)  # the first one, as a rule
            if not waiting:
                del self._waiting[task.needs]
            task.queued = False
            self._size -= 1


class TaskBoard:
    """The open tasks, and those of them that wait for a worker: evaluation first, then retries."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._open: dict[str, OpenTask] = {}
        self._evaluations = Queue()
        self._retries = Queue()
        self.training = 0
        self.evaluating = 0

    def get(self, task_id: str) -> OpenTask | None:
        return self._open.get(task_id)

    def add(self, task: OpenTask, *, waiting: bool) -> None:
        """Open a task; `waiting` for a worker, or as one is leased it."""
        self._open[task.task.task_id] = task
        if task.task.purpose == "eval":
            self.evaluating += 1
        else:
            self.training += 1
        if waiting:
            queue = self._evaluations if task.task.purpose == "eval" else self._retries
            queue.add(task)

    def retry(self, task: OpenTask) -> bool:
        """The task's worker was lost: let another take it. False if it was leased often enough."""
        if task.task.attempt + 1 >= self._max_attempts:
            return False
        task.begin_attempt()
        if task.task.purpose == "eval":
            self._evaluations.add(task, first=True)
        else:
            self._retries.add(task)
        return True

    def close(self, task: OpenTask) -> None:
        """The task is complete or given up; it is open no more."""
        del self._open[task.task.task_id]
        if task.task.purpose == "eval":
            self._evaluations.discard(task)
            self.evaluating -= 1
        else:
            self._retries.discard(task)
            self.training -= 1

    def waiting(self, seeker: Seeker) -> OpenTask | None:
        """Take the first task that waits and that `seeker` may run, evaluation first."""
        evaluation = self._evaluations.take(seeker.served, seeker.fits, seeker.may_evaluate)
        if evaluation is not None or not seeker.training:
            return evaluation
        return self._retries.take(seeker.served, seeker.fits, lambda vector: True)

    @property
    def waiting_evaluations(self) -> int:
        return len(self._evaluations)

    @property
    def waiting_retries(self) -> int:
        return len(self._retries)

    def put_back(self, task: OpenTask) -> None:
        """An evaluation task was declined: it waits again, for another worker."""
        self._evaluations.add(task, first=True)

    def training_tasks(self) -> Iterator[OpenTask]:
        return iter([task for task in self._open.values() if task.task.purpose == "train"])
