"""The listening socket, which always has an owner, and its accept loop, which outlives a lack of descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import structlog

from .address import SocketAddress, UnixAddress, UnixPath, bind

OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
GONE = (errno.EAGAIN, errno.ECONNABORTED, errno.EPERM, errno.EPROTO)
PAUSE = 0.5

log = structlog.get_logger(__name__)


async def accept_all(listener: socket.socket, take: Callable[[socket.socket], None]) -> None:
    """Give every accepted socket to `take`, until cancelled.

    Not the loop's `sock_accept`: asyncio's loses a socket that it accepts while it is cancelled.
    """
    while True:
        await _readable(listener)
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in OUT_OF:
                log.error("cannot accept connections", reason=str(error))
                await anyio.sleep(PAUSE)
            elif error.errno not in GONE:
                raise
            continue
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        take(accepted)


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


def name_of(peer: socket.socket) -> str:
    """Where a connection comes from, for the log."""
    if peer.family == socket.AF_UNIX:
        return "unix"
    try:
        host, port, *_ = peer.getpeername()
    except OSError:
        return "a peer that has gone"
    return f"{host}:{port}"


def hang_up(accepted: socket.socket) -> None:
    """End a connection whoever holds its socket."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def listening(address: SocketAddress) -> AsyncIterator[tuple[socket.socket, SocketAddress, UnixPath | None]]:
    """A listening socket for the body, the address it is bound to, and its file if it has one; gone at the end."""
    binding = asyncio.get_running_loop().run_in_executor(None, _bind, address)
    try:
        listener, bound, path = await asyncio.shield(binding)
    except asyncio.CancelledError:
        binding.add_done_callback(_unbind)
        with anyio.CancelScope(shield=True):  # so that whoever tries again finds the address free
            await asyncio.wait([binding])
        raise
    try:
        yield listener, bound, path
    finally:
        _unbind(binding)


def _bind(address: SocketAddress) -> tuple[socket.socket, SocketAddress, UnixPath | None]:
    listener, bound = bind(address)
    return listener, bound, UnixPath(bound.path) if isinstance(bound, UnixAddress) else None


def _unbind(binding: asyncio.Future[tuple[socket.socket, SocketAddress, UnixPath | None]]) -> None:
    if binding.exception() is None:
        listener, _, path = binding.result()
        if path is not None:
            path.remove()
        listener.close()
