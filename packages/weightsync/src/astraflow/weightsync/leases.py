"""Leases: a reader says which versions it is reading, so that they are not removed under it.

A lease is a small blob under `leases/` that its reader writes anew while it reads and removes when done; a reader that
died stops renewing, and its lease ends `seconds` after it was written last. Age is counted by the store's own clock:
against the time at which HEAD, which the publisher has just moved, was written.

A reader writes its lease and then looks whether HEAD still names what it reads; a publisher moves HEAD and then looks
for leases. So one of the two always sees the other.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from .interface import Entry, Store
from .manifest import HEAD, VersionRef
from .retention import Named, removable

LEASES = "leases/"
"""Where a store keeps them: one small blob for each pull under way."""

LEASE_S = 60.0
"""A reader renews three times as often."""

RETURN_S = 5.0
"""Longer than that nobody waits to give a lease back: over a link that is gone it ends by itself."""

MAX_LEASE_S = 3600.0
MAX_LEASE_BYTES = 64 << 10

log = structlog.get_logger(__name__)


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """These versions stay for `seconds` from when this was written, at most MAX_LEASE_S."""

    versions: tuple[Named, ...]
    seconds: float


def decode_lease(data: bytes | memoryview) -> Lease | None:
    """None for what is no lease."""
    try:
        return msgspec.msgpack.decode(data, type=Lease)
    except msgspec.DecodeError:
        return None


def leased(store: Store, entries: Sequence[Entry]) -> set[Named]:
    """The versions under a lease, of the blobs in a store. Removes leases that ended. Blocks.

    `entries` must have been listed after HEAD moved.
    """
    now = next((entry.modified for entry in entries if entry.key == HEAD), float("inf"))
    held: set[Named] = set()
    for entry in entries:
        if not entry.key.startswith(LEASES):
            continue
        lease = _read(store, entry)
        seconds = min(lease.seconds, MAX_LEASE_S) if lease is not None else LEASE_S
        if now - entry.modified > seconds:
            store.delete(entry.key)
        elif lease is not None:
            held.update(lease.versions)
    return held


def remove_old(store: Store, kept: Iterable[VersionRef], newest: VersionRef) -> None:
    """Remove the versions up to `newest`, which HEAD has just been moved to, that are neither `kept` nor leased.
    Blocks."""
    entries = store.entries("")
    named = {(ref.incarnation, ref.version) for ref in kept}
    last = (newest.incarnation, newest.version)
    for key in removable((entry.key for entry in entries), named, leased(store, entries), last):
        store.delete(key)


def _read(store: Store, entry: Entry) -> Lease | None:
    if entry.size > MAX_LEASE_BYTES:
        return None
    try:
        return decode_lease(store.read(entry.key))
    except FileNotFoundError:
        return None


@asynccontextmanager
async def lease(store: Store, refs: Iterable[VersionRef]) -> AsyncIterator[None]:
    """Versions that stay while the block runs, if HEAD names them once it has been entered.

    A store that takes no leases (a plain web server) gives none: a version may then be removed while it is read.
    """
    key = f"{LEASES}{uuid.uuid4().hex}"
    data = msgspec.msgpack.encode(Lease(tuple(sorted((ref.incarnation, ref.version) for ref in refs)), LEASE_S))
    if not await _tried(store, "no lease", store.put, key, [data]):
        yield
        return
    failures: list[Exception] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_renew, store, key, data)
            try:
                yield
            except Exception as failure:  # raised below as it is, not in a group
                failures.append(failure)
            group.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(RETURN_S, shield=True):
            await _tried(store, "a lease stays until it ends", store.delete, key)
    if failures:
        raise failures[0]


async def _renew(store: Store, key: str, data: bytes) -> None:
    while True:
        await anyio.sleep(LEASE_S / 3)
        await _tried(store, "a lease was not renewed", store.put, key, [data])


async def _tried(store: Store, otherwise: str, call: Callable[..., None], *args: Any) -> bool:
    try:
        await anyio.to_thread.run_sync(call, *args, abandon_on_cancel=True)  # ends by the store's own deadline
    except OSError as error:
        log.debug(otherwise, store=store.url, error=str(error))
        return False
    return True
