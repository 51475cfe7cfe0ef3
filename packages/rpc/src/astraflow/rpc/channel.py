"""One connection, either side: frames in through a callback, frames out whole, and a peer that died is noticed.

Everything here runs on the event loop's thread. A frame is written by one call without an await in it, so frames never
interleave; `ready()` before a message is what bounds the memory of unsent ones. Small control frames skip it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import chain
from typing import cast

import anyio

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
from .sparing import SparingLog
from .tls import explain

WRITE_HIGH_WATER = 1 << 20
JOIN_BELOW = 1 << 16
CLOSE_TIMEOUT = 1.0
SILENT_INTERVALS = 2
MAX_REASON = 4096
CONTROL = (Ping, Pong, Refusal)
FRAMES_A_TURN = 16
"""So many received frames are handled in one turn of the event loop. Others have their turn after that, and the peer
can work on what was answered to the first of many frames while we work on the next."""


class Channel(asyncio.BufferedProtocol):
    """Frames over a transport.

    `on_frame` is called with each frame, and may raise ProtocolError to refuse the peer. `closing` is set once no
    more frames are sent or handled, `lost` when the transport is gone; `reason` then says why, and `error` what the
    transport failed with. While `writable` is false a message must wait in `ready()`. `on_closing` is called once when
    `closing` is set. `peer` is for the `log`.
    """

    def __init__(
        self,
        on_frame: Callable[[Header, Payload], None],
        on_closing: Callable[[], None],
        peer: str,
        log: SparingLog,
    ) -> None:
        self.reader = FrameReader(HANDSHAKE_LIMIT)
        self.send_limit = HANDSHAKE_LIMIT
        self.writable = True
        self.closing = asyncio.Event()
        self.lost = asyncio.Event()
        self.reason = ""
        self.refusal: Refusal | None = None
        self.error: Exception | None = None
        self.peer = peer
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._on_closing = on_closing
        self._transport: asyncio.Transport | None = None
        self._resumed = asyncio.Event()
        self._heard = False
        self._greeted = False
        self._taking = False
        self._unsent: list[Payload] = []
        self._unsent_size = 0

    # --- asyncio's side ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_WATER)
        if self.closing.is_set():
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = True
        if not self.closing.is_set():
            self._take(self.reader.advance(nbytes))

    def _take(self, frames: Iterator[tuple[Header, Payload]]) -> None:
        """Handle a turn's frames; what they make us send is written together at the end."""
        turn = FRAMES_A_TURN
        self._taking = True
        try:
            for header, payload in frames:
                if not turn:
                    self._take_later(chain(((header, payload),), frames))
                    break
                turn -= 1
                if type(header) in CONTROL:
                    self._control(header)  # type: ignore[arg-type]
                else:
                    self._on_frame(header, payload)
                if self.closing.is_set():
                    break
        except ProtocolError as error:
            self.refuse("ProtocolError", str(error))
        except FrameTooLarge as error:
            self.refuse("FrameTooLarge", str(error))
        finally:
            self._taking = False
            self._flush()

    def _take_later(self, frames: Iterator[tuple[Header, Payload]]) -> None:
        assert self._transport is not None, "frames come from a transport"
        self._transport.pause_reading()
        self._loop.call_soon(self._take_on, frames)

    def _take_on(self, frames: Iterator[tuple[Header, Payload]]) -> None:
        if self._transport is not None and not self.closing.is_set():
            self._transport.resume_reading()
            self._take(frames)

    def eof_received(self) -> None:
        self.reason = self.reason or "the peer closed the connection"

    def pause_writing(self) -> None:
        self.writable = False
        self._resumed.clear()

    def resume_writing(self) -> None:
        self.writable = True
        self._resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._begin_closing(explain(exc) if exc else "the connection was closed")
        self._forget_unsent()
        self.reader.rest()
        self.lost.set()
        self.resume_writing()

    def _control(self, header: Ping | Pong | Refusal) -> None:
        if isinstance(header, Refusal):
            self.refusal = header
            self.close(f"refused by the peer: {header.message}")
        elif not self._greeted:
            raise ProtocolError(f"{type(header).__name__} before the greeting")
        elif isinstance(header, Ping) and self.writable:
            self.send(Pong())

    # --- our side ------------------------------------------------------------------------------------------------

    def greeted(self, max_frame: int) -> None:
        """The peer has said who it is: larger frames are taken from it, and pings."""
        self._greeted = True
        self.reader.max_frame = max_frame

    def backlog(self) -> int:
        """Bytes that are written and not yet sent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def room(self) -> None:
        """Wait until a message may be written, or there is no more point in it."""
        while not self.writable:
            await self._resumed.wait()

    async def ready(self) -> None:
        """Wait until a message may be written. Raises Unavailable if the connection is or goes down."""
        await self.room()
        if self.closing.is_set():
            raise Unavailable(self.reason)

    def send(self, header: Header, payload: Payload = b"", urgent: bool = True) -> None:
        """Write one frame; on a closing connection it is dropped. What is not `urgent` may wait for the loop's next
        turn, so that many small frames become one write; while received frames are handled all wait for their end.

        Raises:
            FrameTooLarge: nothing was written.
        """
        head = encode_head(header, len(payload), self.send_limit)
        if self.closing.is_set() or self._transport is None:
            return
        if len(payload) < JOIN_BELOW:
            if not (self._unsent or urgent or self._taking):
                self._loop.call_soon(self._flush)
            self._unsent += (head, payload)
            self._unsent_size += len(head) + len(payload)
            if self._unsent_size > JOIN_BELOW or (urgent and not self._taking):
                self._flush()
        else:
            self._flush()
            self._transport.write(head)
            self._transport.write(payload)

    def _flush(self) -> None:
        if self._unsent:
            if self._transport is not None:
                self._transport.write(b"".join(self._unsent))
            self._forget_unsent()

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._unsent_size = 0

    def refuse(self, kind: RefusalKind, message: str) -> None:
        """Tell the peer why, and close."""
        self._log.warning("peer refused", peer=self.peer, kind=kind, reason=message[:MAX_REASON])
        self.send(Refusal(kind, message[:MAX_REASON]))
        self.close(message[:MAX_REASON])

    def close(self, reason: str) -> None:
        """Send what is written, then close. Nothing is handled or sent from here on."""
        self._begin_closing(reason)
        if self._transport is not None:
            self._flush()
            self._transport.close()
        else:
            self.lost.set()

    def abort(self, reason: str) -> None:
        """Close at once, unsent frames included."""
        self.close(reason)
        if self._transport is not None:
            self._transport.abort()

    def abandon(self, reason: str) -> None:
        """Use the transport no more: the loop has closed it before it was ours, and will not tell."""
        self._transport = None
        self._forget_unsent()
        self.close(reason)

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
            if self._heard or self.backlog() != unsent:
                silent = 0
            elif silent == SILENT_INTERVALS:
                self.abort(f"the peer has been silent for {(silent + 1) * interval:g} s")
                return
            else:
                silent += 1
                self.reader.rest()
                if self.writable:
                    self.send(Ping())
            self._heard, unsent = False, self.backlog()

    def _begin_closing(self, reason: str) -> None:
        if not self.closing.is_set():
            self.reason = self.reason or reason
            self.closing.set()
            self._on_closing()
