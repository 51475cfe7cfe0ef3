"""Payloads over a link: many ranges at once over kept connections, ahead of who decodes them, resumed where cut.

Invariants: a byte that arrived is not asked for again; memory holds at most `MEMORY` of what was not read yet, besides
the parts that a reader waits for; a part that brings nothing for PATIENCE_S ends the transfer.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import chain

import anyio
import anyio.from_thread
import anyio.to_thread
import structlog

from .interface import CorruptVersion, RemoteStore
from .pulse import Pulse
from .spool import FileSpool, MemorySpool, Spool, Stretch, cut_parts

MEMORY = 256 << 20
PATIENCE_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0

log = structlog.get_logger(__name__)


@asynccontextmanager
async def fetching(
    store: RemoteStore, blobs: Sequence[Stretch], connections: int, directory: str | None
) -> AsyncIterator[Link]:
    """Fetch `blobs` while the block runs; it reads them from the Link. With a `directory`, what arrived stays there
    until the block has ended well, and a later call goes on with it. What the block raises goes through as it is."""
    spool = await anyio.to_thread.run_sync(FileSpool, directory) if directory is not None else MemorySpool()
    link = Link(store, blobs, spool)
    failures: list[Exception] = []
    try:
        await anyio.to_thread.run_sync(link.open)
        async with anyio.create_task_group() as tasks:
            for _ in range(connections):
                tasks.start_soon(link.lane)
            try:
                yield link
            except Exception as failure:
                failures.append(failure)
            tasks.cancel_scope.cancel()
        if isinstance(spool, FileSpool) and (not failures or isinstance(failures[0], CorruptVersion)):
            await anyio.to_thread.run_sync(spool.keep_only, ())
    finally:
        if isinstance(spool, FileSpool):
            spool.close()
    if failures:
        raise failures[0]


class _Part:
    """One range on its way. `unread`: bytes nobody read yet; `wanted`: somebody waits for it."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.size = stretch.stop - stretch.start
        self.have = 0
        self.unread = self.size
        self.wanted = False
        self.here = anyio.Event()


class Link:
    """The parts of a transfer. `read` is for worker threads; all else belongs to the event loop."""

    def __init__(self, store: RemoteStore, blobs: Sequence[Stretch], spool: Spool) -> None:
        self._store = store
        self._spool = spool
        cut = [[_Part(part) for part in cut_parts(blob)] for blob in blobs]
        self._blobs = {blob.key: parts for blob, parts in zip(blobs, cut, strict=True)}
        self._waiting = dict.fromkeys(_in_step(cut))
        self._held = 0
        self._failure: Exception | None = None
        self._work = Pulse()

    def open(self) -> None:
        """Go on with what an earlier process left. Blocking."""
        if isinstance(self._spool, FileSpool):
            self._spool.keep_only(part.stretch for part in self._waiting)
        for part in list(self._waiting):
            part.have = self._spool.have(part.stretch)
            if part.have == part.size:
                del self._waiting[part]
                part.here.set()

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Bytes of a blob, once they are here; fewer where it ends. Blocks: call it from a worker thread of anyio's.

        Raises what ended the transfer: FileNotFoundError, OSError.
        """
        if key not in self._blobs:
            return self._store.read(key, offset, length)
        stop = self._blobs[key][-1].stretch.stop if length is None else offset + length
        parts = [part for part in self._blobs[key] if part.stretch.start < stop and part.stretch.stop > offset]
        anyio.from_thread.run(self._arrive, parts)
        pieces = [
            self._spool.read(part.stretch, max(offset, part.stretch.start), min(stop, part.stretch.stop))
            for part in parts
        ]
        anyio.from_thread.run_sync(self._consume, parts, [len(piece) for piece in pieces])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _arrive(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.wanted = True
            if part.unread <= 0 and self._spool.in_memory:  # read and dropped before: once more
                part.have, part.unread, part.here = 0, part.size, anyio.Event()
                self._waiting[part] = None
            if part in self._waiting:  # to the front, whatever memory holds
                self._waiting = {part: None, **self._waiting}
        self._work.beat()
        for part in parts:
            await part.here.wait()
            if self._failure is not None:
                raise self._failure

    def _consume(self, parts: Sequence[_Part], sizes: Sequence[int]) -> None:
        for part, size in zip(parts, sizes, strict=True):
            part.unread -= size
            if part.unread <= 0 and self._spool.in_memory:
                self._spool.drop(part.stretch)
                self._held -= part.size
        self._work.beat()

    def _take(self) -> _Part | None:
        part = next(iter(self._waiting), None)
        if part is None or (self._spool.in_memory and not part.wanted and self._held + part.size > MEMORY):
            return None
        del self._waiting[part]
        self._held += part.size
        return part

    async def lane(self) -> None:
        """One connection's work: part after part. What ends the transfer is told to who reads, a cancellation too."""
        failure: Exception = ConnectionAbortedError("the transfer was cancelled")
        try:
            while self._failure is None:
                part = self._take()
                if part is None:
                    await self._work.wait()
                    continue
                await self._fetch(part)
                part.here.set()
        except Exception as error:
            failure = error
        finally:
            self._end(failure)

    def _end(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
            for part in chain.from_iterable(self._blobs.values()):
                part.here.set()
            self._work.beat()

    async def _fetch(self, part: _Part) -> None:
        arrived = anyio.current_time()
        pause = FIRST_PAUSE_S
        while part.have < part.size:
            before = part.have
            try:
                await self._receive(part)
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as error:
                if part.have > before:
                    arrived, pause = anyio.current_time(), FIRST_PAUSE_S
                elif anyio.current_time() - arrived > PATIENCE_S:
                    raise
                log.debug(
                    "cut off, going on", store=self._store.url, at=part.stretch.start + part.have, error=str(error)
                )
                await anyio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                if part.have < part.size and part.have == before:
                    at = part.stretch.start + part.have
                    raise CorruptVersion(f"{self._store.url}/{part.stretch.key} ends at byte {at}: it is damaged")

    async def _receive(self, part: _Part) -> None:
        stretch = part.stretch
        async with aclosing(self._store.stream(stretch.key, stretch.start + part.have, stretch.stop)) as pieces:
            async for piece in pieces:
                data = piece[: part.size - part.have]
                with anyio.CancelScope(shield=True):
                    if self._spool.in_memory:
                        self._spool.append(stretch, data)
                    else:
                        await anyio.to_thread.run_sync(self._spool.append, stretch, data)
                    part.have += len(data)


def _in_step(blobs: Sequence[Sequence[_Part]]) -> list[_Part]:
    """The parts of all blobs in the order in which frames need them: all blobs advance together."""
    placed = [(number / len(parts), part) for parts in blobs for number, part in enumerate(parts)]
    return [part for _, part in sorted(placed, key=lambda item: item[0])]
