"""Serving an object: a listener and its connections, which end with the server."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from anyio.abc import TaskGroup

from . import frames
from .address import Address, InprocAddress, UnixPath, parse
from .background import background
from .calls import MAX_CALLS, Calls, Handlers
from .channel import CLOSE_TIMEOUT, Channel
from .describe import Description, describe
from .frames import Header, Payload
from .greeting import credentials_objection, language_objection, protection
from .inproc import handed_over
from .interface import ProtocolError
from .listener import accept_all, hang_up, listening, name_of
from .sparing import SparingLog
from .stats import MethodStats
from .tls import ServerCertificates, Tls, explain
from .token import Token

MAX_CONNECTIONS = 4096
MAX_STRANGERS = 512
HANDSHAKE_TIMEOUT = 10.0


class Server:
    """A served object. `address` is where it is bound, with the port that was given to port 0."""

    def __init__(
        self,
        impl: object,
        description: Description,
        address: Address,
        *,
        certificates: ServerCertificates | None,
        token: Token | None,
        max_frame: int,
        max_connections: int,
        keepalive: float,
    ) -> None:
        self.handlers = Handlers(impl, description)
        self.log = SparingLog()
        self.bound = address
        self.certificates = certificates
        self.token = token
        self.max_frame = max_frame
        self.max_connections = max_connections
        self.keepalive = keepalive
        self.connections: set[ServerConnection] = set()
        self._strangers: dict[ServerConnection, None] = {}
        self._tasks: TaskGroup | None = None
        self._accepting = anyio.CancelScope()

    @property
    def address(self) -> str:
        return str(self.bound)

    def statistics(self) -> Mapping[str, MethodStats]:
        """Figures by method; the live objects."""
        return self.handlers.stats

    async def run(self, listener: socket.socket, started: asyncio.Event) -> None:
        async with self.handlers.hosts, anyio.create_task_group() as self._tasks:
            with self._accepting, listener:
                started.set()
                await accept_all(listener, self._take)
            await anyio.sleep_forever()

    def stop_accepting(self) -> None:
        self._accepting.cancel()

    def _take(self, accepted: socket.socket) -> None:
        assert self._tasks is not None, "sockets are accepted while the server runs"
        if len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers)).drop(f"more than {MAX_STRANGERS} connections have not said who they are")
        connection = ServerConnection(self, name_of(accepted))
        self._strangers[connection] = None
        self._tasks.start_soon(connection.run, accepted, name=f"connection to {self.address}")

    def admit(self, connection: ServerConnection) -> None:
        """The connection has said who it is."""
        self._strangers.pop(connection, None)
        self.connections.add(connection)

    def forget(self, connection: ServerConnection) -> None:
        self._strangers.pop(connection, None)
        self.connections.discard(connection)
        self.handlers.changed.set()

    async def drain(self, timeout: float) -> None:
        """Take no new calls, and wait until those in flight have ended, `timeout` seconds at most."""
        self.handlers.draining = True
        for connection in self.connections:
            connection.channel.send(frames.Goodbye())
        with anyio.move_on_after(timeout):
            while any(connection.calls.running for connection in self.connections):
                self.handlers.changed.clear()
                await self.handlers.changed.wait()


@asynccontextmanager
async def serve(
    impl: object,
    interface: Callable[..., Any],
    address: str,
    *,
    tls: Tls | None = None,
    token: Token | None = None,
    max_frame: int = frames.MAX_FRAME,
    max_connections: int = MAX_CONNECTIONS,
    drain_timeout: float = 5.0,
    keepalive: float = 10.0,
) -> AsyncIterator[Server]:
    """Serve `impl` as `interface` (a Protocol class) at an address: `inproc:NAME`, `unix:PATH`, `tcp://…` or `tls://…`.

    It is served while the body runs. The socket listens before the body starts; `server.address` is what to announce.
    At the end of the body no new calls are taken, those in flight get `drain_timeout` seconds and are then cancelled;
    if the body raised they are cancelled at once. A peer that has been silent for 3 × `keepalive` seconds is dropped.

    Args:
        tls: certificate files, for a tls:// address.
        token: what clients must present; None asks for nothing, which only loopback and Unix sockets may.
        max_frame: largest message taken, in bytes.
        max_connections: clients at a time; further ones are refused with `Unavailable`.

    Raises:
        ValueError: the address is malformed, not safe to listen at, or `tls` or `token` is not usable.
        TypeError: `interface` cannot be served, or `impl` is not one.
        OSError: the address cannot be bound, or a file cannot be read.
        ExceptionGroup: the server failed while the body ran; the body was cancelled.
    """
    description = describe(interface)
    description.check(impl)
    where = parse(address)
    certificates = await anyio.to_thread.run_sync(protection, where, tls, token)
    make = functools.partial(
        Server,
        impl,
        description,
        certificates=certificates,
        token=token,
        max_frame=max_frame,
        max_connections=max_connections,
        keepalive=keepalive,
    )
    if isinstance(where, InprocAddress):
        with handed_over(where, impl, description):
            yield make(where)
        return
    async with listening(where) as (listener, bound, path):
        server, started = make(bound), asyncio.Event()
        async with background(lambda: server.run(listener, started)):
            await started.wait()
            try:
                yield server
                _stop_listening(server, path)
                await server.drain(drain_timeout)
            finally:
                _stop_listening(server, path)
                server.handlers.draining = True


def _stop_listening(server: Server, path: UnixPath | None) -> None:
    if path is not None:
        path.remove()
    server.stop_accepting()


class ServerConnection:
    """One client. `run()` outlives its calls."""

    def __init__(self, server: Server, peer: str) -> None:
        self.server = server
        self.channel = Channel(self._on_frame, self._on_closing, peer, server.log)
        self.calls = Calls(server.handlers, self.channel)
        self._hello: asyncio.Future[tuple[frames.Hello, Payload] | None] = asyncio.get_running_loop().create_future()
        self._greeted = False
        self._scope = anyio.CancelScope()

    async def run(self, accepted: socket.socket) -> None:
        """Greet, then keep the handlers of this connection until it closes."""
        channel = self.channel
        try:
            with self._scope:
                with anyio.move_on_after(HANDSHAKE_TIMEOUT) as scope:
                    await self._open(accepted)
                    hello = await self._hello
                    self._greeted = hello is not None and await self._greet(*hello)
                if scope.cancelled_caught:
                    channel.refuse("ProtocolError", f"no greeting within {HANDSHAKE_TIMEOUT:g} s")
                await channel.keep_alive(self.server.keepalive)
        finally:
            self._greeted = False
            await self.calls.finish()
            await channel.aclose("the server closed")
            self.server.forget(self)
            if channel.refusal is not None:
                self.server.log.warning("peer refused us", address=self.server.address, reason=channel.reason)

    def drop(self, reason: str) -> None:
        self.server.log.warning("peer dropped", peer=self.channel.peer, reason=reason)
        self.channel.abort(reason)

    async def _open(self, accepted: socket.socket) -> None:
        """Make the channel of a socket, and TLS on it; a failure closes the channel."""
        loop, certificates = asyncio.get_running_loop(), self.server.certificates
        tls: dict[str, Any] = {}
        try:
            if certificates is not None:
                context = await anyio.to_thread.run_sync(certificates.context, abandon_on_cancel=True)
                tls = {
                    "ssl": context,
                    "ssl_handshake_timeout": HANDSHAKE_TIMEOUT,
                    "ssl_shutdown_timeout": CLOSE_TIMEOUT,
                }
            await loop.connect_accepted_socket(lambda: self.channel, accepted, **tls)
        except OSError as error:
            self.drop(explain(error))
        except asyncio.CancelledError:
            hang_up(accepted)  # the loop would wait for the end of the handshake
            if certificates is not None and not tls:
                accepted.close()  # the loop does not have it yet
            self.channel.abandon("the connection was not opened in time")
            raise

    def _on_closing(self) -> None:
        if not self._hello.done():
            self._hello.set_result(None)
        self._scope.cancel()

    async def _greet(self, hello: frames.Hello, payload: Payload) -> bool:
        """Welcome the client if it may speak and speaks our language; otherwise refuse it."""
        server, description = self.server, self.server.handlers.description
        self.channel.send_limit = max(hello.max_frame, frames.HANDSHAKE_LIMIT)
        refusal = await credentials_objection(hello, server.token, server.log)
        refusal = refusal or language_objection(hello, payload, description)
        if refusal is None and (server.handlers.draining or len(server.connections) >= server.max_connections):
            refusal = (
                "Busy",
                "the server is closing" if server.handlers.draining else "the server takes no more clients",
            )
        if refusal is not None:
            self.channel.refuse(*refusal)
            return False
        server.admit(self)
        self.channel.greeted(server.max_frame)
        self.channel.send(frames.Welcome(description.fingerprint, server.max_frame, MAX_CALLS))
        return True

    def _on_frame(self, header: Header, payload: Payload) -> None:
        if type(header) is frames.Call and self._greeted:
            self.calls.start(header, payload)
            return
        match header:
            case frames.Cancel():
                self.calls.cancel(header.id)
            case frames.Credit():
                self.calls.credit(header.id, header.amount)
            case frames.Hello() if not self._hello.done():
                self._hello.set_result((header, payload))
            case _:
                raise ProtocolError(f"{type(header).__name__} is not expected here")
