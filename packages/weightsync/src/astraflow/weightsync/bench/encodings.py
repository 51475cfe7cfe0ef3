"""The ways to send a frame that are compared: this package's codecs, and what others send.

Every one turns the old and the new bytes of a bf16 frame into a payload, and a payload into what it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import zstandard

from ..codecs import Change, Codec, changed_elements, decode, encode
from ..interface import Bytes
from ..layout import elements

Payload = bytes | memoryview
Pack = Callable[[Bytes, Bytes], Payload]
Unpack = Callable[[Payload, Bytes], Change]


class Encoding(NamedTuple):
    """`unpack(payload, old)` says what becomes of `old`, which it does not write to."""

    name: str
    pack: Pack
    unpack: Unpack


def encodings() -> list[Encoding]:
    return [
        Encoding("full copy", lambda old, new: new.data, _dense),
        Encoding("full, byte planes + zstd-1", *_codec("planes")),
        Encoding("index32 + value (AstraFlow)", _pack_index, _unpack_index),
        Encoding("gap16 + value + zstd-1 (as PULSE)", _pack_gaps, _unpack_gaps),
        Encoding("XOR + zstd-1 (as slime)", _pack_xor, _unpack_xor),
        Encoding("L0", *_codec("l0")),
        Encoding("L2", *_codec("l2")),
    ]


def _codec(name: Codec) -> tuple[Pack, Unpack]:
    """A codec of this package. The frame's record, which a manifest carries, is u8 codec and u32 changes here; nothing
    for an unchanged frame."""

    def pack(old: Bytes, new: Bytes) -> Payload:
        made = encode(old, new, "BF16", name)
        if not made.changed:
            return b""
        return bytes([made.codec]) + made.changed.to_bytes(4, "little") + made.payload

    def unpack(payload: Payload, old: Bytes) -> Change:
        if not payload:
            return Change(np.empty(0, np.int64), np.empty(0, np.uint8))
        view = memoryview(payload)
        return decode(view[0], int.from_bytes(view[1:5], "little"), view[5:], old, "BF16")

    return pack, unpack


def _dense(payload: Payload, old: Bytes) -> Change:
    return Change(None, np.frombuffer(payload, np.uint8))


def _pack_index(old: Bytes, new: Bytes) -> Payload:
    index = changed_elements(old, new, 2)
    return index.astype(np.uint32).tobytes() + elements(new, 2)[index].tobytes()


def _unpack_index(payload: Payload, old: Bytes) -> Change:
    count = len(payload) // 6
    index = np.frombuffer(payload, np.uint32, count).astype(np.int64)
    return Change(index, np.frombuffer(payload, np.uint8, offset=4 * count))


def _pack_gaps(old: Bytes, new: Bytes) -> Payload:
    """A gap of 65535 is a step without a change."""
    index = changed_elements(old, new, 2)
    gaps = np.diff(index, prepend=-1) - 1
    escapes = gaps // 0xFFFF
    spread = np.full(len(gaps) + int(escapes.sum()), 0xFFFF, np.uint16)
    spread[np.cumsum(escapes + 1) - 1] = gaps % 0xFFFF
    plain = spread.tobytes() + elements(new, 2)[index].tobytes()
    return len(spread).to_bytes(4, "little") + zstandard.ZstdCompressor(level=1).compress(plain)


def _unpack_gaps(payload: Payload, old: Bytes) -> Change:
    plain = zstandard.ZstdDecompressor().decompress(memoryview(payload)[4:])
    spread = np.frombuffer(plain, np.uint16, int.from_bytes(payload[:4], "little"))
    changes = spread != 0xFFFF
    steps = spread + changes.astype(np.int64)
    return Change((np.cumsum(steps) - 1)[changes], np.frombuffer(plain, np.uint8, offset=2 * len(spread)))


def _pack_xor(old: Bytes, new: Bytes) -> Payload:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)


def _unpack_xor(payload: Payload, old: Bytes) -> Change:
    return Change(None, old ^ np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8))
