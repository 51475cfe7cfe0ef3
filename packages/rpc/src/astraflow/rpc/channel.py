"""One connection, either side: frames in through a callback, frames out whole, and a peer that died is noticed.

Everything here runs on the event loop's thread. A frame is written by one call without an await in it, so frames never
interleave; `ready()` before a message is what bounds the memory of unsent ones. Small control frames skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import anyio
import structlog

from .frames import (
    HANDSHAKE_LIMIT,
    FrameReader,
    Header,
    Payload,
    Ping,
    Pong,
    Refusal,
    RefusalKind,
    encode_head,
)
from .interface import FrameTooLarge, ProtocolError, Unavailable

WRITE_HIGH_WATER = 1 << 20
JOIN_BELOW = 1 << 16
CLOSE_TIMEOUT = 1.0
SILENT_INTERVALS = 2
MAX_REASON = 4096

log = structlog.get_logger(__name__)


class Channel(asyncio.BufferedProtocol):
    """Frames over a transport.

    `on_frame` is called with each frame, and may raise ProtocolError to refuse the peer. `closing` is set once no
    more frames are sent or handled, `lost` when the transport is gone; `reason` then says why. `on_made` is called
    when the transport is there, `on_closing` once when `closing` is set.
    """

    def __init__(
        self,
        on_frame: Callable[[Header, Payload], None],
        on_closing: Callable[[], None],
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        self.reader = FrameReader(HANDSHAKE_LIMIT)
        self.send_limit = HANDSHAKE_LIMIT
        self.closing = asyncio.Event()
        self.lost = asyncio.Event()
        self.reason = ""
        self.refusal: Refusal | None = None
        self._on_frame = on_frame
        self._on_closing = on_closing
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._heard = False

    # --- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        self._on_made()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if self.closing.is_set():
            return
        try:
            for header, payload in self.reader.advance(nbytes):
                self._handle(header, payload)
                if self.closing.is_set():
                    return
        except ProtocolError as error:
            self.refuse("ProtocolError", str(error))
        except FrameTooLarge as error:
            self.refuse("FrameTooLarge", str(error))

    def eof_received(self) -> None:
        self.reason = self.reason or "the peer closed the connection"

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._begin_closing(str(exc) if exc else "the connection was closed")
        self.lost.set()
        self._writable.set()

    def _handle(self, header: Header, payload: Payload) -> None:
        match header:
            case Ping():
                if self._writable.is_set():
                    self.send(Pong())
            case Pong():
                pass
            case Refusal():
                self.refusal = header
                self.close(f"refused by the peer: {header.message}")
            case _:
                self._on_frame(header, payload)

    # --- our side ------------------------------------------------------------------------------------------------

    async def writable(self) -> None:
        """Wait until a message may be written, or there is no more point in it."""
        while not self._writable.is_set():
            await self._writable.wait()

    async def ready(self) -> None:
        """Wait until a message may be written. Raises Unavailable if the connection is or goes down."""
        await self.writable()
        if self.closing.is_set():
            raise Unavailable(self.reason)

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Write one frame; on a closing connection it is dropped.

        Raises:
            FrameTooLarge: nothing was written.
        """
        head = encode_head(header, len(payload), self.send_limit)
        if self.closing.is_set() or self._transport is None:
            return
        if len(payload) < JOIN_BELOW:
            self._transport.write(head + payload)
        else:
            self._transport.write(head)
            self._transport.write(payload)

    def refuse(self, kind: RefusalKind, message: str) -> None:
        """Tell the peer why, and close."""
        log.warning("peer refused", kind=kind, reason=message[:MAX_REASON])
        self.send(Refusal(kind, message[:MAX_REASON]))
        self.close(message[:MAX_REASON])

    def close(self, reason: str) -> None:
        """Send what is written, then close. Nothing is handled or sent from here on."""
        self._begin_closing(reason)
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close at once, unsent frames included."""
        self.close(reason)
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self, reason: str) -> None:
        """Close and wait for it, about a second at most; also in a cancelled scope."""
        self.close(reason)
        with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
            await self.lost.wait()
        self.abort(reason)

    async def keep_alive(self, interval: float) -> None:
        """Ping after a silent interval; give the peer up after two more. Ends when the connection closes.

        Any byte counts as life, and so does the peer taking bytes of a large frame.
        """
        silent, unsent = 0, 0
        while True:
            with anyio.move_on_after(interval):
                await self.closing.wait()
                return
            if self._heard or self._backlog() != unsent:
                silent = 0
            elif silent == SILENT_INTERVALS:
                self.abort(f"the peer has been silent for {(silent + 1) * interval:g} s")
                return
            else:
                silent += 1
                if self._writable.is_set():
                    self.send(Ping())
            self._heard, unsent = False, self._backlog()

    def _begin_closing(self, reason: str) -> None:
        if not self.closing.is_set():
            self.reason = self.reason or reason
            self.closing.set()
            self._on_closing()

    def _backlog(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()
