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


def pack(numbers: NDArray[np.unsignedinteger]) -> bytes:
    """uint8 travels as uint16; nothing as nothing."""
    if not len(numbers):
        return b""
    config = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    wide = numbers.astype(np.uint16) if numbers.itemsize == 1 else numbers
    packed: bytes = standalone.simple_compress(wide, config)
    return packed


def unpack(data: memoryview, length: int, dtype: Any) -> NDArray[Any]:
    """Exactly `length` numbers. Raises CorruptVersion."""
    kind = np.dtype(dtype)
    if not length:
        if len(data):
            raise CorruptVersion(f"a payload has {len(data)} bytes for no numbers")
        return np.empty(0, kind)
    into = np.empty(length, np.uint16 if kind.itemsize == 1 else kind)
    try:
        progress = standalone.simple_decompress_into(bytes(data), into)
    except (RuntimeError, TypeError) as error:
        raise CorruptVersion(f"a payload is not what pcodec wrote: {error}") from error
    if progress.n_processed != length or not progress.finished:
        raise CorruptVersion(f"a payload holds other than the {length} changes it claims")
    if kind.itemsize == 1:
        if int(into.max()) > 0xFF:
            raise CorruptVersion("a payload holds a number that has more than 8 bits")
        return into.astype(kind)
    return into
