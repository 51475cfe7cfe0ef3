"""Payloads of the journal: msgpack, compressed by zstd; and sequences whose arrays are stored once.

Invariant: a `TrainSample` is stored without the arrays that its trajectory holds, and comes back equal.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import zstandard

from ..arrays import Array
from ..interface import TrainSample, Trajectory
from ..sequence import Sequence

LEVEL = -1
"""Log-probabilities hardly compress: the cheapest level takes a quarter of the time for a fifth more bytes."""

ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")
NOTHING = Array("bool", (0,), memoryview(b""))

T = TypeVar("T")


class Codec:
    """Encodes and decodes for one thread."""

    def __init__(self) -> None:
        self._compress = zstandard.ZstdCompressor(level=LEVEL).compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._encode = msgspec.msgpack.Encoder().encode
        self._trajectory = msgspec.msgpack.Decoder(Trajectory).decode

    def pack(self, value: Any) -> bytes:
        return self._compress(self._encode(value))

    def unpack(self, data: bytes, kind: type[T]) -> T:
        return msgspec.msgpack.decode(self._decompress(data), type=kind)

    def trajectory(self, data: bytes) -> Trajectory:
        return self._trajectory(self._decompress(data))


def bare(sample: TrainSample, original: Sequence | None = None) -> TrainSample:
    """The sample without its arrays; those that are not the `original`'s own (a stage replaced them) stay."""
    replace = msgspec.structs.replace
    sequence = sample.sequence
    gone = {name: NOTHING for name in ARRAYS if original is None or getattr(sequence, name) is getattr(original, name)}
    return replace(sample, sequence=replace(sequence, **gone))


def clothed(sample: TrainSample, original: Sequence) -> TrainSample:
    """A bare sample with the arrays of `original` where it has none of its own."""
    replace = msgspec.structs.replace
    sequence = sample.sequence
    back = {name: getattr(original, name) for name in ARRAYS if getattr(sequence, name) == NOTHING}
    return replace(sample, sequence=replace(sequence, **back))
