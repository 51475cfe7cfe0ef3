"""How the change of a frame is written: which elements changed, and into what.

A codec is a number in the frame's record of the manifest, so others can be added beside these:

* `RAW`: the new dense bytes;
* `GAP_XOR`: gaps between changed positions and old XOR new, in byte planes through zstd; any dtype;
* `L0`: gaps, and the difference in the monotone integer order of bf16, both through pcodec; BF16 only. 87-91 % of the
  bf16 values an optimiser step changes move by one unit in the last place, which leaves about 10 bits a change.

Bits are compared and restored, never values: NaN payloads and the sign of zero survive. A decoder trusts no length,
position or count: what does not add up is a CorruptVersion, before memory of a claimed size is touched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from .interface import Bytes, CorruptVersion
from .layout import ITEMSIZE, elements

RAW = 0
GAP_XOR = 2
L0 = 3

_CHUNK = 1 << 20
"""Elements compared at a time: two inputs and the mask stay in cache."""

Index = NDArray[np.int64]


class Encoded(NamedTuple):
    """`changed` elements of a frame as `payload` in `codec`; an unchanged frame has an empty payload."""

    codec: int
    changed: int
    payload: bytes | memoryview


def changed_elements(old: Bytes, new: Bytes, itemsize: int) -> Index:
    """Positions [K], ascending, of the elements whose bits differ."""
    before, after = elements(old, itemsize), elements(new, itemsize)
    parts = []
    for start in range(0, len(before), _CHUNK):
        stop = start + _CHUNK
        part = np.flatnonzero(before[start:stop] != after[start:stop])
        part += start
        parts.append(part)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def sparse_is_smaller(changed: int, itemsize: int, length: int) -> bool:
    """Whether int64 positions and values take less memory than the dense frame of `length` bytes."""
    return changed * (8 + itemsize) < length


def encode(old: Bytes, new: Bytes, dtype: str) -> Encoded:
    """The change from `old` to `new` (uint8, same length) in the smaller of the dtype's codec and `RAW`.

    A `RAW` payload is a view of `new`, not a copy.
    """
    itemsize = ITEMSIZE[dtype]
    index = changed_elements(old, new, itemsize)
    if not len(index):
        return Encoded(RAW, 0, b"")
    before, after = elements(old, itemsize)[index], elements(new, itemsize)[index]
    codec = L0 if dtype == "BF16" else GAP_XOR
    gaps = _gaps(index)
    payload = _pack_pcodec(gaps, _ulps(before, after)) if codec == L0 else _pack_zstd(gaps, before ^ after)
    if len(payload) >= len(new):
        return Encoded(RAW, len(index), new.data)
    return Encoded(codec, len(index), payload)


def apply(codec: int, changed: int, payload: bytes | memoryview, frame: Bytes, dtype: str) -> Index | None:
    """Bring `frame` (uint8, writable, the old bytes) to the new ones, in place.

    Returns the positions [changed] of the changed elements, or None where the whole frame was replaced.
    Raises CorruptVersion; the frame is then undefined.
    """
    itemsize = ITEMSIZE[dtype]
    values = elements(frame, itemsize)
    if codec == RAW:
        if len(payload) != len(frame):
            raise CorruptVersion(f"a raw frame of {len(frame)} bytes has a payload of {len(payload)}")
        frame[:] = np.frombuffer(payload, np.uint8)
        return None
    if not 0 < changed <= len(values):
        raise CorruptVersion(f"{changed} changes in a frame of {len(values)} elements")
    if codec == L0 and dtype == "BF16":
        gaps, ulps = _unpack_pcodec(payload, changed)
        index = _positions(gaps, len(values))
        values[index] = _add_ulps(values[index], ulps)
    elif codec == GAP_XOR:
        gaps, difference = _unpack_zstd(payload, changed, itemsize)
        index = _positions(gaps, len(values))
        values[index] ^= difference
    else:
        raise CorruptVersion(f"codec {codec} for {dtype} is unknown; a newer version of this package may know it")
    return index


def _gaps(index: Index) -> NDArray[np.uint32]:
    """The number of unchanged elements before each changed one."""
    return (np.diff(index, prepend=-1) - 1).astype(np.uint32)


def _positions(gaps: NDArray[np.uint32], count: int) -> Index:
    """Ascending by construction: a gap is not negative, and 2^32 of them cannot overflow int64."""
    index = np.cumsum(gaps, dtype=np.int64)
    index += np.arange(len(gaps))
    if index[-1] >= count:
        raise CorruptVersion(f"a change at element {int(index[-1])} of a frame of {count}")
    return index


def _monotone(bits: NDArray[np.unsignedinteger]) -> NDArray[np.uint16]:
    """bf16 bits as integers in the order of the values they mean; a bijection of 16 bits."""
    signed = bits.view(np.int16)
    return bits ^ ((signed >> 15).view(np.uint16) | np.uint16(0x8000))


def _from_monotone(order: NDArray[np.uint16]) -> NDArray[np.uint16]:
    flipped = (~order).view(np.int16) >> 15
    return order ^ (flipped.view(np.uint16) | np.uint16(0x8000))


def _ulps(before: NDArray[np.unsignedinteger], after: NDArray[np.unsignedinteger]) -> NDArray[np.uint16]:
    """The difference in units in the last place, modulo 2^16, as zigzag: small for small changes of either sign."""
    difference = (_monotone(after) - _monotone(before)).view(np.int16)
    return ((difference << 1) ^ (difference >> 15)).view(np.uint16)


def _add_ulps(before: NDArray[np.unsignedinteger], zigzag: NDArray[np.uint16]) -> NDArray[np.uint16]:
    difference = (zigzag >> 1) ^ (~(zigzag & 1) + np.uint16(1))
    return _from_monotone(_monotone(before) + difference)


def _pack_pcodec(gaps: NDArray[np.uint32], ulps: NDArray[np.uint16]) -> bytes:
    """u32 length of the gaps' part, the gaps' part, the values' part."""
    config = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    first: bytes = standalone.simple_compress(gaps, config)
    second: bytes = standalone.simple_compress(ulps, config)
    return len(first).to_bytes(4, "little") + first + second


def _unpack_pcodec(payload: bytes | memoryview, changed: int) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    split = 4 + int.from_bytes(payload[:4], "little")
    gaps, ulps = np.empty(changed, np.uint32), np.empty(changed, np.uint16)
    for part, into in ((payload[4:split], gaps), (payload[split:], ulps)):
        try:
            progress = standalone.simple_decompress_into(bytes(part), into)
        except (RuntimeError, TypeError) as error:
            raise CorruptVersion(f"a payload is not what pcodec wrote: {error}") from error
        if progress.n_processed != changed or not progress.finished:
            raise CorruptVersion(f"a payload holds other than the {changed} changes it claims")
    return gaps, ulps


def _pack_zstd(gaps: NDArray[np.uint32], difference: NDArray[np.unsignedinteger]) -> bytes:
    """Byte planes: all first bytes, all second bytes …, of the gaps, then of the values."""
    planes = [part.view(np.uint8).reshape(len(part), -1).T for part in (gaps, difference)]
    return zstandard.ZstdCompressor(level=1).compress(np.concatenate(planes).tobytes())


def _unpack_zstd(
    payload: bytes | memoryview, changed: int, itemsize: int
) -> tuple[NDArray[np.uint32], NDArray[np.unsignedinteger]]:
    expected = changed * (4 + itemsize)
    try:
        # The size in the header is what zstandard would allocate: look before it does.
        if zstandard.frame_content_size(payload) != expected:
            raise CorruptVersion(f"a payload holds other than the {changed} changes it claims")
        plain = zstandard.ZstdDecompressor().decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptVersion(f"a payload is not what zstd wrote: {error}") from error
    if len(plain) != expected:
        raise CorruptVersion(f"a payload of {len(plain)} bytes should have {expected}")
    planes = np.frombuffer(plain, np.uint8).reshape(4 + itemsize, changed)
    gaps = np.ascontiguousarray(planes[:4].T).view(np.uint32).reshape(-1)
    return gaps, elements(np.ascontiguousarray(planes[4:].T).reshape(-1), itemsize)
