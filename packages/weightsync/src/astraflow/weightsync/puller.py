"""The server's end: bring a sink to the newest version, the slow part while the old weights serve.

`stage` reads, verifies and prepares everything; `Staged.commit` makes it current. Whatever goes wrong before `commit`
leaves the sink's weights as they were, and what the sink holds is checked before a delta is built on it.
"""

from __future__ import annotations

import os
import threading
import time

import anyio
import anyio.to_thread
import structlog
from msgspec.structs import asdict

from .assemble import Assembler
from .fetch import fetching
from .interface import CorruptVersion, PullReport, RemoteStore, Sink, SinkState, Store, TransferMode, WeightSyncError
from .layout import dense_bytes
from .leases import lease
from .manifest import HEAD, Head, VersionRef, decode_head
from .plan import Path, at, choose
from .progress import Counted, Counter, Progress
from .staging import stage

log = structlog.get_logger(__name__)

LOCAL_POLL_S = 0.02
REMOTE_POLL_S = 0.5

_ATTEMPTS = 5
"""Retention may remove a version while it is read; the newest one is then read instead, this often."""


class Staged:
    """A version prepared beside the weights that serve. Ends with `commit` or `abort`, whichever comes first."""

    def __init__(self, sink: Sink, path: Path, assembler: Assembler, stage_s: float) -> None:
        self._sink = sink
        self._path = path
        self._assembler = assembler
        self._stage_s = stage_s
        self._open = True
        self._ending = threading.Lock()

    @property
    def version(self) -> int:
        return self._path.target.version

    def commit(self) -> PullReport:
        """Make it current, all at once. Blocking and short: call it from a thread, while nothing reads the weights.

        Raises WeightSyncError if it has ended; where the sink fails, the old weights are still in place.
        """
        target = self._path.target
        with self._ending:
            if not self._open:
                raise WeightSyncError(
                    f"version {self.version} is no longer staged: it ended, or a later stage took over"
                )
            self._open = False
            started = time.perf_counter()
            try:
                self._sink.commit(SinkState(digest=target.root, version=target.version, incarnation=target.incarnation))
            except BaseException:
                self._sink.abort()
                raise
        return self._report(time.perf_counter() - started)

    def _report(self, commit_s: float) -> PullReport:
        target, seconds = self._path.target, self._assembler.seconds
        report = PullReport(
            version=target.version,
            incarnation=target.incarnation,
            digest=target.root,
            kind=self._path.kind,
            dense_bytes=dense_bytes(self._assembler.layout),
            full_bytes=self._path.full_bytes,
            delta_bytes=self._path.delta_bytes,
            density=self._assembler.density,
            codecs=self._assembler.codecs,
            stage_s=self._stage_s,
            transfer_s=seconds["transfer"],
            verify_s=seconds["verify"],
            decode_s=seconds["decode"],
            apply_s=seconds["apply"],
            commit_s=commit_s,
        )
        log.info("pulled", ratio=round(report.ratio, 1), **asdict(report))
        return report

    def abort(self) -> None:
        """Forget it; the old weights stay. No error if it has ended; waits for a `commit` under way."""
        with self._ending:
            if self._open:
                self._open = False
                self._sink.abort()


class Puller:
    """Brings `sink` to what `store` holds. One pull at a time; its calls to the sink never overlap.

    `mode` and `interval`: see `astraflow.weightsync.plan.choose`; `interval` counts only for `published`. From a store
    behind a link, `connections` ranges are read at once (16 to 32 fill a long one), and with a directory `spool`, which
    no other puller may have, a puller that was killed goes on at the byte where it was. `progress` is told of the
    payload bytes decoded and how many the pull has, from any thread.
    """

    def __init__(
        self,
        store: Store,
        sink: Sink,
        *,
        mode: TransferMode = "auto",
        interval: int = 10,
        connections: int = 16,
        spool: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        if connections < 1:
            raise ValueError("connections is at least 1")
        self._connections = connections
        self._progress = progress
        self._spool = os.fspath(spool) if spool is not None else None
        self._store = store
        self._sink = sink
        self._mode = mode
        self._interval = interval
        self._distrust = False
        self._seen = ""
        self._newest: VersionRef | None = None
        self._staged: Staged | None = None
        self._busy = anyio.Lock()

    async def stage(self, wanted: tuple[int, int] | None = None) -> Staged | None:
        """Prepare the newest version, or the `wanted` one (incarnation, version); None if the sink holds it or it is
        not published yet.

        An earlier `Staged` that has not ended is aborted. Raises CorruptVersion or WrongBase: the old weights stay,
        and the next call takes the full path; VersionGone if the store no longer has the wanted one. Cancellation
        leaves the old weights.
        """
        async with self._busy:
            await anyio.to_thread.run_sync(self._drop)
            started = time.perf_counter()
            for _ in range(_ATTEMPTS):
                head = await anyio.to_thread.run_sync(self._head)
                path = await anyio.to_thread.run_sync(self._choose, head, wanted)
                if path is None:
                    return None
                async with lease(self._store, path.versions):
                    head = await anyio.to_thread.run_sync(self._head)  # only what it names now is under the lease
                    named = set(head.versions) if head is not None else set()
                    assembler = await self._attempt(path) if path.versions <= named else None
                    if assembler is not None:
                        self._staged = Staged(self._sink, path, assembler, time.perf_counter() - started)
                        return self._staged
            raise WeightSyncError(
                f"{self._store.url}: versions were removed while being read, {_ATTEMPTS} times; keep more of them"
            )

    async def pull(self) -> PullReport | None:
        """`stage` and `commit`; for a sink that nothing reads meanwhile. None if there is nothing new."""
        staged = await self.stage()
        return await anyio.to_thread.run_sync(staged.commit) if staged is not None else None

    async def wait(self, timeout: float) -> bool:
        """Whether there is another version than the sink's, as soon as there is; False after `timeout` seconds.

        Looks every LOCAL_POLL_S or REMOTE_POLL_S seconds by a conditional read, which is cheap where nothing changed.
        Raises OSError if the store could not be reached in all that time, CorruptVersion if HEAD is damaged.
        """
        pause = REMOTE_POLL_S if isinstance(self._store, RemoteStore) else LOCAL_POLL_S
        fault: OSError | None = None
        with anyio.move_on_after(timeout):
            while True:
                try:
                    if await anyio.to_thread.run_sync(self._news):
                        return True
                    fault = None
                except OSError as error:
                    fault = error
                await anyio.sleep(pause)
        if fault is not None:
            raise fault
        return False

    def _news(self) -> bool:
        try:
            polled = self._store.poll(HEAD, self._seen)
        except FileNotFoundError:
            return False
        if polled is not None:
            data, self._seen = polled
            self._newest = decode_head(data).newest
        if self._newest is None:
            return False
        state = self._sink.state()
        return (state.digest, state.version, state.incarnation) != (
            self._newest.root,
            self._newest.version,
            self._newest.incarnation,
        )

    def _drop(self) -> None:
        if self._staged is not None:
            self._staged.abort()
            self._staged = None

    def _head(self) -> Head | None:
        try:
            return decode_head(self._store.read(HEAD))
        except FileNotFoundError:
            return None

    def _choose(self, head: Head | None, wanted: tuple[int, int] | None) -> Path | None:
        target = at(head, wanted) if head is not None and wanted is not None else head
        if target is None:
            return None
        back = wanted is not None
        return choose(target, self._sink.state(), self._mode, self._interval, full=self._distrust, back=back)

    async def _attempt(self, path: Path) -> Assembler | None:
        """What was staged; None if it was removed meanwhile."""
        try:
            assembler = await anyio.to_thread.run_sync(Assembler, self._store, path)
            counter = Counter(self._progress, path.full_bytes + path.delta_bytes)
            if isinstance(self._store, RemoteStore):
                async with fetching(self._store, assembler.blobs(), self._connections, self._spool) as link:
                    await stage(assembler.reading(Counted(link, counter)), self._sink)
            else:
                await stage(assembler.reading(Counted(self._store, counter)), self._sink)
        except FileNotFoundError as gone:
            head = await anyio.to_thread.run_sync(self._head)
            if head is None or not path.versions <= set(head.versions):
                return None
            self._distrust = path.anchor is None
            raise CorruptVersion(f"version {path.target.version} is named by HEAD but incomplete") from gone
        except WeightSyncError:
            self._distrust = path.anchor is None
            raise
        self._distrust = False
        return assembler
