"""Which worker gets which task: evaluation first, then tasks that lost their worker, then new prompts.

Invariants: a task is open from its first lease until it is complete or given up; it is leased at most `max_attempts`
times, to one worker at a time, and to another one than the one that lost it where there is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from hashlib import blake2b

import msgspec

from .algorithms.stage import AlgorithmFailed
from .config import DataflowConfig
from .interface import LeaseRequest, Prompt, RolloutTask
from .journal import Closed, Leased, OldTask, Opened, Record
from .leases import LeaseBook
from .pins import Pins
from .sources import PromptSource, SourceFailed
from .tasks import OpenTask, Seeker, TaskBoard
from .workers import Worker, Workers

SWEEP_S = 0.05
"""Leases and workers are looked through at most this often."""


class DispatchState(msgspec.Struct, frozen=True, kw_only=True):
    """What survives a restart beside the open tasks and the source."""

    drawn: int
    exhausted: bool


class Dispatch:
    """The open tasks, the leases on them and the workers that hold them. `record` takes down what becomes of tasks."""

    def __init__(
        self, config: DataflowConfig, source: PromptSource, now: float, record: Callable[[Record], None]
    ) -> None:
        self._config = config
        self._record = record
        self._source = source
        self.source_failure = ""
        self._drawn = 0
        self.exhausted = False
        self.workers = Workers(config.worker_silence_s, config.failures, now)
        self.leases = LeaseBook()
        self.pins = Pins(config.evaluation_share)
        self.tasks = TaskBoard(config.max_attempts)
        self.next_sweep = now

    def grant(
        self,
        worker: Worker,
        request: LeaseRequest,
        now: float,
        *,
        versions: dict[str, int],
        training: Callable[[], bool],
        room: Callable[[int], bool],
        admits: Callable[[Prompt], bool],
    ) -> tuple[RolloutTask, ...]:
        """What a worker asks for, leased at `versions`. `training`: may training tasks be leased; `room(running)`: may
        a new one start; `admits(prompt)`: is this prompt worth one."""
        name = worker.registration.worker_id
        seeker = Seeker(
            name,
            worker.serves,
            training=False,
            may_evaluate=lambda vector: self.pins.may_take(
                name, vector, self.workers.counts(now)[0], training=training()
            ),
            others=lambda: self.workers.served_by_others(name, now),
        )
        granted: list[RolloutTask] = []
        samples = 0
        while len(granted) < request.max_tasks:
            # A worker that has any place gets a task, however large.
            seeker.left = request.max_samples - samples if request.max_samples and granted else math.inf
            # One that evaluates stays at its versions and takes nothing else.
            seeker.training = training() and not self.pins.evaluates(name)
            task = self.tasks.waiting(seeker)
            if task is None and seeker.training and self._config.sampling.keys() <= worker.serves:
                fits = self._config.n_samples <= seeker.left and room(self.tasks.training)
                task = self._draw(admits, now) if fits else None
            if task is None:
                break
            granted.append(self._lease(task, name, now, versions))
            samples += task.open_samples
        return tuple(granted)

    def has_work(self, *, training: bool, room: Callable[[int], bool], now: float) -> bool:
        """Is there a task for some worker?"""
        if self.tasks.waiting_evaluations and self.pins.free(self.workers.counts(now)[0], training=training):
            return True
        if not training:
            return False
        return self.tasks.waiting_retries > 0 or (not self.exhausted and room(self.tasks.training))

    def decline(self, worker_id: str, task_id: str, now: float) -> OpenTask | None:
        """A worker cannot have the versions that a task is pinned to. Returns the task if no live worker can."""
        task = self.tasks.get(task_id)
        if task is None or self.leases.holder(task_id) != worker_id:
            return None
        self._free(task_id)
        task.declined.add(worker_id)
        able = self.workers.names(task.task.sampling.keys(), now) - task.declined
        if not able:
            versions = ", ".join(f"{pinned.model_id} {pinned.version}" for pinned in task.task.pinned)
            task.error = f"no worker can have the versions it is pinned to ({versions})"
            return task
        self.tasks.put_back(task)
        return None

    def _free(self, task_id: str) -> None:
        """Its worker has the task no more."""
        self.leases.end(task_id)
        self.pins.end(task_id)

    def state(self) -> DispatchState:
        return DispatchState(drawn=self._drawn, exhausted=self.exhausted)

    def restore(self, state: DispatchState, tasks: Iterable[OldTask], now: float) -> None:
        """Go on from there: a task is held by the worker that had it last, which may not have noticed anything."""
        self._drawn, self.exhausted = state.drawn, state.exhausted
        for old in tasks:
            task = OpenTask(old.task, evaluation=old.evaluation)
            task.newest_version = dict(old.newest_version)
            task.last_worker = old.worker_id
            for index, trajectory in old.trajectories.items():
                task.settle(index, trajectory, old.errors.get(index, ""))
            self.tasks.add(task, waiting=not old.worker_id)
            if old.worker_id:
                self._hold(old.task, old.worker_id, now)

    def open(self, task: OpenTask) -> None:
        """The task exists from now on."""
        self.tasks.add(task, waiting=task.task.purpose == "eval")
        self._record(Opened(task.task, task.evaluation))

    def end(self, task: OpenTask) -> None:
        """The task is complete or given up."""
        self._record(Closed(task.task.task_id))
        self.tasks.close(task)
        self._free(task.task.task_id)

    def lose(self, task_ids: Iterable[str]) -> list[OpenTask]:
        """These tasks lost their workers: they wait for others. Returns those that were leased often enough, to be
        given up."""
        given_up: list[OpenTask] = []
        for task_id in task_ids:
            self._free(task_id)
            task = self.tasks.get(task_id)
            if task is not None and not self.tasks.retry(task):
                task.error = task.error or f"task {task_id}: not complete after {task.task.attempt + 1} leases"
                given_up.append(task)
        return given_up

    def sweep(self, now: float) -> tuple[str, ...]:
        """The tasks whose deadline has passed or whose worker is silent, if it is time to look."""
        if now < self.next_sweep:
            return ()
        lost = self.leases.lost(now, self.workers.sweep(now))
        due = min(self.leases.next_deadline(), self.workers.next_silence(now) + SWEEP_S)
        self.next_sweep = max(now + SWEEP_S, due)
        return lost

    def sweep_by(self, when: float) -> None:
        """Something may be due at `when`."""
        self.next_sweep = min(self.next_sweep, when)

    def _lease(self, task: OpenTask, worker_id: str, now: float, versions: dict[str, int]) -> RolloutTask:
        least = versions if task.task.purpose == "train" and self._config.synchronous else task.task.min_versions
        task.task = msgspec.structs.replace(task.task, versions=versions, min_versions=least)
        task.last_worker = worker_id
        self._record(Leased(task.task.task_id, worker_id, task.task.attempt))
        self._hold(task.task, worker_id, now)
        return task.task

    def _hold(self, task: RolloutTask, worker_id: str, now: float) -> None:
        """The worker has the task from now on."""
        self.leases.grant(task.task_id, worker_id, now, task.deadline_s, task.limit_s)
        self.sweep_by(now + min(task.deadline_s, self._config.worker_silence_s))
        if task.purpose == "eval":
            self.pins.take(worker_id, task.task_id, task.pinned)

    def _draw(self, admits: Callable[[Prompt], bool], now: float) -> OpenTask | None:
        """Open a task for the source's next prompt that is worth it, if it has one."""
        if self.exhausted or self.source_failure:
            return None
        try:
            prompt = self._source.next()
            while prompt is not None and not admits(prompt):
                prompt = self._source.next()
        except (SourceFailed, AlgorithmFailed) as error:
            self.source_failure = f"no more prompts can be had: {error}"
            return None
        if prompt is None:
            self.exhausted = self._source.ended
            if not self.exhausted:
                self.sweep_by(now + SWEEP_S)  # the source waits for more itself: look again soon
            return None
        task_id = f"{prompt.source}/{self._drawn}"
        self._drawn += 1
        digest = blake2b(f"{self._config.seed}/{task_id}".encode(), digest_size=4).digest()
        task = OpenTask(
            RolloutTask(
                task_id=task_id,
                prompt=prompt,
                workflow=self._config.workflow,
                n_samples=self._config.n_samples,
                sampling=self._config.sampling,
                seed=int.from_bytes(digest, "big") >> 1,
                deadline_s=self._config.task_deadline_s,
                limit_s=self._config.limit_s,
            )
        )
        self.open(task)
        return task
