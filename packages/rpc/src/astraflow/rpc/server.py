"""Serving an object: a listener, its connections, and a handler task for every call in flight.

Every call is answered by exactly one final frame while its connection lives; a handler never outlives its connection,
its deadline or the server. What a peer sends is checked before anything is run.
"""

from __future__ import annotations

import asyncio
import functools
import math
import socket
import ssl
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from . import frames
from .address import Address, InprocAddress, UnixPath, parse
from .background import background
from .channel import CLOSE_TIMEOUT, Channel
from .describe import Description, describe
from .failures import FailureBody, encodable, failure_of
from .frames import Header, Payload
from .greeting import credentials_objection, language_objection, protection
from .inproc import handed_over
from .interface import FrameTooLarge, ProtocolError
from .invoke import ItemEncoder, closing, decode_request, encode_response, invoke
from .listener import accept_all, hang_up, listening, name_of
from .running import Running, Window
from .stats import MethodStats
from .tls import Tls, explain
from .token import Token
from .trace import enter_trace

MAX_CONNECTIONS = 4096
MAX_STRANGERS = 512
MAX_CALLS = 1024
HANDSHAKE_TIMEOUT = 10.0
MAX_TRACE = 8192

log = structlog.get_logger(__name__)


class Server:
    """A served object. `address` is where it is bound, with the port that was given to port 0."""

    def __init__(
        self,
        impl: object,
        description: Description,
        address: Address,
        *,
        context: ssl.SSLContext | None,
        token: Token | None,
        max_frame: int,
        max_connections: int,
        keepalive: float,
    ) -> None:
        self.impl = impl
        self.description = description
        self.bound = address
        self.context = context
        self.token = token
        self.max_frame = max_frame
        self.max_connections = max_connections
        self.keepalive = keepalive
        self.draining = False
        self.stats = {name: MethodStats() for name in description.methods}
        self.connections: set[ServerConnection] = set()
        self._strangers: dict[ServerConnection, None] = {}
        self._changed = asyncio.Event()
        self._tasks: TaskGroup | None = None
        self._accepting = anyio.CancelScope()

    @property
    def address(self) -> str:
        return str(self.bound)

    def statistics(self) -> Mapping[str, MethodStats]:
        """Figures by method; the live objects."""
        return self.stats

    async def run(self, listener: socket.socket, started: asyncio.Event) -> None:
        async with anyio.create_task_group() as self._tasks:
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
        self._changed.set()

    def call_ended(self) -> None:
        self._changed.set()

    async def drain(self, timeout: float) -> None:
        """Take no new calls, and wait until those in flight have ended, `timeout` seconds at most."""
        self.draining = True
        for connection in self.connections:
            connection.channel.send(frames.Goodbye())
        with anyio.move_on_after(timeout):
            while any(connection.calls for connection in self.connections):
                self._changed.clear()
                await self._changed.wait()


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
    """
    description = describe(interface)
    description.check(impl)
    where = parse(address)
    context = await anyio.to_thread.run_sync(protection, where, tls, token)
    make = functools.partial(
        Server,
        impl,
        description,
        context=context,
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
                server.draining = True


def _stop_listening(server: Server, path: UnixPath | None) -> None:
    if path is not None:
        path.remove()
    server.stop_accepting()


class ServerConnection:
    """One client. `calls` are those in flight, by the client's ids; each has a task, and `run()` outlives them all.

    Bare tasks, since a task group's cost half of a small call; what it is for, `_finish_calls` does.
    """

    def __init__(self, server: Server, peer: str) -> None:
        self.server = server
        self.channel = Channel(self._on_frame, self._on_closing, peer)
        self.calls: dict[int, Running] = {}
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
            await self._finish_calls()
            await channel.aclose("the server closed")
            self.server.forget(self)
            if channel.refusal is not None:
                log.warning("peer refused us", address=self.server.address, reason=channel.reason)

    def drop(self, reason: str) -> None:
        log.warning("peer dropped", peer=self.channel.peer, reason=reason)
        self.channel.abort(reason)

    async def _open(self, accepted: socket.socket) -> None:
        """Make the channel of a socket, and TLS on it; a failure closes the channel."""
        limits: dict[str, Any] = {}
        if self.server.context is not None:
            limits = {"ssl_handshake_timeout": HANDSHAKE_TIMEOUT, "ssl_shutdown_timeout": CLOSE_TIMEOUT}
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self.channel, accepted, ssl=self.server.context, **limits)
        except OSError as error:
            self.drop(explain(error))
        except asyncio.CancelledError:
            hang_up(accepted)  # the loop would wait for the end of the handshake
            raise

    def _on_closing(self) -> None:
        if not self._hello.done():
            self._hello.set_result(None)
        self._scope.cancel()

    async def _finish_calls(self) -> None:
        """Cancel the handlers and wait for their end, also in a cancelled scope."""
        self._greeted = False
        for running in self.calls.values():
            running.scope.cancel()
        handlers = [running.task for running in self.calls.values() if running.task is not None]
        if handlers:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(handlers)

    async def _greet(self, hello: frames.Hello, payload: Payload) -> bool:
        """Welcome the client if it may speak and speaks our language; otherwise refuse it."""
        server, description = self.server, self.server.description
        self.channel.send_limit = max(hello.max_frame, frames.HANDSHAKE_LIMIT)
        refusal = await credentials_objection(hello, server.token) or language_objection(hello, payload, description)
        if refusal is None and (server.draining or len(server.connections) >= server.max_connections):
            refusal = (
                "Busy",
                "the server is closing" if server.draining else "the server takes no more clients",
            )
        if refusal is not None:
            self.channel.refuse(*refusal)
            return False
        server.admit(self)
        self.channel.greeted(server.max_frame)
        self.channel.send(frames.Welcome(description.fingerprint, server.max_frame, MAX_CALLS))
        return True

    def _on_frame(self, header: Header, payload: Payload) -> None:
        if isinstance(header, frames.Call) and self._greeted:
            self._start(header, payload)
            return
        match header:
            case frames.Cancel():
                if header.id in self.calls:
                    self.calls[header.id].cancel()
            case frames.Credit():
                if header.amount < 0:
                    raise ProtocolError("negative credit")
                running = self.calls.get(header.id)
                if running is not None and running.window is not None:
                    running.window.credit(header.amount)
            case frames.Hello() if not self._hello.done():
                self._hello.set_result((header, payload))
            case _:
                raise ProtocolError(f"{type(header).__name__} is not expected here")

    def _start(self, header: frames.Call, payload: Payload) -> None:
        method = self.server.description.methods.get(header.method)
        if method is None:
            raise ProtocolError(f"no method {header.method!r}")
        if header.id in self.calls:
            raise ProtocolError(f"call {header.id} is already in flight")
        if len(self.calls) >= MAX_CALLS:
            raise ProtocolError(f"more than {MAX_CALLS} calls in flight")
        if header.timeout is not None and not header.timeout >= 0:
            raise ProtocolError(f"timeout {header.timeout}")
        if self.server.draining:
            self._fail(header.id, FailureBody("unavailable", message="the server is closing; the call was not begun"))
            return
        loop = asyncio.get_running_loop()
        running = Running(header, method, math.inf if header.timeout is None else loop.time() + header.timeout)
        self.calls[header.id] = running
        running.task = loop.create_task(self._handle(running, payload), name=method.name)

    async def _handle(self, running: Running, payload: Payload) -> None:
        stats = self.server.stats[running.method.name]
        begun = monotonic()
        stats.begin(begun - running.arrived)
        stats.bytes_received += len(payload)
        enter_trace(running.trace)
        failure: FailureBody | None = None
        try:
            failure = await self._answer(running, payload)
            if failure is not None and not self.channel.writable and self._greeted:
                running.ended = True
                with anyio.CancelScope() as running.scope:  # or failures pile up for a peer that does not read them
                    await self.channel.room()
        except asyncio.CancelledError:  # not ours, it leaked out of the handler
            failure = FailureBody("cancelled", message="the handler was cancelled")
        finally:
            stats.end(monotonic() - begun, failure is not None)
            del self.calls[running.id]
            if failure is not None:
                self._fail(running.id, failure)
            self.server.call_ended()

    async def _answer(self, running: Running, payload: Payload) -> FailureBody | None:
        """Run the handler and send what it gives; the failure to send if there is one."""
        description, method = self.server.description, running.method
        try:
            request = decode_request(method, payload)
        except msgspec.ValidationError as error:  # the peer's mistake: it is told, and nobody needs a traceback
            return failure_of(error.with_traceback(None), description)
        try:
            with running.scope as scope:
                if running.window is not None:
                    await self._pump(running, running.window, request)
                else:
                    body = encode_response(method, await invoke(self.server.impl, method, request))
                if not self.channel.writable:
                    await self.channel.ready()
            if scope.cancelled_caught:
                return self._cut_short(running)
            if method.stream:
                self.channel.send(frames.End(running.id))
            else:
                self.server.stats[method.name].bytes_sent += len(body)
                self.channel.send(frames.Result(running.id), body, urgent=len(self.calls) == 1)
        except FrameTooLarge as error:
            return FailureBody("too_large", message=str(error))
        except Exception as error:
            failure = failure_of(error, description)
            if failure.code == "error" and not self.channel.closing.is_set():
                trace = encodable("".join(traceback.format_exception(error))[-MAX_TRACE:])
                log.error("handler failed", method=f"{description.name}.{method.name}", traceback=trace)
            return failure
        return None

    def _cut_short(self, running: Running) -> FailureBody:
        if running.cancelled:
            return FailureBody("cancelled")
        if not self._greeted:
            return FailureBody("unavailable", message="the server closed before the call ended")
        return FailureBody("deadline")

    async def _pump(self, running: Running, window: Window, request: object) -> None:
        """Send a stream's items as fast as the client consumes them."""
        encoder = ItemEncoder(running.method)
        async with closing(invoke(self.server.impl, running.method, request)) as items:
            async for item in items:
                body = encoder.encode(item)
                await window.wait()
                await self.channel.ready()
                self.channel.send(frames.Item(running.id), body)
                window.outstanding += frames.cost(body)
                self.server.stats[running.method.name].bytes_sent += len(body)
                await asyncio.sleep(0)  # a generator that never waits must not hold the loop

    def _fail(self, call_id: int, failure: FailureBody) -> None:
        self.channel.send(frames.Failure(call_id), frames.encode(failure))
