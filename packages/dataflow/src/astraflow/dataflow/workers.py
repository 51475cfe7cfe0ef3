"""The rollout workers: who they are, when they were heard of last, what they say they do.

Invariant: a worker is alive iff it was heard of within the silence limit and did not say that it leaves; one silent for
much longer is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from .failures import FailurePolicy, Record
from .figures import WorkerStatus
from .interface import Registration, WorkerStats

FORGET_AFTER = 20
"""Silence limits after which a worker disappears from the status."""


class Worker:
    """One worker's introduction, last sign of life and figures."""

    def __init__(self, registration: Registration, failures: FailurePolicy, now: float) -> None:
        self.introduce(registration)
        self.record = Record(failures)
        self.heard_at = now
        self.stats = WorkerStats()
        self._full_bytes = 0
        self._delta_bytes = 0
        self._pause_s = 0.0

    def introduce(self, registration: Registration) -> None:
        self.registration = registration
        self.serves = frozenset(registration.policies)
        self.left = False

    def take(self, stats: WorkerStats) -> None:
        self.stats = stats
        self._full_bytes += stats.pulled_full_bytes
        self._delta_bytes += stats.pulled_delta_bytes
        self._pause_s += stats.swap_pause_s

    def status(self, now: float, alive: bool) -> WorkerStatus:
        stats = self.stats
        return WorkerStatus(
            worker_id=self.registration.worker_id,
            pool=self.registration.pool,
            capacity=self.registration.capacity,
            alive=alive,
            running=stats.running if alive else 0,
            tokens_per_s=stats.generated_tokens / stats.seconds if alive and stats.seconds > 0 else 0.0,
            versions=stats.versions,
            silent_s=max(0.0, now - self.heard_at),
            pulled_full_bytes=self._full_bytes,
            pulled_delta_bytes=self._delta_bytes,
            swap_pause_s=self._pause_s,
            quarantine=self.record.reason if self.record.set_aside(now) else "",
        )


class Pool(msgspec.Struct, frozen=True):
    """Workers of one pool. `size` is in the balance rule's unit: GPUs, or workers where there are none."""

    name: str
    unit: str
    size: float
    workers: int
    capacity: int
    running: int
    policies: frozenset[str]

    @classmethod
    def of(cls, name: str, workers: Sequence[Worker]) -> Pool:
        gpus = sum(worker.registration.gpus for worker in workers)
        return cls(
            name=name,
            unit="GPUs" if gpus else "workers",
            size=gpus or float(len(workers)),
            workers=len(workers),
            capacity=sum(worker.registration.capacity for worker in workers),
            running=sum(worker.stats.running for worker in workers),
            policies=frozenset().union(*(worker.serves for worker in workers)),
        )


class Workers:
    """All workers. `heard_at` is when any of them was heard of last."""

    def __init__(self, silence_s: float, failures: FailurePolicy, now: float) -> None:
        self._silence_s = silence_s
        self._failures = failures
        self._workers: dict[str, Worker] = {}
        self.heard_at = now

    def register(self, registration: Registration, now: float) -> bool:
        """Returns True if this is another process than the one known by that name: what that one ran is lost."""
        known = self.hear(registration.worker_id, now)
        if known is not None and known.registration.pid == registration.pid:
            known.introduce(registration)
            return False
        self._workers[registration.worker_id] = Worker(registration, self._failures, now)
        self.heard_at = now
        return known is not None

    def hear(self, worker_id: str, now: float) -> Worker | None:
        """A sign of life; None from a stranger."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            worker.heard_at = self.heard_at = now
        return worker

    def note(self, worker_id: str, error: str | None, now: float) -> Worker | None:
        """A result of this worker (`error` None: it went well). Returns the worker if it is set aside from now on."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return None
        worker.record.outcomes.add(error)
        if error is None:
            return None
        others = (other.record.outcomes for other in self._serving(now) if other is not worker)
        return worker if worker.record.judge(others, now) else None

    def serving(self, worker: Worker, now: float) -> bool:
        """May this worker have tasks? One that was set aside may if no other is left."""
        return not worker.record.set_aside(now) or not self._serving(now)

    def _serving(self, now: float) -> list[Worker]:
        workers = self._workers.values()
        return [worker for worker in workers if self.alive(worker, now) and not worker.record.set_aside(now)]

    def counts(self, now: float) -> tuple[int, int]:
        """How many workers are alive, and how many of these are set aside."""
        alive = [worker for worker in self._workers.values() if self.alive(worker, now)]
        return len(alive), sum(worker.record.set_aside(now) for worker in alive)

    def alive(self, worker: Worker, now: float) -> bool:
        return not worker.left and now - worker.heard_at <= self._silence_s

    def names(self, policies: Collection[str], now: float) -> set[str]:
        """The live workers that serve all of these policies."""
        wanted = set(policies)
        return {name for name, worker in self._workers.items() if self.alive(worker, now) and wanted <= worker.serves}

    def served_by_others(self, worker_id: str, now: float) -> list[frozenset[str]]:
        """What each other live worker serves that may have tasks."""
        return [worker.serves for worker in self._serving(now) if worker.registration.worker_id != worker_id]

    def sweep(self, now: float) -> set[str]:
        """The names of the silent; those silent for very long are forgotten."""
        forgotten = [
            name for name, worker in self._workers.items() if now - worker.heard_at > FORGET_AFTER * self._silence_s
        ]
        silent = {name for name, worker in self._workers.items() if not self.alive(worker, now)}
        for name in forgotten:
            del self._workers[name]
        return silent

    def next_silence(self, now: float) -> float:
        """When the next live worker would count as silent; infinity without one."""
        times = (worker.heard_at + self._silence_s for worker in self._workers.values() if self.alive(worker, now))
        return min(times, default=math.inf)

    def pools(self, now: float) -> list[Pool]:
        """The pools of the live workers, by name."""
        pools: dict[str, list[Worker]] = {}
        for worker in self._workers.values():
            if self.alive(worker, now):
                pools.setdefault(worker.registration.pool, []).append(worker)
        return [Pool.of(name, workers) for name, workers in sorted(pools.items())]

    def statuses(self, now: float) -> tuple[WorkerStatus, ...]:
        return tuple(worker.status(now, self.alive(worker, now)) for worker in self._workers.values())
