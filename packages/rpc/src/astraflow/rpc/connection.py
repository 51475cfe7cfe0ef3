"""The client's side of one connection: its handshake and the calls in flight on it.

Whatever happens, each call gets its frames in order and then one end: a final frame, or `Unavailable` when the
connection is lost. A call whose caller has gone keeps its id until the server's final frame.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import TypeVar

import anyio
import msgspec

from . import frames
from .channel import Channel
from .describe import Description, Method
from .failures import FailureBody, error_of
from .frames import DECODE_ERRORS, Header, Payload
from .interface import (
    DeadlineExceeded,
    FrameTooLarge,
    InterfaceMismatch,
    ProtocolError,
    RpcError,
    Unauthorized,
    Unavailable,
)
from .sparing import SparingLog
from .stats import MethodStats
from .tls import is_certificate_problem
from .trace import outgoing_trace

SMALLEST_LIMIT = 1024

REFUSALS: Mapping[str, type[RpcError]] = {
    "InterfaceMismatch": InterfaceMismatch,
    "Unauthorized": Unauthorized,
    "ProtocolError": ProtocolError,
    "FrameTooLarge": FrameTooLarge,
    "Busy": Unavailable,
}

FINAL = (frames.Result, frames.Failure, frames.End)

AnyCall = TypeVar("AnyCall", bound="Outgoing")


class Outgoing:
    """A call in flight, as its owner sees it."""

    __slots__ = ("abandoned", "begun", "connection", "id", "method", "stats")

    def __init__(self, connection: Connection, call_id: int, method: Method, stats: MethodStats) -> None:
        self.id = call_id
        self.method = method
        self.stats = stats
        self.connection = connection
        self.abandoned = False
        self.begun = monotonic()

    def push(self, header: Header, payload: Payload) -> None:
        """A frame for this call came."""
        raise NotImplementedError

    def lose(self) -> None:
        """The connection was lost, no further frame will come."""
        raise NotImplementedError

    def close(self) -> None:
        """The owner goes. If the call has not ended, the server is told to cancel it."""
        if not self.abandoned and self.id in self.connection.calls:
            self.abandoned = True
            self.connection.channel.send(frames.Cancel(self.id))


class UnaryCall(Outgoing):
    """A call with one answer: a future that is Unavailable if the connection is lost before it came, what a Failure
    says, or DeadlineExceeded at `limit` on the loop's clock."""

    __slots__ = ("answer", "limit")

    def __init__(self, connection: Connection, call_id: int, method: Method, stats: MethodStats) -> None:
        super().__init__(connection, call_id, method, stats)
        self.limit = math.inf
        self.answer: asyncio.Future[Payload] = connection.loop.create_future()

    def push(self, header: Header, payload: Payload) -> None:
        if type(header) is frames.Failure:
            self._fail(self.connection.failure(self.method, payload))
        elif not self.answer.done():
            self.answer.set_result(payload)

    def lose(self) -> None:
        self._fail(self.connection.lost(self.method))

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self) -> None:
        self._fail(DeadlineExceeded(f"{self.method.name} was not answered in time"))


class StreamCall(Outgoing):
    """A call answered by items, of which a window may wait here, and an end."""

    def __init__(self, connection: Connection, call_id: int, method: Method, stats: MethodStats) -> None:
        super().__init__(connection, call_id, method, stats)
        self.buffered = 0
        self._frames: deque[tuple[Header, Payload]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._consumed = 0

    def push(self, header: Header, payload: Payload) -> None:
        if self.abandoned:
            return
        if isinstance(header, frames.Item) and self.buffered >= frames.STREAM_WINDOW:
            raise ProtocolError(f"the server sent more of {self.method.name} than it was given credit for")
        self.buffered += frames.cost(payload)
        self._frames.append((header, payload))
        self._wake()

    def lose(self) -> None:
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> tuple[Header, Payload]:
        """The next frame. Raises Unavailable if the connection is lost before it came, or what a Failure says."""
        if self._frames:
            await asyncio.sleep(0)  # a reader of buffered items must not hold the loop
        while not self._frames:
            if self.connection.channel.closing.is_set():
                raise self.connection.lost(self.method)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        header, payload = self._frames.popleft()
        self.buffered -= frames.cost(payload)
        if isinstance(header, frames.Failure):
            raise self.connection.failure(self.method, payload)
        return header, payload

    def consume(self, payload: Payload) -> None:
        """Say that an item has been taken; half a window at a time the server hears of it."""
        self._consumed += frames.cost(payload)
        if self._consumed >= frames.STREAM_WINDOW // 2:
            self.connection.channel.send(frames.Credit(self.id, self._consumed))
            self._consumed = 0

    def close(self) -> None:
        self._frames.clear()
        super().close()


class Connection:
    """`retired` is set when no new call may begin here: the server said goodbye, or the connection is gone."""

    def __init__(
        self, peer: str, description: Description, stats: Mapping[str, MethodStats], max_frame: int, keepalive: float
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.channel = Channel(self._on_frame, self._on_closing, peer, SparingLog())
        self.calls: dict[int, Outgoing] = {}
        self.retired = asyncio.Event()
        self._description = description
        self._stats = stats
        self._max_frame = max_frame
        self._keepalive = keepalive
        self._welcome: asyncio.Future[frames.Welcome | None] = self.loop.create_future()
        self._slots: anyio.Semaphore | None = None
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = math.inf

    async def handshake(self, token: str) -> None:
        """Introduce us.

        Raises:
            InterfaceMismatch, Unauthorized, ProtocolError: the server refused.
            Unavailable: the connection was lost.
        """
        table = frames.encode(self._description.table)
        hello = frames.Hello(frames.VERSION, self._description.fingerprint, self._max_frame, token)
        self.channel.send(hello, table)
        welcome = await self._welcome
        if welcome is None:
            refusal = self.channel.refusal
            if refusal is not None:
                raise REFUSALS[refusal.kind](refusal.message)
            if is_certificate_problem(self.channel.error):
                raise Unauthorized(self.channel.reason)
            raise Unavailable(f"{self.channel.reason} before it said welcome")
        self._slots = anyio.Semaphore(welcome.max_calls, fast_acquire=True)

    async def run(self) -> None:
        """Keep the connection until it closes; when cancelled, close it."""
        try:
            await self.channel.keep_alive(self._keepalive)
        finally:
            await self.channel.aclose("the client closed")

    def claim(self) -> bool:
        """Take a place for a call, if there is one without waiting."""
        slots = self._slots
        if slots is None or slots.value == 0 or not self.channel.writable or self.retired.is_set():
            return False
        slots.acquire_nowait()
        return True

    async def place(self) -> float:
        """Wait for a place; returns for how long, in seconds. Raises Unavailable if the connection is lost."""
        assert self._slots is not None, "calls come after handshake()"
        since = monotonic()
        await self._slots.acquire()
        try:
            await self.channel.ready()
        except BaseException:
            self._slots.release()
            raise
        return monotonic() - since

    def unary(self, method: Method, body: bytes, deadline: float, limit: float, waited: float = 0.0) -> UnaryCall:
        """Send a call, for which there must be a place; its owner must `close()` it.

        Args:
            deadline: when the server is to give up.
            limit: when the answer is no longer waited for. Both on the loop's clock.

        Raises:
            DeadlineExceeded: it was not sent, the deadline has passed.
            FrameTooLarge: it was not sent.
        """
        call = self._begin(UnaryCall, method, body, deadline, waited)
        if limit < math.inf:
            call.limit = limit
            if limit < self._look_at:
                self._expire_at(limit)
        return call

    def stream(self, method: Method, body: bytes, waited: float) -> StreamCall:
        """As unary(), for a stream, which has no deadline."""
        return self._begin(StreamCall, method, body, math.inf, waited)

    def _begin(self, kind: type[AnyCall], method: Method, body: bytes, deadline: float, waited: float) -> AnyCall:
        self._last_id = call_id = self._last_id + 1
        try:
            timeout = None
            if deadline < math.inf:
                timeout = deadline - self.loop.time()
                if timeout <= 0:
                    raise DeadlineExceeded(f"{self._description.name}.{method.name}: no time was left to begin")
            header = frames.Call(call_id, method.name, timeout, outgoing_trace())
            self.channel.send(header, body, urgent=not self.calls)
        except BaseException:
            self._release()
            raise
        stats = self._stats[method.name]
        call = self.calls[call_id] = kind(self, call_id, method, stats)
        stats.begin(waited)
        stats.bytes_sent += len(body)
        return call

    def _release(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def failure(self, method: Method, payload: Payload) -> Exception:
        """The exception in a Failure frame."""
        try:
            body = msgspec.msgpack.decode(payload, type=FailureBody)
        except DECODE_ERRORS as error:
            return ProtocolError(f"unreadable failure of {method.name}: {error}")
        if body.code == "unavailable":
            self.retired.set()
        return error_of(body, self._description, method.name)

    def lost(self, method: Method) -> Unavailable:
        return Unavailable(f"{self._description.name}.{method.name}: {self.channel.reason}")

    def _expire_at(self, limit: float) -> None:
        """Look at that time, or before, for calls that have reached their limit.

        One timer for all of them: nearly every call ends long before, and a timer of its own costs more than the rest.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = limit
        self._timer = self.loop.call_at(limit, self._expire)

    def _expire(self) -> None:
        self._timer, self._look_at = None, math.inf
        now = self.loop.time()
        waiting = [call for call in self.calls.values() if isinstance(call, UnaryCall) and not call.abandoned]
        for call in waiting:
            if call.limit <= now:
                call.expire()
        later = min((call.limit for call in waiting if call.limit > now), default=math.inf)
        if later < math.inf:
            self._expire_at(later)

    def _on_closing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.retired.set()
        if not self._welcome.done():
            self._welcome.set_result(None)
        for call in list(self.calls.values()):
            self._forget(call, failed=True)
            call.lose()

    def _forget(self, call: Outgoing, failed: bool) -> None:
        del self.calls[call.id]
        call.stats.end(monotonic() - call.begun, failed)
        self._release()

    def _on_frame(self, header: Header, payload: Payload) -> None:
        kind = type(header)
        if kind in FINAL:
            self._end(header, payload)  # type: ignore[arg-type]
            return
        match header:
            case frames.Item():
                call = self.calls.get(header.id)
                if call is None or not call.method.stream:
                    raise ProtocolError(f"an item of a stream nobody asked for ({header.id})")
                call.stats.bytes_received += len(payload)
                call.push(header, payload)
            case frames.Goodbye():
                self.retired.set()
            case frames.Welcome() if not self._welcome.done():
                if header.max_calls < 1 or header.max_frame < SMALLEST_LIMIT:
                    raise ProtocolError(f"no call fits in {header.max_calls} calls of {header.max_frame} bytes")
                self.channel.greeted(self._max_frame)
                self.channel.send_limit = header.max_frame
                self._welcome.set_result(header)
            case _:
                raise ProtocolError(f"{type(header).__name__} is not expected here")

    def _end(self, header: frames.Result | frames.End | frames.Failure, payload: Payload) -> None:
        call, kind = self.calls.get(header.id), type(header)
        if call is None or kind is (frames.Result if call.method.stream else frames.End):
            raise ProtocolError(f"{kind.__name__} for a call that cannot end so ({header.id})")
        call.stats.bytes_received += len(payload)
        self._forget(call, failed=kind is frames.Failure)
        call.push(header, payload)
