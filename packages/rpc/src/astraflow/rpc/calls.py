"""The calls of one connection on the server: each begun once, and answered by exactly one final frame while it lives.

A handler never outlives its connection, its deadline or the server. What a peer sends is checked before anything is
run. A call that ends without waiting is answered where its frame arrived; see `hosts`.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Mapping
from time import monotonic

import anyio
import msgspec
import structlog

from . import frames
from .channel import Channel
from .describe import Description, Method
from .failures import FailureBody, encodable, failure_of
from .frames import Payload
from .hosts import EARLY, Host, Hosts, Steps
from .interface import FrameTooLarge, ProtocolError
from .invoke import ItemEncoder, closing, decode_request, encode_response, invoke
from .stats import MethodStats
from .trace import enter_trace
from .window import Window

MAX_CALLS = 1024
MAX_TRACE = 8192
SOON = 0.01
"""A call that has less time left does not begin before the loop had a turn, in which it may be cancelled."""
LEAKED = FailureBody("cancelled", message="the handler was cancelled")

log = structlog.get_logger(__name__)


class Handlers:
    """An object's methods, as all connections call them. `changed` is set when a call that had to wait has ended."""

    def __init__(self, impl: object, description: Description) -> None:
        self.impl = impl
        self.description = description
        self.stats: Mapping[str, MethodStats] = {name: MethodStats() for name in description.methods}
        self.hosts = Hosts()
        self.draining = False
        self.changed = asyncio.Event()


class Calls:
    """What a client has asked for. `running` are the calls in flight, by the client's ids."""

    def __init__(self, handlers: Handlers, channel: Channel) -> None:
        self.handlers = handlers
        self.channel = channel
        self.running: dict[int, Running] = {}
        self.open = True
        self._ended = asyncio.Event()

    def start(self, header: frames.Call, payload: Payload) -> None:
        """Begin a call. Raises ProtocolError if the client may not ask for that."""
        handlers, timeout = self.handlers, header.timeout
        method = handlers.description.methods.get(header.method)
        if method is None:
            raise ProtocolError(f"no method {header.method!r}")
        if header.id in self.running:
            raise ProtocolError(f"call {header.id} is already in flight")
        if len(self.running) >= MAX_CALLS:
            raise ProtocolError(f"more than {MAX_CALLS} calls in flight")
        if timeout is None:
            deadline = math.inf
        elif timeout >= 0:
            deadline = handlers.hosts.loop.time() + timeout
        else:
            raise ProtocolError(f"timeout {timeout}")
        host = handlers.hosts.free()
        if (
            host is not None
            and (timeout is None or timeout > SOON)
            and self.channel.writable
            and not (method.stream or handlers.draining)
        ):
            host.set_deadline(deadline, early=0 if timeout is None else EARLY * timeout)
            self._at_once(host, header, method, payload)
        else:
            running = Running(self, header, method, payload)
            self.running[header.id] = running
            running.carried_by(handlers.hosts.carry(running, deadline))

    def _at_once(self, host: Host, header: frames.Call, method: Method, payload: Payload) -> None:
        """Run the first step of a call now, and answer the call if that was all of it."""
        handlers, begun = self.handlers, monotonic()
        stats = handlers.stats[method.name]
        stats.begin(0.0)
        stats.bytes_received += len(payload)
        failure: FailureBody | None = None
        try:
            request = decode_request(method, payload)
        except msgspec.ValidationError as error:
            failure = self.mistake(error)
        else:
            context = handlers.hosts.context()
            context.run(enter_trace, header.trace)
            try:
                steps, result = host.first_step(invoke, (handlers.impl, method, request), context)
            except asyncio.CancelledError:
                failure = LEAKED
            except Exception as error:
                failure = self.failure(error, method)
            else:
                if steps is not None:
                    running = self.running[header.id] = Running(self, header, method, payload, begun, steps)
                    host.take(running)
                    running.carried_by(host)
                    return
                failure = self.answer(header.id, method, result)
        stats.end(monotonic() - begun, failure is not None)
        if failure is not None:
            self.fail(header.id, failure)

    def answer(self, call_id: int, method: Method, result: object) -> FailureBody | None:
        """Send what the handler gave; the failure to send if it cannot be."""
        try:
            body = encode_response(method, result)
            self.channel.send(frames.Result(call_id), body, urgent=len(self.running) == 1)
        except Exception as error:
            return self.failure(error, method)
        self.handlers.stats[method.name].bytes_sent += len(body)
        return None

    def failure(self, error: Exception, method: Method) -> FailureBody:
        """What the caller is told of an exception; one that nobody declared is logged."""
        if isinstance(error, FrameTooLarge):
            return FailureBody("too_large", message=str(error))
        description = self.handlers.description
        failure = failure_of(error, description)
        if failure.code == "error" and not self.channel.closing.is_set():
            trace = encodable("".join(traceback.format_exception(error))[-MAX_TRACE:])
            log.error("handler failed", method=f"{description.name}.{method.name}", traceback=trace)
        return failure

    def mistake(self, error: Exception) -> FailureBody:
        """The peer's own: it is told, and nobody needs a traceback."""
        return failure_of(error.with_traceback(None), self.handlers.description)

    def fail(self, call_id: int, failure: FailureBody) -> None:
        self.channel.send(frames.Failure(call_id), frames.encode(failure))

    def cancel(self, call_id: int) -> None:
        """The client wants it no more; one that has ended meanwhile is none."""
        running = self.running.get(call_id)
        if running is not None:
            running.cancel()

    def credit(self, call_id: int, amount: int) -> None:
        if amount < 0:
            raise ProtocolError("negative credit")
        running = self.running.get(call_id)
        if running is not None and running.window is not None:
            running.window.credit(amount)

    def ended(self, running: Running) -> None:
        del self.running[running.id]
        self._ended.set()
        self.handlers.changed.set()

    async def finish(self) -> None:
        """Cancel the handlers and wait for their end, also in a cancelled scope."""
        self.open = False
        for running in self.running.values():
            running.stop()
        with anyio.CancelScope(shield=True):
            while self.running:
                self._ended.clear()
                await self._ended.wait()


class Running:
    """A call that takes a task: the work of a host."""

    def __init__(
        self,
        calls: Calls,
        header: frames.Call,
        method: Method,
        payload: Payload,
        begun: float | None = None,
        steps: Steps | None = None,
    ) -> None:
        self.id = header.id
        self.name = method.name
        self.method = method
        self.window = Window() if method.stream else None
        self._calls = calls
        self._trace = header.trace
        self._payload = payload
        self._arrived = monotonic()
        self._begun = begun
        self._steps = steps
        self._cancelled = False
        self._over = False

    # --- from outside --------------------------------------------------------------------------------------------

    def carried_by(self, host: Host) -> None:
        self._host = host
        self._scope = host.scope

    def cancel(self) -> None:
        if not self._over:
            self._cancelled = True
            self._scope.cancel()

    def stop(self) -> None:
        """End it, however deep in a wait, and keep at it until it has ended."""
        self._scope.cancel()

    # --- in the host's task --------------------------------------------------------------------------------------

    async def run(self, cancelled: asyncio.CancelledError | None) -> None:
        try:
            if self._steps is not None:
                self._steps.interrupt = cancelled
                failure = await self._rest(self._steps)
            elif cancelled is not None:
                raise cancelled
            else:
                failure = await self._whole()
        except asyncio.CancelledError:
            if self._host.scope.cancel_called:
                raise
            failure = LEAKED
        except BaseException:
            self._close(LEAKED)
            raise
        await self._end(failure)

    async def cut_short(self) -> None:
        if self.id in self._calls.running:
            await self._end(self._why())

    def _why(self) -> FailureBody:
        if self._cancelled:
            return FailureBody("cancelled")
        if not self._calls.open:
            return FailureBody("unavailable", message="the server closed before the call ended")
        return FailureBody("deadline") if self._host.scope.cancel_called else LEAKED

    async def _whole(self) -> FailureBody | None:
        """Begin the call and see it to its end; the failure to send if there is one."""
        handlers, method = self._calls.handlers, self.method
        if handlers.draining:
            return FailureBody("unavailable", message="the server is closing; the call was not begun")
        self._begun = monotonic()
        stats = handlers.stats[method.name]
        stats.begin(self._begun - self._arrived)
        stats.bytes_received += len(self._payload)
        if self._host.scope.cancel_called:
            return self._why()
        try:
            request = decode_request(method, self._payload)
        except msgspec.ValidationError as error:
            return self._calls.mistake(error)
        context = handlers.hosts.context()
        context.run(enter_trace, self._trace)
        coroutine = self._call(request) if self.window is None else self._pump(self.window, request)
        return await self._rest(Steps(coroutine, context))

    async def _rest(self, steps: Steps) -> FailureBody | None:
        calls = self._calls
        try:
            result = await steps
            if not calls.channel.writable:
                await calls.channel.ready()
        except Exception as error:
            return calls.failure(error, self.method)
        if self.window is None:
            return calls.answer(self.id, self.method, result)
        calls.channel.send(frames.End(self.id))
        return None

    async def _call(self, request: object) -> object:
        return await invoke(self._calls.handlers.impl, self.method, request)

    async def _pump(self, window: Window, request: object) -> None:
        """Send a stream's items as fast as the client consumes them."""
        channel, encoder = self._calls.channel, ItemEncoder(self.method)
        stats = self._calls.handlers.stats[self.name]
        async with closing(invoke(self._calls.handlers.impl, self.method, request)) as items:
            async for item in items:
                body = encoder.encode(item)
                await window.wait()
                await channel.ready()
                channel.send(frames.Item(self.id), body)
                window.outstanding += frames.cost(body)
                stats.bytes_sent += len(body)
                await asyncio.sleep(0)  # a generator that never waits must not hold the loop

    async def _end(self, failure: FailureBody | None) -> None:
        calls, self._over = self._calls, True
        try:
            if failure is not None and not calls.channel.writable and calls.open:
                self._host.set_deadline(math.inf, early=0)
                with anyio.CancelScope() as self._scope:  # or failures pile up for a peer that does not read them
                    await calls.channel.room()
        finally:
            self._close(failure)

    def _close(self, failure: FailureBody | None) -> None:
        if self._begun is not None:
            self._calls.handlers.stats[self.name].end(monotonic() - self._begun, failure is not None)
        self._calls.ended(self)
        if failure is not None:
            self._calls.fail(self.id, failure)
