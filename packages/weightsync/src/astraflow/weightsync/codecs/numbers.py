"""Arrays of integers through pcodec, and back from bytes that are not trusted.

pcodec answers damage with an error and writes only into the array it is given, whatever count the bytes claim; the
tests hold both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

from ..interface import CorruptVersion

_CONFIG = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op(), enable_8_bit=True)


def pack(numbers: NDArray[np.unsignedinteger]) -> bytes:
    """u8 bytes of a number as they are packed, the fewest that hold the largest, for pcodec's tables are written in
    them; then what pcodec makes. Nothing as nothing."""
    if not len(numbers):
        return b""
    width = min(numbers.itemsize, np.min_scalar_type(numbers.max()).itemsize)
    packed: bytes = standalone.simple_compress(numbers.astype(f"u{width}", copy=False), _CONFIG)
    return bytes([width]) + packed


def unpack(data: memoryview, length: int, dtype: Any) -> NDArray[Any]:
    """Exactly `length` numbers. Raises CorruptVersion."""
    kind = np.dtype(dtype)
    if not length:
        if len(data):
            raise CorruptVersion(f"a payload has {len(data)} bytes for no numbers")
        return np.empty(0, kind)
    width = data[0] if len(data) else 0
    if width not in (1, 2, 4) or width > kind.itemsize:
        raise CorruptVersion(f"a payload has numbers of {width} bytes where {kind} is expected")
    into = np.empty(length, f"u{width}")
    try:
        progress = standalone.simple_decompress_into(bytes(data[1:]), into)
    except (RuntimeError, TypeError) as error:
        raise CorruptVersion(f"a payload is not what pcodec wrote: {error}") from error
    if progress.n_processed != length or not progress.finished:
        raise CorruptVersion(f"a payload holds other than the {length} changes it claims")
    return into.astype(kind, copy=False)
