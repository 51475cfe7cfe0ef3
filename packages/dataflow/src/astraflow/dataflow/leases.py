"""Who holds which task, and until when.

Invariants: a task is held by at most one worker; a lease ends when nothing was heard of new tokens for its deadline,
however long the answer is, and at its limit in any case; earlier when its worker falls silent or no longer names it.
Every call costs the logarithm of the leases at most, or what one worker holds. Time is an argument, so that tests own
the clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable

import msgspec

SPARE = 64
"""Entries of ended leases that the heap may hold beyond twice the living ones."""


class Lease(msgspec.Struct, eq=False):
    """`expires_at`, `limit_at` and `named_at` (last granted or named by a heartbeat) are on the caller's clock, in
    seconds; `tokens` is what the worker said was sampled so far."""

    task_id: str
    worker_id: str
    expires_at: float
    limit_at: float
    deadline_s: float
    named_at: float
    tokens: int = 0


class LeaseBook:
    """The leases of now."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._by_worker: dict[str, set[str]] = {}
        self._granted = 0
        # (expiry when pushed, order, lease): an entry may be of an ended or extended lease, and is put right when met.
        self._due: list[tuple[float, int, Lease]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, task_id: str, worker_id: str, now: float, deadline_s: float, limit_s: float = math.inf) -> None:
        """A lease that ends `deadline_s` seconds after the last new token, and `limit_s` after now in any case."""
        self.end(task_id)
        expires_at = now + min(deadline_s, limit_s)
        lease = Lease(task_id, worker_id, expires_at, now + limit_s, deadline_s, now)
        self._leases[task_id] = lease
        self._by_worker.setdefault(worker_id, set()).add(task_id)
        self._push(lease)

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

    def progress(self, worker_id: str, task_id: str, tokens: int, now: float) -> bool:
        """The worker has sampled `tokens` tokens of this task so far. More than before keep the lease; returns whether
        they were."""
        lease = self._leases.get(task_id)
        if lease is None or lease.worker_id != worker_id or tokens <= lease.tokens:
            return False
        lease.tokens = tokens
        lease.expires_at = max(lease.expires_at, min(now + lease.deadline_s, lease.limit_at))
        return True

    def unnamed(self, worker_id: str, before: float) -> tuple[str, ...]:
        """The tasks of a worker that it has not named since `before`: the grant's reply was lost, or the task."""
        held = self._by_worker.get(worker_id, ())
        lost = [task_id for task_id in held if self._leases[task_id].named_at < before]
        return tuple(sorted(lost))

    def lost(self, now: float, dead: Collection[str]) -> tuple[str, ...]:
        """The tasks whose lease has ended by time or whose worker is dead."""
        expired: list[Lease] = []
        while self.next_deadline() <= now:
            expired.append(heapq.heappop(self._due)[2])
        for lease in expired:
            self._push(lease)
        orphans = (task_id for worker_id in dead for task_id in self.of(worker_id))
        return tuple(dict.fromkeys([*(lease.task_id for lease in expired), *orphans]))

    def next_deadline(self) -> float:
        """When the next lease expires; infinity without leases. Puts the top of the heap right."""
        while self._due:
            pushed_for, _, lease = self._due[0]
            if self._leases.get(lease.task_id) is not lease:
                heapq.heappop(self._due)
            elif lease.expires_at > pushed_for:
                heapq.heapreplace(self._due, self._entry(lease))
            else:
                return pushed_for
        return math.inf

    def _push(self, lease: Lease) -> None:
        heapq.heappush(self._due, self._entry(lease))
        if len(self._due) > 2 * len(self._leases) + SPARE:
            self._due = [self._entry(living) for living in self._leases.values()]
            heapq.heapify(self._due)

    def _entry(self, lease: Lease) -> tuple[float, int, Lease]:
        self._granted += 1
        return lease.expires_at, self._granted, lease
