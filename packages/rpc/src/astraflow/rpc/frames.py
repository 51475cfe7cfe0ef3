"""Frames: what is on the wire, and how a stream of bytes becomes frames again. No I/O here.

    frame   = length: uint32 (of the rest, big-endian) | header length: uint16 | header | payload
    header  = msgpack array [tag, …], one of the structures below
    payload = msgpack of the method's message, of `Table` (Hello) or of `FailureBody` (Failure); else empty

Invariants: a length above the limit is refused before anything of the frame is read or allocated; memory is taken as
bytes come, so that a large frame which was only announced costs none; a payload's buffer belongs to that frame alone
and is read-only, so that views decoded from it stay valid for as long as they live.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from .buffers import Buffers, pages
from .interface import FrameTooLarge, ProtocolError

VERSION = 1
SCRATCH = 1 << 16
MEDIUM = 1 << 18
"""Frames up to this size come from the heap. Many of them may be held at once, more than are kept for the next one, and
what the heap gives was mostly used before: pages from the kernel cost a fault each."""

MAX_FRAME = 64 << 20
"""Default limit in bytes. msgspec holds the interpreter while it copies: 64 MiB of arrays take about 40 ms a side."""

HANDSHAKE_LIMIT = 1 << 18
STREAM_WINDOW = 16 << 20
ITEM_OVERHEAD = 256

TLS_RECORDS = (0x1503, 0x1603)
"""How a TLS alert and a TLS handshake begin."""

Payload = bytes | memoryview
DECODE_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)


RefusalKind = Literal["InterfaceMismatch", "Unauthorized", "ProtocolError", "FrameTooLarge", "Busy"]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client: who I am. The payload is my `Table`; `max_frame` what I accept."""

    version: int
    fingerprint: str
    max_frame: int
    token: str = ""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server: speak. `max_calls` may be in flight on this connection."""

    fingerprint: str
    max_frame: int
    max_calls: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Either side, last frame: why this connection closes."""

    kind: RefusalKind
    message: str


class Call(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Client: run a method. `timeout` in seconds from now (None: no deadline), `trace` says what it is part of.

    Exactly one final frame answers it.
    """

    id: int
    method: str
    timeout: float | None = None
    trace: str = ""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    id: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Client: this much (`cost`) of a stream has been consumed."""

    id: int
    amount: int


class Item(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Server: one item of a stream; the costs of those sent and not yet credited stay within the window + one item."""

    id: int


class Result(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Server, final."""

    id: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Server, final: the stream is over."""

    id: int


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Server, final: the payload is a `FailureBody`."""

    id: int


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Server: no new calls; those in flight go on."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=12):
    pass


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=13):
    pass


Header = Hello | Welcome | Refusal | Call | Cancel | Credit | Item | Result | End | Failure | Goodbye | Ping | Pong

_length = struct.Struct(">I")
_sizes = struct.Struct(">IH")
_decode_header = msgspec.msgpack.Decoder[Any](Header).decode
_encoder = msgspec.msgpack.Encoder()
encode, encode_into = _encoder.encode, _encoder.encode_into


def cost(payload: Payload) -> int:
    """What an item counts against the window: its bytes, and the objects that hold it."""
    return len(payload) + ITEM_OVERHEAD


def encode_head(header: Header, payload_size: int, limit: int) -> bytes:
    """The bytes before the payload.

    Raises:
        FrameTooLarge: the frame exceeds the peer's `limit`.
    """
    head = encode(header)
    length = 2 + len(head) + payload_size
    if length > limit:
        raise FrameTooLarge(f"a message of {length} bytes exceeds the limit of {limit} bytes; send arrays in pieces")
    return _sizes.pack(length, len(head)) + head


class FrameReader:
    """Cuts received bytes into frames. Small ones pass through a scratch buffer and are copied out of it; a large one
    is received straight into a buffer of its own."""

    def __init__(self, max_frame: int) -> None:
        self.max_frame = max_frame
        self._scratch = memoryview(bytearray(SCRATCH))
        self._end = 0
        self._large: memoryview | None = None
        self._buffers = Buffers(pages)
        self._filled = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        return self._scratch[self._end :]

    def advance(self, count: int) -> Iterator[tuple[Header, Payload]]:
        """Say that `count` bytes were put into `buffer()`; run the iterator to its end before receiving more.

        Raises:
            ProtocolError: not a frame of this protocol.
            FrameTooLarge: a length above `max_frame`.
        """
        if self._large is not None:
            self._filled += count
            if self._filled == len(self._large):
                frame, self._large = self._large.toreadonly(), None
                payload = 6 + _sizes.unpack_from(frame)[1]
                yield _header(frame, 0, payload, len(frame)), frame[payload:]
            return
        self._end = end = self._end + count
        if end < 4:
            return
        start, stop = 0, 4 + self._length(self._scratch, 0)
        if stop <= end:
            data = bytes(self._scratch[:end])  # at once: slices of bytes cost less than those of a view
            while stop <= end:
                payload = start + 6 + _sizes.unpack_from(data, start)[1]
                yield _header(data, start, payload, stop), data[payload:stop]
                start = stop
                if end - start < 4:
                    break
                stop = start + 4 + self._length(data, start)
        self._make_room(start, stop)

    def _length(self, data: bytes | memoryview, start: int) -> int:
        length: int
        (length,) = _length.unpack_from(data, start)
        if length > self.max_frame:
            raise _too_large(length, self.max_frame)
        if length < 2:
            raise ProtocolError("a frame without a header")
        return length

    def _make_room(self, start: int, stop: int) -> None:
        """Keep what has come of the frame from `start` to `stop`, and see that the rest finds room."""
        pending = self._end - start
        if pending >= 4 and stop - start > SCRATCH:
            size = stop - start
            self._large = memoryview(bytearray(size) if size <= MEDIUM else self._buffers.take(size))[:size]
            self._filled = pending
            self._large[:pending] = self._scratch[start : self._end]
            pending = 0
        elif pending and start:
            self._scratch[:pending] = bytes(self._scratch[start : self._end])
        self._end = pending

    def rest(self) -> None:
        """Let go of memory that was kept for frames to come."""
        self._buffers.clear()


def _too_large(length: int, limit: int) -> FrameTooLarge | ProtocolError:
    if length >> 16 in TLS_RECORDS:
        return ProtocolError("one side speaks TLS and the other does not: use tls:// on both, or tcp:// on both")
    return FrameTooLarge(f"a frame of {length} bytes exceeds the limit of {limit} bytes")


def _header(frame: bytes | memoryview, start: int, payload: int, stop: int) -> Header:
    """The header of the frame from `start` to `stop`, which ends where its payload begins."""
    if payload > stop:
        raise ProtocolError("the header is longer than its frame")
    try:
        header: Header = _decode_header(frame[start + 6 : payload])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"unknown header: {error}") from error
    return header
