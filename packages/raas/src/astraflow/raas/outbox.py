"""Results on their way to the dataflow: kept until acknowledged, those that are ready together sent together.

Invariant: a result leaves the outbox only when the dataflow has answered for it. A repeated submit is harmless: the
dataflow knows a (task, sample) it has taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import msgspec
import structlog

from astraflow.dataflow import DataflowService, SampleResult, SubmitReply, SubmitRequest, Trajectory
from astraflow.rpc import FrameTooLarge

from .patience import persist

MOST_RESULTS = 64
MOST_BYTES = 8 << 20
"""Bounds of one submit; a single larger result goes alone."""

SUBMIT_TIMEOUT_S = 30.0

log = structlog.get_logger(__name__)


class Outbox:
    """Sends results; `on_sent` hears of each that the dataflow has answered for."""

    def __init__(
        self, dataflow: DataflowService, on_sent: Callable[[SampleResult], None], *, patience_s: float
    ) -> None:
        self._dataflow = dataflow
        self._on_sent = on_sent
        self._patience_s = patience_s
        self._pending: deque[SampleResult] = deque()
        self._filled = anyio.Event()
        self._emptied = anyio.Event()
        self._emptied.set()

    def put(self, result: SampleResult) -> None:
        self._pending.append(result)
        self._filled.set()
        if self._emptied.is_set():
            self._emptied = anyio.Event()

    async def flushed(self) -> None:
        """Wait until everything was answered for."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            Unavailable, TimeoutError: the dataflow was away for longer than the patience.
        """
        while True:
            await self._filled.wait()
            batch = next_batch(self._pending)
            reply = await self._submit(batch)
            for line in reply.rejected:
                log.warning("result_rejected", reason=line)
            for result in batch:
                self._pending.popleft()
                self._on_sent(result)
            if not self._pending:
                self._filled = anyio.Event()
                self._emptied.set()

    async def _submit(self, batch: list[SampleResult]) -> SubmitReply:
        request = SubmitRequest(results=tuple(batch))
        try:
            return await self._persist(request)
        except FrameTooLarge as error:
            if len(batch) > 1:
                replies = [await self._submit([result]) for result in batch]
                return SubmitReply(
                    accepted=sum(reply.accepted for reply in replies),
                    duplicates=sum(reply.duplicates for reply in replies),
                    rejected=tuple(line for reply in replies for line in reply.rejected),
                )
            log.error("result_too_large", task_id=batch[0].task_id, sample=batch[0].sample_index, error=str(error))
            failed = Trajectory(status="failed", error=f"the result is too large to submit: {error}")
            return await self._persist(SubmitRequest(results=(msgspec.structs.replace(batch[0], trajectory=failed),)))

    async def _persist(self, request: SubmitRequest) -> SubmitReply:
        return await persist(
            "submit",
            lambda: self._dataflow.submit(request),
            timeout_s=SUBMIT_TIMEOUT_S,
            patience_s=self._patience_s,
        )


def next_batch(pending: deque[SampleResult]) -> list[SampleResult]:
    """The oldest results within the bounds of one submit; at least one."""
    batch: list[SampleResult] = []
    size = 0
    for result in pending:
        size += sum(13 * len(sequence.tokens.data) // 4 for sequence in result.trajectory.sequences)
        if batch and (size > MOST_BYTES or len(batch) == MOST_RESULTS):
            break
        batch.append(result)
    return batch
