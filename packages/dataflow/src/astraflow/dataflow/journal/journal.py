"""The journal of a dataflow: what happened is in a file before anybody is told of it.

The dataflow records facts as they come to be and awaits `durable` before it answers. A thread of its own writes all
that came together in one transaction, with a snapshot of the small states as they were at that moment; while it
writes, more gathers (group commit). Invariants: the file holds the state after some prefix of the operations, at least
of those that were answered; the event loop never waits for the disk; a write that failed fails the run.

A transaction survives the death of the process as soon as it is written. One that holds a batch or an attachment is
also synced, so that what a trainer may act upon survives the loss of power; what workers brought after the last sync is
rolled out again then.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from ..interface import Phase, RunFailed, TrainBatch, Trajectory
from .apply import Writer
from .records import Record, Settled, StateSet
from .restore import Reader, Restored
from .schema import JournalError, locked, open_for_reading, open_for_writing
from .thread import WriterThread

LOOK_S = 2.0
STALLED_LOOKS = 60
"""A disk that has not taken what was handed to it after so many looks has failed. Looks, not seconds: a process that
stood still (a debugger, a suspended machine) looks again first."""

FULL_BYTES = 64 << 20
"""Payload bytes waiting to be written from which on submits wait."""

STATE_SHARE = 0.02
"""Share of the event loop's time that states which need not be exact may take."""

log = structlog.get_logger(__name__)
encode = msgspec.msgpack.Encoder().encode


class NoJournal:
    """Keeps nothing: the dataflow lives and dies with its process."""

    restored: Restored | None = None
    failure = ""
    keeps = False
    """Can batches be had from it?"""

    def follow(self, name: str, state: Callable[[], Any], *, exact: bool = True) -> None:
        """Keep what `state` gives (plain values or structures) with the records, as it is when they are written.

        One that is not `exact` is kept less often when it is costly to take: it may be behind by a moment.
        """

    def record(self, record: Record) -> None:
        """Take something down. What is recorded without an await in between is written together or not at all."""

    def check(self) -> None:
        """Raises RunFailed if it cannot be written."""
        if self.failure:
            raise RunFailed(self.failure)

    async def room(self) -> None:
        """Wait while the disk is far behind. Raises RunFailed if it failed."""

    async def durable(self) -> None:
        """Wait until all that was recorded so far is in the file. Raises RunFailed if it could not be written."""

    async def batch(self, batch_id: str) -> TrainBatch:
        """A batch that may be served again."""
        raise LookupError(f"batch {batch_id} is not kept: there is no journal")


class Journal(NoJournal):
    """Made by `open_journal`; used on its event loop."""

    keeps = True

    def __init__(self, path: Path, restored: Restored | None, write: Callable[[list[Record]], None]) -> None:
        self.path = path
        self.restored = restored
        self.failure = ""
        self._loop = asyncio.get_running_loop()
        self._thread = WriterThread(write, f"journal {path.name}")
        self._states: list[_State] = []
        self._pending: list[Record] = []
        self._bytes = 0
        self._recorded = 0
        self._durable = 0
        self._writing = False
        self._scheduled = False
        self._closed = False
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._watch: asyncio.TimerHandle | None = None

    def follow(self, name: str, state: Callable[[], Any], *, exact: bool = True) -> None:
        before = self.restored.state.get(name) if self.restored else None
        self._states.append(_State(name, state, exact, before))

    def record(self, record: Record) -> None:
        if self._closed or self.failure:
            return
        self._pending.append(record)
        self._recorded += 1
        if isinstance(record, Settled):
            self._bytes += size_of(record.trajectory)
        if not self._writing and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._hand_over)

    async def room(self) -> None:
        while self._bytes > FULL_BYTES:
            await self.durable()
        self.check()

    async def durable(self) -> None:
        if self._durable < self._recorded and not self.failure:
            written = self._loop.create_future()
            self._waiters.append((self._recorded, written))
            await written
        self.check()

    async def batch(self, batch_id: str) -> TrainBatch:
        def read() -> TrainBatch:
            with closing(open_for_reading(self.path)) as connection:
                return Reader(connection).batch(batch_id)

        return await anyio.to_thread.run_sync(read)

    async def close(self) -> None:
        """Write what is left; nothing is taken down any more. Raises RunFailed if it could not be written."""
        for state in self._states:
            state.exact = True
        self._hand_over()
        self._closed = True
        try:
            await self.durable()
        finally:
            await anyio.to_thread.run_sync(self._thread.stop)

    def _hand_over(self) -> None:
        """Give the thread all that gathered, unless it is writing: then what gathers goes next."""
        self._scheduled = False
        if self._writing or self.failure or not self._pending:
            return
        records, self._pending = self._pending, []
        upto, written_bytes = self._recorded, self._bytes
        records.extend(set_ for state in self._states if (set_ := state.changed()) is not None)
        self._writing = True
        self._watch = self._loop.call_later(LOOK_S, self._look, STALLED_LOOKS)
        self._thread.put(
            records, lambda error: self._loop.call_soon_threadsafe(self._written, upto, written_bytes, error)
        )

    def _written(self, upto: int, written_bytes: int, error: Exception | None) -> None:
        self._writing = False
        if self._watch is not None:
            self._watch.cancel()
        if error is not None:
            self._fail(f"{type(error).__name__}: {error}")
        if self.failure:
            return
        self._durable = upto
        self._bytes -= written_bytes
        self._wake(upto)
        self._hand_over()

    def _look(self, left: int) -> None:
        """The thread is still writing."""
        if left == 0:
            self._fail(f"nothing could be written for {STALLED_LOOKS * LOOK_S:g} s")
        else:
            self._watch = self._loop.call_later(LOOK_S, self._look, left - 1)

    def _wake(self, upto: int) -> None:
        """Those who wait for no more than that."""
        while self._waiters and self._waiters[0][0] <= upto:
            written = self._waiters.popleft()[1]
            if not written.done():  # its waiter may have been cancelled
                written.set_result(None)

    def _fail(self, cause: str) -> None:
        self.failure = (
            f"the journal {self.path} cannot be written ({cause}): the run stops, so that nothing is lost; what was "
            "acknowledged is in it. Make room or mend the disk, then start the dataflow again"
        )
        log.error("journal_failed", journal=str(self.path), cause=cause)
        self._pending.clear()
        self._wake(self._recorded)


class _State:
    """One followed state: its name, where it comes from, what was written last."""

    def __init__(self, name: str, state: Callable[[], Any], exact: bool, written: bytes | None) -> None:
        self.exact = exact
        self._name = name
        self._state = state
        self._written = written
        self._due = 0.0

    def changed(self) -> StateSet | None:
        """What is to be written, if that is another than before and, where it need not be exact, its turn."""
        began = time.perf_counter()
        if not self.exact and began < self._due:
            return None
        value = encode(self._state())
        ended = time.perf_counter()
        self._due = ended + (ended - began) / STATE_SHARE
        if value == self._written:
            return None
        self._written = value
        return StateSet(self._name, value)


def size_of(trajectory: Trajectory | None) -> int:
    """Bytes of a trajectory's arrays."""
    if trajectory is None:
        return 0
    return sum(
        len(array.data)
        for sequence in trajectory.sequences
        for array in (sequence.tokens, sequence.loss_mask, sequence.logprobs, sequence.versions)
    )


def reopen_journal(path: Path) -> None:
    """Let a run that was stopped or had ended be taken up again by whoever opens its journal next. Blocks.

    Raises:
        JournalError: there is none, or it cannot be used.
    """
    if not path.is_file():
        raise JournalError(f"there is no journal at {path}")
    with locked(path), closing(open_for_writing(path)) as connection:
        phase: Phase = "starting"
        connection.execute("UPDATE state SET value = ? WHERE key = 'phase'", (encode(phase),))


@asynccontextmanager
async def open_journal(path: Path) -> AsyncIterator[Journal]:
    """The journal at `path`, made if it is not there, with what it holds already in `restored`.

    It must be on a local file system. The block holds it alone; at its end everything is written.

    Raises:
        JournalError: another dataflow holds it, it is not a journal, or of another schema, or it cannot be opened.
    """
    with ExitStack() as stack:
        try:
            await anyio.to_thread.run_sync(stack.enter_context, locked(path))
            connection = await anyio.to_thread.run_sync(open_for_writing, path)
            stack.callback(connection.close)
            restored = await anyio.to_thread.run_sync(Reader(connection).restore)
        except (OSError, sqlite3.Error) as error:
            raise JournalError(f"the journal {path} cannot be opened: {error}") from error
        journal = Journal(path, restored, Writer(connection).write)
        try:
            yield journal
        finally:
            with anyio.CancelScope(shield=True):
                await journal.close()
