"""CPU work off the event loop: numpy, the codecs and the hashes release the GIL, so plain threads over frames do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import anyio
import anyio.to_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

WORKERS = min(4, os.cpu_count() or 1)


async def run_all(job: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`job(item)` for every item, at most WORKERS at once; results in order.

    The first exception stops the others before their next item and is raised as it is; so does a cancellation.
    No thread outlives the call.
    """
    results: dict[int, Result] = {}
    failures: list[Exception] = []
    waiting = iter(enumerate(items))
    limiter = anyio.CapacityLimiter(WORKERS)

    async def work() -> None:
        for position, item in waiting:
            try:
                results[position] = await anyio.to_thread.run_sync(job, item, limiter=limiter)
            except Exception as failure:
                failures.append(failure)
                group.cancel_scope.cancel()
                return

    async with anyio.create_task_group() as group:
        for _ in range(min(WORKERS, len(items))):
            group.start_soon(work)
    if failures:
        raise failures[0]
    return [results[position] for position in range(len(items))]


def in_order(job: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`job(item)` for every item on WORKERS threads, in order, at most that many ahead of who asks; for a thread that
    writes the results one after the other. Items are taken in the caller's thread. No thread outlives the iterator."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(job, item))
                if len(waiting) > WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
