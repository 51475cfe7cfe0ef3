"""A relay for one region: a store that follows another one, so that each byte crosses the slow link once.

Whoever pulls behind it reads from its directory. What it gives out as payload has the digests that the manifest says;
its `HEAD` names only versions that are here completely, or, with `cut_through`, also those on their way, whose bytes a
reader then gets as they arrive. It goes on with what it has when it is killed and started again, or when the source is
gone.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread
import msgspec
import structlog

from .contents import Blob, contents
from .directory_store import DirectoryStore
from .files import lock_file
from .following import complete_run, fetch_order, succeeds
from .incoming import HAVE, Incoming
from .interface import CorruptVersion, Entry, Located, Store, WeightSyncError
from .leases import LEASES, lease, remove_old
from .manifest import HEAD, Head, VersionRef, decode_head, decode_manifest, encode_head, manifest_key, read_manifest
from .pulse import Pulse

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

_INCOMING = ".incoming"
_LOCK = ".mirror.lock"
_THREADS = 8
_PATIENCE_S = 60.0
"""A reader of what is on its way gives up when nothing arrived for so long."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 30.0


class MirrorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is what the mirror's HEAD names (-1: none yet), `source_version` the source's as last seen.
    `missing_bytes` are still to come, `arrived_bytes` came since the start. `fault` is why it does not go on."""

    version: int = -1
    incarnation: int = 0
    source_version: int = -1
    missing_bytes: int = 0
    arrived_bytes: int = 0
    fault: str = ""


class _Version(NamedTuple):
    """What it consists of; its manifest's bytes until they are here."""

    parts: tuple[Blob, ...]
    manifest: bytes | memoryview | None


class Mirror:
    """Follows `source` in `directory`, between `async with`; a `RemoteStore` to read from, read-only but for leases.

    Looks for new versions every `interval` seconds, and at once when told by `notice`. Fetches over `connections`
    requests at once. One process a directory: raises WeightSyncError on entering if there is another. Its blocking
    methods may be called from any thread but the event loop's.
    """

    def __init__(
        self,
        source: Store,
        directory: str | os.PathLike[str],
        *,
        cut_through: bool = False,
        connections: int = 16,
        interval: float = 1.0,
    ) -> None:
        if connections < 1 or interval <= 0:
            raise ValueError("connections is at least 1, interval above 0")
        self._source = source
        self._root = Path(directory).absolute()
        self._local = DirectoryStore(directory)
        self._cut_through = cut_through
        self._connections = connections
        self._interval = interval
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._head: Head | None = None
        self._target: Head | None = None
        self._seen = ""
        self._incoming: dict[str, Incoming] = {}
        self._versions: dict[VersionRef, _Version] = {}
        self._tags: dict[str, str] = {}
        self._arrived = 0
        self._round = self._looked = 0
        self._looking = _Patience(source.url)
        self._fetching = _Patience(source.url)
        self._moving = anyio.Lock()
        self._noticed = anyio.Event()
        self._work = Pulse()
        self._changed = Pulse()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            taken = f"{self._root} is another mirror's; each needs a directory of its own"
            lock = await self._run(lock_file, self._root / _LOCK, taken)
            stack.callback(os.close, lock)
            self._portal = await stack.enter_async_context(anyio.from_thread.BlockingPortal())
            stack.push_async_callback(self._portal.stop, cancel_remaining=True)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            await self._restore()
            self._tasks.start_soon(self._follow)
            self._tasks.start_soon(self._lease)
            for _ in range(self._connections):
                self._tasks.start_soon(self._lane)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What the body raised goes on as it is, in no group."""
        try:
            await self._stack.__aexit__(kind, error, trace)
        except ExceptionGroup as group:
            if _leaves(group) != [error]:
                raise
        finally:
            self._incoming = {}

    @property
    def url(self) -> str:
        return self._local.url

    @property
    def status(self) -> MirrorStatus:
        return MirrorStatus(
            version=self._head.newest.version if self._head else -1,
            incarnation=self._head.newest.incarnation if self._head else 0,
            source_version=self._target.newest.version if self._target else -1,
            missing_bytes=sum(incoming.missing_bytes for incoming in self._incoming.values()),
            arrived_bytes=self._arrived + sum(incoming.arrived for incoming in self._incoming.values()),
            fault=self._looking.fault or self._fetching.fault or next((str(fault) for fault in self._faults()), ""),
        )

    def notice(self) -> None:
        """There is a new version at the source: look now. From the event loop."""
        self._noticed.set()

    async def caught_up(self) -> MirrorStatus:
        """Look once more, and wait until all is here that the source names. No deadline: the caller's.

        Raises CorruptVersion if something is damaged at the source.
        """
        after = self._round
        self.notice()
        while self._looked <= after or not self._target or self._incoming or self._head != self._target:
            for fault in self._faults():
                if isinstance(fault, CorruptVersion):
                    raise CorruptVersion(*fault.args)
            await self._changed.wait()
        return self.status

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        incoming = self._incoming.get(key)
        if incoming is None:
            return self._local.read(key, offset, length)
        stop = incoming.blob.size if length is None else min(incoming.blob.size, offset + length)
        try:
            return self._portal.call(self._read, incoming, offset, stop)
        except CancelledError:
            raise ConnectionError(f"{self.url} ended while {key} was read") from None

    async def stream(self, key: str, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """Bytes [start, stop) as they arrive; raises TimeoutError if the source is silent."""
        step = 1 << 20
        while start < stop:
            incoming = self._incoming.get(key)
            if incoming is not None:
                stop = min(stop, incoming.blob.size)
                data = await self._read(incoming, start, min(stop, start + step))
            else:
                data = await self._run(self._local.read, key, start, min(step, stop - start))
            if not data:
                return
            yield data
            start += len(data)

    def poll(self, key: str, seen: str = "") -> tuple[bytes, str] | None:
        return self._local.poll(key, seen)

    def locate(self, key: str) -> Located:
        """A blob's tag is the same while it arrives and when it is here. Raises FileNotFoundError."""
        incoming = self._incoming.get(key)
        if incoming is not None:
            return Located(incoming.blob.size, self._tags[key], None)
        here = self._local.locate(key)
        return here._replace(tag=self._tags.get(key, here.tag))

    def list(self, prefix: str) -> list[str]:
        return [entry.key for entry in self.entries(prefix)]

    def entries(self, prefix: str) -> Sequence[Entry]:
        """What is here completely."""
        return [entry for entry in self._local.entries(prefix) if not entry.key.startswith(".")]

    def put(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._writable(key)
        self._local.put(key, chunks)

    def swap(self, key: str, old: bytes | None, new: bytes) -> bool:
        self._writable(key)
        return self._local.swap(key, old, new)

    def delete(self, key: str) -> None:
        self._writable(key)
        self._local.delete(key)

    def _writable(self, key: str) -> None:
        if not key.startswith(LEASES):
            raise PermissionError(f"{self.url} mirrors {self._source.url}: publish there, not {key} here")

    async def _read(self, incoming: Incoming, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        await incoming.wait(start, stop, _PATIENCE_S)
        try:
            return await incoming.read(start, stop)
        except FileNotFoundError:  # complete meanwhile, so under its own name
            return await self._run(self._local.read, incoming.blob.key, start, stop - start)

    async def _restore(self) -> None:
        """What an earlier process left: serve it, and go on with what it had begun."""
        try:
            head = decode_head(await self._run(self._local.read, HEAD))
            versions = {ref: await self._run(self._load, self._local, ref) for ref in head.versions}
        except (FileNotFoundError, CorruptVersion):  # the source has it again
            return
        self._head = head
        await self._adopt(head, versions)

    async def _follow(self) -> None:
        forgiven = anyio.current_time()
        while True:
            self._noticed = anyio.Event()
            self._round += 1
            try:
                if await self._look():
                    self._looking.worked()
                async with self._moving:
                    await self._move_head()
                self._looked = self._round
            except (OSError, WeightSyncError) as error:
                self._looking.failed(error)
            self._changed.beat()
            if anyio.current_time() > forgiven + _LONGEST_WAIT_S:
                forgiven = anyio.current_time()
                self._forgive()
            with anyio.move_on_after(self._interval):
                await self._noticed.wait()
            await self._looking.over()

    async def _look(self) -> bool:
        """Whether the source has a HEAD. Raises OSError, WeightSyncError."""
        try:
            polled = await self._run(self._source.poll, HEAD, self._seen)
        except FileNotFoundError as error:
            self._looking.told(error)
            return False
        if polled is None:
            return True
        data, tag = polled
        head = decode_head(data)
        if self._target is None or succeeds(head, self._target):
            await self._adopt(head, {ref: await self._run(self._load, self._source, ref) for ref in head.versions})
        self._seen = tag
        return True

    async def _lease(self) -> None:
        """Have the source keep what is being fetched."""
        while True:
            target = self._target
            if target is None or not self._incoming:
                await self._changed.wait()
                continue
            async with lease(self._source, target.versions):
                while self._incoming and self._target is target:
                    await self._changed.wait()

    def _forgive(self) -> None:
        """Try again what failed: the source may have been mended."""
        for incoming in self._incoming.values():
            incoming.forgive()
            self._tasks.start_soon(self._resume, incoming)
        self._work.beat()

    def _load(self, source: Store, ref: VersionRef) -> _Version:
        """From the manifest, here or at `source`. Blocking."""
        if ref in self._versions:
            return self._versions[ref]
        try:
            return _Version(contents(ref, read_manifest(self._local, ref)), None)
        except (FileNotFoundError, CorruptVersion):
            data = source.read(manifest_key(ref.incarnation, ref.version))
            return _Version(contents(ref, decode_manifest(data, ref)), data)

    async def _adopt(self, head: Head, versions: dict[VersionRef, _Version]) -> None:
        """Fetch what `head` names and is not here, and no longer what it does not name."""
        async with self._moving:
            for ref, version in versions.items():
                if version.manifest is not None:
                    key = manifest_key(ref.incarnation, ref.version)
                    await self._run(self._local.put, key, [version.manifest])
            wanted = fetch_order(head, self._head, {ref: version.parts for ref, version in versions.items()})
            here = await self._run(self._sizes, wanted)
            before: dict[str, Incoming] = self._incoming
            incoming: dict[str, Incoming] = {}
            for blob in wanted:
                if not blob.size:
                    await self._run(self._local.put, blob.key, [])
                elif here[blob.key] != blob.size:
                    known = before.get(blob.key)
                    incoming[blob.key] = await self._run(self._begin, blob) if known is None else known
            self._tags = {
                blob.key: f"{ref.manifest[:16]}-{blob.size:x}" for ref in versions for blob in versions[ref].parts
            }
            self._incoming = incoming
            for key in incoming.keys() - before.keys():
                self._tasks.start_soon(self._resume, incoming[key])
            for key in before.keys() - incoming.keys():
                self._arrived += before[key].arrived
                before[key].drop()
            await self._run(self._sweep, incoming.keys())
            self._target = head
            self._versions = {ref: version._replace(manifest=None) for ref, version in versions.items()}
            await self._move_head()
            self._work.beat()
            self._changed.beat()

    def _begin(self, blob: Blob) -> Incoming:
        return Incoming(blob, self._root / _INCOMING / blob.key.replace("/", "~"), self._threads)

    def _sweep(self, keys: Collection[str]) -> None:
        """Remove what earlier processes began and nobody names."""
        names = {key.replace("/", "~") for key in keys}
        for path in (self._root / _INCOMING).glob("*"):
            if path.name.removesuffix(HAVE) not in names:
                path.unlink(missing_ok=True)

    def _sizes(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Of those that are here, else -1."""
        paths = {blob.key: self._root / blob.key for blob in blobs}
        return {key: path.stat().st_size if path.exists() else -1 for key, path in paths.items()}

    async def _move_head(self) -> None:
        """Let HEAD name what it may, then remove what neither it nor the source's names."""
        if self._target is None:
            return
        head = self._target if self._cut_through else complete_run(self._target, self._is_complete)
        if head is None or head == self._head:
            return
        await self._run(self._local.put, HEAD, [encode_head(head)])
        log.info("mirror moved", store=self.url, version=head.newest.version, incarnation=head.newest.incarnation)
        await self._run(remove_old, self._local, (*head.versions, *self._versions), head.newest)
        self._head = head
        self._changed.beat()

    def _is_complete(self, ref: VersionRef) -> bool:
        return not any(blob.key in self._incoming for blob in self._versions[ref].parts)

    def _faults(self) -> Iterator[Exception]:
        return (incoming.fault for incoming in self._incoming.values() if incoming.fault is not None)

    async def _resume(self, incoming: Incoming) -> None:
        try:
            await incoming.restore()
            await self._take_in(incoming)
        except OSError as error:
            self._fetching.failed(error)

    async def _lane(self) -> None:
        """One connection's work: piece after piece, those first that a reader waits for."""
        while True:
            await self._fetching.over()
            taken = self._take()
            if taken is None:
                await self._work.wait()
                continue
            incoming, number = taken
            arrived = incoming.arrived
            try:
                await incoming.fetch(number, self._source)
                self._fetching.worked()
                await self._take_in(incoming)
            except FileNotFoundError as error:
                incoming.fail(error)
                self._seen = ""  # that it names has been removed, so HEAD has moved
                self.notice()
            except OSError as error:
                if incoming.arrived > arrived:
                    self._fetching.worked()
                self._fetching.failed(error)
            self._changed.beat()

    def _take(self) -> tuple[Incoming, int] | None:
        for urgent in (True, False):
            for incoming in self._incoming.values():
                number = incoming.take(urgent=urgent)
                if number is not None:
                    return incoming, number
        return None

    async def _take_in(self, incoming: Incoming) -> None:
        """Keep a blob that is complete under its name."""
        async with self._moving:
            key = incoming.blob.key
            if not incoming.complete or self._incoming.get(key) is not incoming:
                return
            await self._run(incoming.finish, self._root / key)
            self._arrived += incoming.arrived
            del self._incoming[key]
            await self._move_head()
            self._changed.beat()

    async def _run(self, function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments) -> Result:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)


class _Patience:
    """Waits longer after each failure in a row; tells the first one and each that is different."""

    def __init__(self, url: str) -> None:
        self.fault = ""
        self._url = url
        self._failures = 0
        self._until = 0.0

    async def over(self) -> None:
        await anyio.sleep_until(self._until)

    def failed(self, error: Exception) -> None:
        """Failures while it is waiting already are those of requests that were under way: one in all."""
        now = anyio.current_time()
        if now < self._until:
            return
        longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**self._failures)
        self._failures = min(self._failures + 1, 20)
        self._until = now + longest * random.uniform(0.5, 1.0)
        self.told(error)

    def told(self, error: Exception) -> None:
        if str(error) != self.fault:
            log.warning("the source cannot be read; trying again", source=self._url, error=str(error))
        self.fault = str(error)

    def worked(self) -> None:
        if self.fault:
            log.info("the source can be read again", source=self._url)
        self.fault, self._failures = "", 0


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
