"""The client's side of one connection: its handshake and the calls in flight on it.

Whatever happens, each call gets its frames in order and then one end: a final frame, or `Unavailable` when the
connection is lost. A call whose caller has gone keeps its id until the server's final frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import NoReturn

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
from .stats import MethodStats

SMALLEST_LIMIT = 1024

REFUSALS: Mapping[str, type[RpcError]] = {
    "InterfaceMismatch": InterfaceMismatch,
    "Unauthorized": Unauthorized,
    "ProtocolError": ProtocolError,
    "FrameTooLarge": FrameTooLarge,
}


class Outgoing:
    """A call in flight, as its caller waits on it."""

    def __init__(self, connection: Connection, call_id: int, method: Method) -> None:
        self.id = call_id
        self.method = method
        self.abandoned = False
        self.buffered = 0
        self._connection = connection
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
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> tuple[Header, Payload]:
        """The next frame. Raises Unavailable if the connection is lost before it came, or what a Failure says."""
        if self._frames and self.method.stream:
            await asyncio.sleep(0)  # a reader of buffered items must not hold the loop
        while not self._frames:
            if self._connection.channel.closing.is_set():
                self._connection.raise_lost(self.method)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        header, payload = self._frames.popleft()
        self.buffered -= frames.cost(payload)
        if isinstance(header, frames.Failure):
            raise self._connection.failure(self.method, payload)
        return header, payload

    def consume(self, payload: Payload) -> None:
        """Say that an item has been taken; half a window at a time the server hears of it."""
        self._consumed += frames.cost(payload)
        if self._consumed >= frames.STREAM_WINDOW // 2:
            self._connection.channel.send(frames.Credit(self.id, self._consumed))
            self._consumed = 0

    def close(self) -> None:
        """The caller goes. If the call has not ended, the server is told to cancel it."""
        self._frames.clear()
        if not self.abandoned and self.id in self._connection.calls:
            self.abandoned = True
            self._connection.channel.send(frames.Cancel(self.id))


class Connection:
    """`retired` is set when no new call may begin here: the server said goodbye, or the connection is gone."""

    def __init__(
        self, description: Description, stats: Mapping[str, MethodStats], max_frame: int, keepalive: float
    ) -> None:
        self.channel = Channel(self._on_frame, self._on_closing)
        self.calls: dict[int, Outgoing] = {}
        self.retired = asyncio.Event()
        self._description = description
        self._stats = stats
        self._max_frame = max_frame
        self._keepalive = keepalive
        self._welcome: asyncio.Future[frames.Welcome | None] = asyncio.get_running_loop().create_future()
        self._slots: anyio.Semaphore | None = None
        self._last_id = 0

    async def handshake(self, token: str | None) -> None:
        """Introduce us.

        Raises:
            InterfaceMismatch, Unauthorized, ProtocolError: the server refused.
            Unavailable: the connection was lost.
        """
        table = frames.encode(self._description.table)
        hello = frames.Hello(frames.VERSION, self._description.fingerprint, self._max_frame, token or "")
        self.channel.send(hello, table)
        welcome = await self._welcome
        if welcome is None:
            refusal = self.channel.refusal
            if refusal is not None:
                raise REFUSALS[refusal.kind](refusal.message)
            raise Unavailable(self.channel.reason)
        self._slots = anyio.Semaphore(welcome.max_calls, fast_acquire=True)

    async def run(self) -> None:
        """Keep the connection until it closes; when cancelled, close it."""
        try:
            await self.channel.keep_alive(self._keepalive)
        finally:
            await self.channel.aclose("the client closed")

    async def begin(self, method: Method, body: bytes, deadline: float) -> Outgoing:
        """Send a call; its owner must `close()` it.

        Raises:
            Unavailable: it was not sent.
            DeadlineExceeded: the deadline (anyio's clock) passed before it could be sent.
            FrameTooLarge: it was not sent.
        """
        assert self._slots is not None, "begin() comes after handshake()"
        await self._slots.acquire()
        try:
            await self.channel.ready()
            timeout = deadline - asyncio.get_running_loop().time()
            if timeout <= 0:
                raise DeadlineExceeded(f"{self._description.name}.{method.name}: no time was left to begin the call")
            self._last_id += 1
            header = frames.Call(self._last_id, method.name, None if timeout == float("inf") else timeout)
            self.channel.send(header, body)
        except BaseException:
            self._slots.release()
            raise
        call = self.calls[header.id] = Outgoing(self, header.id, method)
        stats = self._stats[method.name]
        stats.calls += 1
        stats.in_flight += 1
        stats.bytes_sent += len(body)
        return call

    def failure(self, method: Method, payload: Payload) -> Exception:
        """The exception in a Failure frame."""
        try:
            body = msgspec.msgpack.decode(payload, type=FailureBody)
        except DECODE_ERRORS as error:
            return ProtocolError(f"unreadable failure of {method.name}: {error}")
        if body.code == "unavailable":
            self.retired.set()
        return error_of(body, self._description, method.name)

    def raise_lost(self, method: Method) -> NoReturn:
        raise Unavailable(f"{self._description.name}.{method.name}: {self.channel.reason}")

    def _on_closing(self) -> None:
        self.retired.set()
        if not self._welcome.done():
            self._welcome.set_result(None)
        for call in list(self.calls.values()):
            self._forget(call, failed=True)
            call.wake()

    def _forget(self, call: Outgoing, failed: bool) -> None:
        del self.calls[call.id]
        stats = self._stats[call.method.name]
        stats.in_flight -= 1
        stats.failures += failed
        if self._slots is not None:
            self._slots.release()

    def _on_frame(self, header: Header, payload: Payload) -> None:
        match header:
            case frames.Result() | frames.End() | frames.Failure():
                self._end(header, payload)
            case frames.Item():
                call = self.calls.get(header.id)
                if call is None or not call.method.stream:
                    raise ProtocolError(f"an item of a stream nobody asked for ({header.id})")
                self._stats[call.method.name].bytes_received += len(payload)
                call.push(header, payload)
            case frames.Goodbye():
                self.retired.set()
            case frames.Welcome() if not self._welcome.done():
                if header.max_calls < 1 or header.max_frame < SMALLEST_LIMIT:
                    raise ProtocolError(f"no call fits in {header.max_calls} calls of {header.max_frame} bytes")
                self.channel.reader.max_frame = self._max_frame
                self.channel.send_limit = header.max_frame
                self._welcome.set_result(header)
            case _:
                raise ProtocolError(f"{type(header).__name__} is not expected here")

    def _end(self, header: frames.Result | frames.End | frames.Failure, payload: Payload) -> None:
        call = self.calls.get(header.id)
        if call is None or isinstance(header, frames.End if not call.method.stream else frames.Result):
            raise ProtocolError(f"{type(header).__name__} for a call that cannot end so ({header.id})")
        self._stats[call.method.name].bytes_received += len(payload)
        self._forget(call, failed=isinstance(header, frames.Failure))
        call.push(header, payload)
