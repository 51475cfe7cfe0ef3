"""One frame of a version being made: compared, encoded, named by digests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import blake3
import xxhash
from msgspec.structs import replace

from .codecs import NAMES, UNCHANGED, Codec, Encoded, compare, encode
from .interface import Bytes, TensorSpec
from .layout import ITEMSIZE
from .manifest import FrameRecord
from .seconds import Seconds


class Made(NamedTuple):
    """A frame's change, and the digests of its dense bytes and of its payload."""

    dense: bytes
    delta: Encoded
    payload: bytes


def make(dense: Bytes, base: Bytes | None, dtype: str, codec: Codec, seconds: Seconds) -> Made:
    """The frame whose bytes are `dense`, as a change of `base`, where there is one. Counts diff and encode."""
    delta = UNCHANGED
    if base is not None:
        with seconds.of("diff"):
            found = compare(base, dense, dtype)
        with seconds.of("encode"):
            delta = encode(base, dense, dtype, codec, found)
    return Made(dense_digest(dense), delta, blake3.blake3(delta.payload).digest() if delta.payload else b"")


def dense_digest(dense: Bytes) -> bytes:
    return xxhash.xxh3_128_digest(dense.data)


class Records:
    """The records of frames, in the order in which their payloads are written to a part."""

    def __init__(self, part: int = 0) -> None:
        self.frames: list[FrameRecord] = []
        self.size = 0
        self._part = part

    def add(self, made: Made) -> None:
        size = len(made.delta.payload)
        self.frames.append(
            FrameRecord(
                dense=made.dense,
                changed=made.delta.changed,
                codec=made.delta.codec,
                part=self._part,
                position=self.size,
                size=size,
                payload=made.payload,
                anchor=b"",
            )
        )
        self.size += size

    def name_anchor(self, digests: Sequence[bytes]) -> None:
        """The digests of the frames' bytes in an anchor, in the same order."""
        self.frames = [replace(frame, anchor=digest) for frame, digest in zip(self.frames, digests, strict=True)]


def density(layout: Iterable[TensorSpec], frames: Iterable[FrameRecord]) -> float:
    """The share of the values that changed."""
    count = sum(spec.nbytes // ITEMSIZE[spec.dtype] for spec in layout)
    return sum(frame.changed for frame in frames) / max(1, count)


def count_codecs(frames: Iterable[FrameRecord]) -> dict[str, int]:
    """How many changed frames are in which codec, by its name."""
    return dict(Counter(NAMES.get(frame.codec, str(frame.codec)) for frame in frames if frame.size))
