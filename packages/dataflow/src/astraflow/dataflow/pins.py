"""Which workers evaluate, and at which versions.

Invariants: a worker that holds evaluation tasks holds them at one vector of versions, and is given nothing else until
they are done; while training goes on, at most a share of the live workers evaluates, and always at least one may.
"""

from __future__ import annotations

from .interface import PolicyVersion

Vector = tuple[PolicyVersion, ...]


class Pins:
    """`share` of the workers may evaluate while others roll out for training."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._tasks: dict[str, set[str]] = {}
        self._vectors: dict[str, Vector] = {}
        self._holders: dict[str, str] = {}

    def __len__(self) -> int:
        """Workers that evaluate now."""
        return len(self._vectors)

    def evaluates(self, worker_id: str) -> bool:
        return worker_id in self._vectors

    def free(self, alive: int, *, training: bool) -> bool:
        """May another of so many live workers begin to evaluate?"""
        return len(self._vectors) < (max(1, int(self._share * alive)) if training else alive)

    def may_take(self, worker_id: str, vector: Vector, alive: int, *, training: bool) -> bool:
        """May this worker take a task of this vector?"""
        held = self._vectors.get(worker_id)
        return self.free(alive, training=training) if held is None else held == vector

    def take(self, worker_id: str, task_id: str, vector: Vector) -> None:
        self._vectors[worker_id] = vector
        self._tasks.setdefault(worker_id, set()).add(task_id)
        self._holders[task_id] = worker_id

    def end(self, task_id: str) -> None:
        """The task is with its worker no more; nothing happens if it was no evaluation task."""
        worker_id = self._holders.pop(task_id, None)
        if worker_id is None:
            return
        held = self._tasks[worker_id]
        held.discard(task_id)
        if not held:
            del self._tasks[worker_id], self._vectors[worker_id]
