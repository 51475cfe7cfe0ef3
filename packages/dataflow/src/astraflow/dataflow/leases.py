"""Who holds which task, and until when.

Invariants: a task is held by at most one worker; a lease ends by its deadline at the latest, earlier when its worker
falls silent or no longer names it. Time is an argument, so that tests own the clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import msgspec


class Lease(msgspec.Struct):
    """`expires_at` and `named_at` (last granted or named by a heartbeat) are on the caller's clock, in seconds."""

    task_id: str
    worker_id: str
    expires_at: float
    named_at: float


class LeaseBook:
    """The leases of now."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_worker: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, task_id: str, worker_id: str, now: float, deadline_s: float) -> None:
        self.end(task_id)
        self._leases[task_id] = Lease(task_id, worker_id, now + deadline_s, now)
        self._by_worker.setdefault(worker_id, set()).add(task_id)

    def end(self, task_id: str) -> None:
        """Forget a lease; nothing happens if there is none."""
        lease = self._leases.pop(task_id, None)
        if lease is not None:
            held = self._by_worker[lease.worker_id]
            held.discard(task_id)
            if not held:
                del self._by_worker[lease.worker_id]

    def holder(self, task_id: str) -> str | None:
        lease = self._leases.get(task_id)
        return lease.worker_id if lease is not None else None

    def of(self, worker_id: str) -> tuple[str, ...]:
        """The tasks a worker holds, in the order of their leases' end."""
        held = self._by_worker.get(worker_id, ())
        return tuple(sorted(held, key=lambda task_id: (self._leases[task_id].expires_at, task_id)))

    def name(self, worker_id: str, tasks: Iterable[str], now: float) -> None:
        """A heartbeat named these tasks: those this worker holds are alive."""
        for task_id in tasks:
            lease = self._leases.get(task_id)
            if lease is not None and lease.worker_id == worker_id:
                lease.named_at = now

    def unnamed(self, worker_id: str, before: float) -> tuple[str, ...]:
        """The tasks of a worker that it has not named since `before`: the grant's reply was lost, or the task."""
        return tuple(task_id for task_id in self.of(worker_id) if self._leases[task_id].named_at < before)

    def lost(self, now: float, dead: Collection[str]) -> tuple[str, ...]:
        """The tasks whose deadline has passed or whose worker is dead."""
        return tuple(
            lease.task_id for lease in self._leases.values() if lease.expires_at <= now or lease.worker_id in dead
        )

    def next_deadline(self) -> float:
        """When the next lease expires; infinity without leases."""
        return min((lease.expires_at for lease in self._leases.values()), default=math.inf)
