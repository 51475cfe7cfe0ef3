"""Byte planes through zstd: all first bytes of the elements, all second bytes …; for any dtype.

`PLANES` is a whole frame, `GAP_XOR` the gaps between changed elements and then old XOR new.
"""

from __future__ import annotations

import numpy as np
import zstandard

from ..interface import Bytes, CorruptVersion
from ..layout import elements
from .changes import Index, Unsigned, from_gaps, gaps


def pack_planes(dense: Bytes, itemsize: int) -> bytes:
    return _compress(_split(dense, itemsize))


def unpack_planes(payload: memoryview, length: int, itemsize: int) -> Bytes:
    """The `length` bytes of a frame. Raises CorruptVersion."""
    return _join(_decompress(payload, length), itemsize)


def pack_gap_xor(index: Index, before: Unsigned, after: Unsigned) -> bytes:
    parts = [_split(gaps(index).view(np.uint8), 4), _split((before ^ after).view(np.uint8), before.itemsize)]
    return _compress(np.concatenate(parts))


def unpack_gap_xor(payload: memoryview, changed: int, values: Unsigned) -> tuple[Index, Unsigned]:
    """Positions and new values, both [changed]; `values` are the old ones of all elements. Raises CorruptVersion."""
    plain = _decompress(payload, changed * (4 + values.itemsize))
    index = from_gaps(_join(plain[: 4 * changed], 4).view(np.uint32), len(values))
    return index, values[index] ^ elements(_join(plain[4 * changed :], values.itemsize), values.itemsize)


def _split(data: Bytes, itemsize: int) -> Bytes:
    return np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1)


def _join(planes: Bytes, itemsize: int) -> Bytes:
    return np.ascontiguousarray(planes.reshape(itemsize, -1).T).reshape(-1)


def _compress(plain: Bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(plain.data)


def _decompress(payload: memoryview, expected: int) -> Bytes:
    try:
        # The size in the header is what zstandard would allocate: look before it does.
        if zstandard.frame_content_size(payload) != expected:
            raise CorruptVersion(f"a payload holds other than the {expected} bytes its changes take")
        plain = zstandard.ZstdDecompressor().decompress(payload, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptVersion(f"a payload is not what zstd wrote: {error}") from error
    if len(plain) != expected:
        raise CorruptVersion(f"a payload of {len(plain)} bytes should have {expected}")
    return np.frombuffer(plain, np.uint8)
