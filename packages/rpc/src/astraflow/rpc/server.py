"""Serving an object: a listener, its connections, and a handler task for every call in flight.

Every call is answered by exactly one final frame while its connection lives; a handler never outlives its connection,
its deadline or the server. What a peer sends is checked before anything is run.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from . import frames
from .address import Address, UnixAddress, UnixPath, bind, parse
from .background import background
from .channel import Channel
from .describe import Description, Method, describe
from .failures import FailureBody, encodable, failure_of
from .frames import DECODE_ERRORS, Header, Payload
from .interface import FrameTooLarge, ProtocolError
from .invoke import closing, decode_request, encode_response, invoke
from .schema import Table, differences
from .stats import MethodStats

MAX_CALLS = 1024
HANDSHAKE_TIMEOUT = 10.0
MAX_DIFFERENCES = 20
MAX_LINE = 160
MAX_TRACE = 8192

log = structlog.get_logger(__name__)


class Server:
    """A served object. `address` is where it is bound, with the port that was given to port 0."""

    def __init__(
        self,
        impl: object,
        description: Description,
        address: Address,
        token: str | None,
        max_frame: int,
        keepalive: float,
    ) -> None:
        self.impl = impl
        self.description = description
        self.bound = address
        self.token = token
        self.max_frame = max_frame
        self.keepalive = keepalive
        self.draining = False
        self.stats = {name: MethodStats() for name in description.methods}
        self.connections: set[ServerConnection] = set()
        self._changed = asyncio.Event()
        self._tasks: TaskGroup | None = None

    @property
    def address(self) -> str:
        return str(self.bound)

    def statistics(self) -> Mapping[str, MethodStats]:
        """Figures by method; the live objects."""
        return self.stats

    async def run(self, started: asyncio.Event) -> None:
        async with anyio.create_task_group() as self._tasks:
            started.set()
            await anyio.sleep_forever()

    def accept(self) -> Channel:
        return ServerConnection(self).channel

    def adopt(self, connection: ServerConnection) -> None:
        if self._tasks is None or self.draining:
            connection.channel.abort("the server is closing")
            return
        self.connections.add(connection)
        self._tasks.start_soon(connection.run, name=f"connection to {self.address}")

    def forget(self, connection: ServerConnection) -> None:
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
    token: str | None = None,
    max_frame: int = frames.MAX_FRAME,
    drain_timeout: float = 5.0,
    keepalive: float = 10.0,
) -> AsyncIterator[Server]:
    """Serve `impl` as `interface` (a Protocol class) at `unix:PATH` or `tcp://host:port` while the body runs.

    The socket listens before the body starts; `server.address` is what to announce. At the end of the body no new
    calls are taken, those in flight get `drain_timeout` seconds and are then cancelled; if the body raised they are
    cancelled at once. A peer that has been silent for 3 × `keepalive` seconds is dropped.

    Args:
        token: what clients must present; None asks for nothing.
        max_frame: largest message taken, in bytes.

    Raises:
        ValueError: the address is malformed or not on this machine.
        TypeError: `interface` cannot be served, or `impl` is not one.
        OSError: the address cannot be bound.
    """
    description = describe(interface)
    description.check(impl)
    async with _bound(parse(address)) as (listener, bound, path):
        server = Server(impl, description, bound, token, max_frame, keepalive)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with background(lambda: server.run(started)):
            await started.wait()
            # Begun in two steps, so that no cancellation finds a listening socket without an owner.
            if path is None:
                acceptor = await loop.create_server(server.accept, sock=listener, start_serving=False)
            else:
                acceptor = await loop.create_unix_server(server.accept, sock=listener, start_serving=False)
            try:
                await acceptor.start_serving()
                yield server
                _stop_listening(acceptor, path)
                await server.drain(drain_timeout)
            finally:
                _stop_listening(acceptor, path)
                server.draining = True


def _stop_listening(acceptor: asyncio.AbstractServer, path: UnixPath | None) -> None:
    if path is not None:
        path.remove()
    acceptor.close()


@asynccontextmanager
async def _bound(address: Address) -> AsyncIterator[tuple[socket.socket, Address, UnixPath | None]]:
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


def _bind(address: Address) -> tuple[socket.socket, Address, UnixPath | None]:
    listener, bound = bind(address)
    return listener, bound, UnixPath(bound.path) if isinstance(bound, UnixAddress) else None


def _unbind(binding: asyncio.Future[tuple[socket.socket, Address, UnixPath | None]]) -> None:
    if binding.exception() is None:
        listener, _, path = binding.result()
        if path is not None:
            path.remove()
        listener.close()


class Running:
    """A call in flight: its handler's scope, and for a stream how much the client has not yet consumed."""

    def __init__(self, call: frames.Call, method: Method, deadline: float) -> None:
        self.id = call.id
        self.method = method
        self.scope = anyio.CancelScope(deadline=deadline)
        self.cancelled = False
        self.outstanding = 0
        self.credited = asyncio.Event()

    def cancel(self) -> None:
        self.cancelled = True
        self.scope.cancel()

    def credit(self, amount: int) -> None:
        self.outstanding -= amount
        self.credited.set()

    async def wait_for_credit(self) -> None:
        while self.outstanding >= frames.STREAM_WINDOW:
            self.credited.clear()
            await self.credited.wait()


class ServerConnection:
    """One client. `calls` are those in flight, by the client's ids."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.channel = Channel(self._on_frame, self._on_closing, lambda: server.adopt(self))
        self.calls: dict[int, Running] = {}
        self._hello: asyncio.Future[tuple[frames.Hello, Payload] | None] = asyncio.get_running_loop().create_future()
        self._tasks: TaskGroup | None = None
        self._scope = anyio.CancelScope()

    async def run(self) -> None:
        """Greet, then keep the handlers of this connection until it closes."""
        channel = self.channel
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                with anyio.move_on_after(HANDSHAKE_TIMEOUT) as scope:
                    hello = await self._hello
                    if hello is not None and self._greet(*hello):
                        self._tasks = tasks
                if scope.cancelled_caught:
                    channel.refuse("ProtocolError", f"no greeting within {HANDSHAKE_TIMEOUT:g} s")
                await channel.keep_alive(self.server.keepalive)
                tasks.cancel_scope.cancel()
        finally:
            await channel.aclose("the server closed")
            self.server.forget(self)
            if channel.refusal is not None:
                log.warning("peer refused us", address=self.server.address, reason=channel.reason)

    def _on_closing(self) -> None:
        if not self._hello.done():
            self._hello.set_result(None)
        self._scope.cancel()

    def _greet(self, hello: frames.Hello, payload: Payload) -> bool:
        """Welcome the client if it may speak and speaks our language; otherwise refuse it."""
        description = self.server.description
        refusal = _objection(hello, payload, description, self.server.token)
        self.channel.send_limit = max(hello.max_frame, frames.HANDSHAKE_LIMIT)
        if refusal is not None:
            self.channel.refuse(*refusal)
            return False
        self.channel.reader.max_frame = self.server.max_frame
        self.channel.send(frames.Welcome(description.fingerprint, self.server.max_frame, MAX_CALLS))
        return True

    def _on_frame(self, header: Header, payload: Payload) -> None:
        match header:
            case frames.Call() if self._tasks is not None:
                self._start(header, payload, self._tasks)
            case frames.Cancel():
                if header.id in self.calls:
                    self.calls[header.id].cancel()
            case frames.Credit():
                if header.amount < 0:
                    raise ProtocolError("negative credit")
                if header.id in self.calls:
                    self.calls[header.id].credit(header.amount)
            case frames.Hello() if not self._hello.done():
                self._hello.set_result((header, payload))
            case _:
                raise ProtocolError(f"{type(header).__name__} is not expected here")

    def _start(self, header: frames.Call, payload: Payload, tasks: TaskGroup) -> None:
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
        timeout = float("inf") if header.timeout is None else header.timeout
        running = Running(header, method, asyncio.get_running_loop().time() + timeout)
        self.calls[header.id] = running
        tasks.start_soon(self._handle, running, payload, name=f"{self.server.description.name}.{method.name}")

    async def _handle(self, running: Running, payload: Payload) -> None:
        stats = self.server.stats[running.method.name]
        stats.calls += 1
        stats.in_flight += 1
        stats.bytes_received += len(payload)
        failure: FailureBody | None = None
        try:
            failure = await self._answer(running, payload)
            if failure is not None:
                await self.channel.writable()  # or failures pile up for a peer that does not read them
        except asyncio.CancelledError:
            # Ours or one that leaked out of the handler, the task ends here; a leaked one must not reach its siblings.
            if self.server.draining or self.channel.closing.is_set():
                failure = FailureBody("unavailable", message="the server closed before the call ended")
            else:
                failure = FailureBody("cancelled", message="the handler was cancelled")
        finally:
            stats.in_flight -= 1
            stats.failures += failure is not None
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
                if method.stream:
                    await self._pump(running, request)
                else:
                    body = encode_response(method, await invoke(self.server.impl, method, request))
            if scope.cancelled_caught:
                return FailureBody("cancelled" if running.cancelled else "deadline")
            await self.channel.ready()
            if method.stream:
                self.channel.send(frames.End(running.id))
            else:
                self.server.stats[method.name].bytes_sent += len(body)
                self.channel.send(frames.Result(running.id), body)
        except FrameTooLarge as error:
            return FailureBody("too_large", message=str(error))
        except Exception as error:
            failure = failure_of(error, description)
            if failure.code == "error" and not self.channel.closing.is_set():
                trace = encodable("".join(traceback.format_exception(error))[-MAX_TRACE:])
                log.error("handler failed", method=f"{description.name}.{method.name}", traceback=trace)
            return failure
        return None

    async def _pump(self, running: Running, request: object) -> None:
        """Send a stream's items as fast as the client consumes them."""
        async with closing(invoke(self.server.impl, running.method, request)) as items:
            async for item in items:
                body = encode_response(running.method, item)
                await running.wait_for_credit()
                await self.channel.ready()
                self.channel.send(frames.Item(running.id), body)
                running.outstanding += frames.cost(body)
                self.server.stats[running.method.name].bytes_sent += len(body)
                await asyncio.sleep(0)  # a generator that never waits must not hold the loop

    def _fail(self, call_id: int, failure: FailureBody) -> None:
        self.channel.send(frames.Failure(call_id), frames.encode(failure))


def _objection(
    hello: frames.Hello, payload: Payload, ours: Description, token: str | None
) -> tuple[frames.RefusalKind, str] | None:
    if token is not None and not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "Unauthorized", "the token is wrong" if hello.token else "a token is required"
    if hello.version != frames.VERSION:
        return "InterfaceMismatch", f"protocol version {hello.version}, this server speaks {frames.VERSION}"
    if hello.fingerprint == ours.fingerprint:
        return None
    try:
        theirs = msgspec.msgpack.decode(payload, type=Table)
        found = differences(theirs, ours.table)
    except (*DECODE_ERRORS, IndexError) as error:
        return "ProtocolError", f"unreadable method table: {error}"
    if not found:
        return None
    shown = "".join(f"\n  {line[:MAX_LINE]}" for line in found[:MAX_DIFFERENCES])
    more = f"\n  and {len(found) - MAX_DIFFERENCES} more" if len(found) > MAX_DIFFERENCES else ""
    sides = f"the client's {theirs.interface[:MAX_LINE]} ({hello.fingerprint[:16]})"
    return "InterfaceMismatch", f"{sides} is not the server's {ours.name} ({ours.fingerprint}):{shown}{more}"
