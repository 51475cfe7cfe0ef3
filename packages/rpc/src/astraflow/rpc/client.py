"""Calling a served object: one connection that is made again when it is lost, and the rule of what is sent again.

A call is sent at most once unless its method is idempotent; an idempotent one is sent again on the next connection
until its deadline. While there is no connection, idempotent calls wait for one and others fail at once.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import structlog

from . import frames
from .address import Address, InprocAddress, SocketAddress, TcpAddress, TlsAddress, UnixAddress, parse
from .background import background
from .channel import CLOSE_TIMEOUT, Channel
from .connection import Connection, StreamCall
from .describe import Description, Method, describe
from .inproc import find
from .interface import (
    DeadlineExceeded,
    InterfaceMismatch,
    RpcError,
    Unauthorized,
    Unavailable,
)
from .invoke import decode_response, encode_request
from .proxy import StrictCarrier, carrier_of, make_proxy
from .stats import MethodStats
from .tls import BROKEN_OFF, Tls, client_context, explain, is_certificate_problem
from .token import Token, read_tokens

FIRST_DELAY = 0.05
LAST_DELAY = 2.0
DIAL_TIMEOUT = 10.0
STABLE_AFTER = 5.0
OWNER_FIRST = 0.02

REFUSED = (InterfaceMismatch, Unauthorized)

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Client:
    """Carries a proxy's calls over the connection of the moment."""

    def __init__(
        self,
        address: SocketAddress,
        description: Description,
        *,
        tls: Tls | None,
        token: Token | None,
        default_timeout: float,
        max_frame: int,
        keepalive: float,
    ) -> None:
        self.address = address
        self.stats = {name: MethodStats() for name in description.methods}
        self._description = description
        self._tls = tls
        self._token = token
        self._default_timeout = default_timeout
        self._max_frame = max_frame
        self._keepalive = keepalive
        self._connection: Connection | None = None
        self._problem: RpcError = Unavailable("not connected yet")
        self._changed = asyncio.Event()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # anyio.current_effective_deadline() without finding out anew, for each call, what kind of loop this is
        self._callers_deadline = anyio.lowlevel.current_token().backend_class.current_effective_deadline

    # --- the connection ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep connected until cancelled."""
        try:
            async with anyio.create_task_group() as tasks:
                delay = FIRST_DELAY
                while True:
                    try:
                        connection = await self._dial()
                    except RpcError as error:
                        self._use(None, error)
                    else:
                        tasks.start_soon(connection.run, name=f"connection to {self.address}")
                        since = anyio.current_time()
                        self._use(connection, self._problem)
                        await connection.retired.wait()
                        reason = connection.channel.reason or "the server is closing"
                        self._use(None, Unavailable(f"{self.address}: {reason}"))
                        log.info("connection lost", address=str(self.address), reason=reason)
                        if anyio.current_time() - since > STABLE_AFTER:
                            delay = FIRST_DELAY
                    await anyio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, LAST_DELAY)
        finally:
            self._closed = True
            self._use(None, Unavailable(f"{self.address}: the client is closed"))

    def _use(self, connection: Connection | None, problem: RpcError) -> None:
        self._connection, self._problem = connection, problem
        self._changed.set()
        self._changed = asyncio.Event()

    async def _dial(self) -> Connection:
        """Connect and shake hands. Raises an RpcError that says why it did not work."""
        connection = Connection(str(self.address), self._description, self.stats, self._max_frame, self._keepalive)
        try:
            with anyio.fail_after(DIAL_TIMEOUT):
                token = "" if self._token is None else (await anyio.to_thread.run_sync(read_tokens, self._token))[0]
                await self._open(connection.channel)
                await connection.handshake(token)
        except TimeoutError as error:
            connection.channel.abort("no answer")
            raise Unavailable(f"{self.address}: no answer within {DIAL_TIMEOUT:g} s") from error
        except (OSError, ValueError) as error:
            connection.channel.abort(explain(error))
            kind = Unauthorized if is_certificate_problem(error) else Unavailable
            raise kind(f"{self.address}: {explain(error)}") from error
        except BaseException as error:
            connection.channel.abort("the handshake failed")
            if isinstance(error, Unavailable) and isinstance(self.address, TlsAddress):
                raise Unavailable(f"{self.address}: {error}; {BROKEN_OFF}") from error
            raise
        return connection

    async def _open(self, channel: Channel) -> None:
        loop = asyncio.get_running_loop()
        match self.address:
            case UnixAddress(path):
                await loop.create_unix_connection(lambda: channel, path)
            case TlsAddress(host, port):
                context = await anyio.to_thread.run_sync(client_context, self._tls or Tls())
                await loop.create_connection(
                    lambda: channel,
                    host,
                    port,
                    ssl=context,
                    ssl_handshake_timeout=DIAL_TIMEOUT,
                    ssl_shutdown_timeout=CLOSE_TIMEOUT,
                )
            case TcpAddress(host, port):
                await loop.create_connection(lambda: channel, host, port)

    async def connected(self, timeout: float) -> None:
        """Wait for the first connection.

        Raises:
            Unavailable: there was none within `timeout` seconds; the message has the last reason.
            InterfaceMismatch, Unauthorized: the server refused us.
        """
        with anyio.move_on_after(timeout):
            await self._usable(wait=True)
            return
        raise Unavailable(f"no connection within {timeout:g} s: {self._problem}")

    async def _usable(self, wait: bool) -> Connection:
        while True:
            if self._connection is not None and not self._connection.retired.is_set():
                return self._connection
            if not wait or self._closed or isinstance(self._problem, REFUSED):
                raise type(self._problem)(str(self._problem))
            await self._changed.wait()

    # --- calls ---------------------------------------------------------------------------------------------------

    async def call(self, method: Method, request: object) -> Any:
        """One unary call, until the caller's deadline or `default_timeout`, whichever is earlier."""
        body = encode_request(method, request)
        deadline = self._callers_deadline()
        limit = self._loop.time() + self._default_timeout
        if deadline <= limit:
            try:
                return await self._attempts(method, body, deadline)
            except DeadlineExceeded:
                # The caller's own scope says what its deadline means; it must not be overtaken by the server's timer.
                if deadline < math.inf:
                    await anyio.sleep(max(0.0, deadline - anyio.current_time()) + OWNER_FIRST)
                    await anyio.lowlevel.checkpoint()  # a loop that was held up wakes us before it cancels us
                raise
        connection = self._connection
        if connection is not None and connection.claim():  # only the answer is to be waited for
            call = connection.unary(method, body, limit, limit)
            try:
                return decode_response(method, await call.answer)
            except DeadlineExceeded:
                raise self._late(method) from None
            except Unavailable:
                if not method.idempotent or self._closed:
                    raise
            finally:
                call.close()
        with anyio.CancelScope(deadline=limit):
            return await self._attempts(method, body, limit)
        raise self._late(method)

    async def _attempts(self, method: Method, body: bytes, deadline: float) -> Any:
        while True:
            connection = await self._usable(wait=method.idempotent)
            try:
                waited = await connection.place()
                call = connection.unary(method, body, deadline, math.inf, waited)
                try:
                    return decode_response(method, await call.answer)
                finally:
                    call.close()
            except Unavailable:
                if not method.idempotent or self._closed:
                    raise

    def _late(self, method: Method) -> RpcError:
        where = f"{self._description.name}.{method.name}"
        if self._connection is None:
            return Unavailable(f"{where}: no connection for {self._default_timeout:g} s: {self._problem}")
        return DeadlineExceeded(f"{where} did not end within the default timeout of {self._default_timeout:g} s")

    async def stream(self, method: Method, request: object) -> AsyncIterator[Any]:
        """A server stream. It has no deadline of its own: it lives until its end, its reader's, or the connection's."""
        call = await self._begin_stream(method, encode_request(method, request))
        try:
            while True:
                header, payload = await call.next()
                if isinstance(header, frames.End):
                    return
                yield decode_response(method, payload)
                call.consume(payload)
        finally:
            call.close()

    async def _begin_stream(self, method: Method, body: bytes) -> StreamCall:
        with anyio.move_on_after(self._default_timeout):
            while True:
                connection = await self._usable(wait=method.idempotent)
                try:
                    return connection.stream(method, body, await connection.place())
                except Unavailable:
                    if not method.idempotent or self._closed:
                        raise
        raise self._late(method)


@asynccontextmanager
async def connect(
    address: str,
    interface: Callable[..., T],
    *,
    tls: Tls | None = None,
    token: Token | None = None,
    default_timeout: float = 60.0,
    connect_timeout: float = 10.0,
    max_frame: int = frames.MAX_FRAME,
    keepalive: float = 10.0,
    strict: bool = False,
) -> AsyncIterator[T]:
    """A proxy of the object served as `interface` (a Protocol class) at an address as `serve` takes it.

    The first connection is waited for `connect_timeout` seconds, so a server may start later than its client; a lost
    one is made again for as long as the body runs.

    Args:
        tls: whom to trust and what to show at a tls:// address; None trusts the system's authorities.
        token: what to present; of several, the first.
        default_timeout: limit in seconds of a call whose caller has no earlier deadline.
        max_frame: largest message taken, in bytes.
        keepalive: a server that has been silent for 3 × this many seconds is given up.
        strict: at an inproc: address, hand every message over through msgspec and back instead of the object itself.

    Raises:
        ValueError: the address is malformed or plain TCP off this machine, or `tls` or `token` is not usable.
        TypeError: `interface` cannot be served.
        Unavailable: no server there.
        InterfaceMismatch: it serves something else; the message lists what differs.
        Unauthorized: it did not take the token, or one side the other's certificate.
        OSError: a file of `tls` or `token` cannot be read.
    """
    description = describe(interface)
    where = parse(address)
    await anyio.to_thread.run_sync(_check_credentials, where, tls, token)
    if isinstance(where, InprocAddress):
        impl = await find(where, description, connect_timeout)
        yield cast("T", make_proxy(description, StrictCarrier(impl, description)) if strict else impl)
        return
    client = Client(
        where,
        description,
        tls=tls,
        token=token,
        default_timeout=default_timeout,
        max_frame=max_frame,
        keepalive=keepalive,
    )
    async with background(client.run):
        await client.connected(connect_timeout)
        yield cast("T", make_proxy(description, client))


def _check_credentials(address: Address, tls: Tls | None, token: Token | None) -> None:
    if token is not None:
        read_tokens(token)
    if isinstance(address, TlsAddress):
        client_context(tls or Tls())
    elif tls is not None:
        raise ValueError(f"{address} is not encrypted, tls= is for a tls:// address")


def statistics(proxy: object) -> Mapping[str, MethodStats]:
    """Figures by method of a proxy that `connect` gave; empty for any other object."""
    carrier = carrier_of(proxy)
    return carrier.stats if isinstance(carrier, Client) else {}
