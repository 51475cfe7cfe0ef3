"""Bytes to frames and back, however the bytes are cut; anything else is refused."""

from __future__ import annotations

import contextlib
import resource
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.rpc import FrameTooLarge, ProtocolError
from astraflow.rpc.frames import SCRATCH, Call, FrameReader, Header, Item, Payload, Ping, encode_head

LIMIT = 1 << 20


def frame(header: Header, payload: bytes = b"") -> bytes:
    return encode_head(header, len(payload), LIMIT) + payload


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> list[tuple[Header, Payload]]:
    found: list[tuple[Header, Payload]] = []
    position, step = 0, 0
    while position < len(data):
        buffer = reader.buffer()
        assert len(buffer)
        size = min(len(buffer), len(data) - position, cuts[step % len(cuts)] if cuts else len(data))
        buffer[:size] = data[position : position + size]
        found.extend(reader.advance(size))
        position, step = position + size, step + 1
    return found


SIZES = st.one_of(st.integers(0, 300), st.integers(SCRATCH - 40, SCRATCH + 40), st.integers(0, 300_000))


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(SIZES, max_size=6), cuts=st.lists(st.integers(1, 100_000), min_size=1, max_size=5))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sizes: list[int], cuts: list[int]) -> None:
    payloads = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    headers: list[Header] = [Item(index) for index in range(len(sizes))]
    data = b"".join(map(frame, headers, payloads))
    cuts = [max(cut, len(data) // 2000 + 1) for cut in cuts]
    found = feed(FrameReader(LIMIT), data, cuts)
    assert [header for header, _ in found] == headers
    assert [bytes(payload) for _, payload in found] == payloads


@pytest.mark.parametrize("size", [100, SCRATCH * 3, 20 << 20])
def test_a_payload_is_read_only_and_its_own(size: int) -> None:
    reader = FrameReader(64 << 20)
    ((_, first),) = feed(reader, encode_head(Item(1), size, 64 << 20) + b"a" * size, [])
    feed(reader, encode_head(Item(2), size, 64 << 20) + b"b" * size, [])
    view = memoryview(first)
    assert view.readonly
    assert view[0] == view[-1] == ord("a")


def test_frames_that_are_held_a_while_use_memory_again() -> None:
    """As those of a server that keeps what it was sent until a batch is full."""
    reader, held = FrameReader(LIMIT), deque[Payload](maxlen=64)
    data = frame(Item(1), bytes(140_000))

    def faults(frames: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(frames):
            ((_, payload),) = feed(reader, data, [])
            held.append(payload)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults(128)
    assert faults(256) < 256 * 8  # a frame has 35 pages


def test_a_length_above_the_limit_is_refused_before_its_frame_is_read() -> None:
    reader = FrameReader(LIMIT)
    with pytest.raises(FrameTooLarge, match="exceeds the limit of 1048576"):
        feed(reader, (LIMIT + 1).to_bytes(4, "big"), [])


def test_the_sender_refuses_it_too() -> None:
    with pytest.raises(FrameTooLarge, match="exceeds the limit"):
        encode_head(Item(1), LIMIT, LIMIT)


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=200), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=3))
def test_garbage_is_refused_or_waits_for_more(junk: bytes, cuts: list[int]) -> None:
    reader = FrameReader(LIMIT)
    with contextlib.suppress(ProtocolError, FrameTooLarge):
        feed(reader, frame(Ping()) + junk, cuts)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\x00\x09\x91",
        b"\x00\x01\xc1",
        b"\x00\x02\x91\x63",
        b"\xff\xff" + b"\x91" * 65535,
        b"\x00\x06\x93\x04\xa1a\xa1b",
    ],
)
def test_malformed_headers_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        feed(FrameReader(LIMIT), len(body).to_bytes(4, "big") + body, [])


def test_a_header_is_what_it_was() -> None:
    ((found, _),) = feed(FrameReader(LIMIT), frame(Call(7, "ask", 1.5)), [])
    assert found == Call(7, "ask", 1.5)
