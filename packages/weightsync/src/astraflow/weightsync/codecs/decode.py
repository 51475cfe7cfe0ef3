"""From a frame and a payload to the next version of the frame.

Nothing about a payload is trusted: not a length, a position or a count. What does not add up is a CorruptVersion,
before memory of a claimed size is touched.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..interface import Bytes, CorruptVersion
from ..layout import ITEMSIZE, elements
from . import base_aware, base_free, zstd
from .changes import Index
from .kinds import GAP_XOR, L0, L2, PLANES, RAW
from .order import FLOATS


class Change(NamedTuple):
    """What a frame becomes: `data` replaces the elements `at` these positions (in no order), or all of it where `at` is
    None."""

    at: Index | None
    data: Bytes


def decode(
    codec: int, changed: int, payload: bytes | memoryview, frame: Bytes, dtype: str, room: Bytes | None = None
) -> Change:
    """What a payload says about `frame` (uint8, the old bytes). `room` (uint8, of its size), if any, has a copy of the
    frame then, for `write`; it is made while the frame is in the cache. Raises CorruptVersion."""
    values = elements(frame, ITEMSIZE[dtype])
    if not 0 < changed <= len(values):
        raise CorruptVersion(f"{changed} changes in a frame of {len(values)} elements")
    view, kind = memoryview(payload), FLOATS.get(dtype)
    if codec == RAW:
        if len(view) != len(frame):
            raise CorruptVersion(f"a raw frame of {len(frame)} bytes has a payload of {len(view)}")
        return Change(None, np.frombuffer(view, np.uint8))
    if codec == PLANES:
        return Change(None, zstd.unpack_planes(view, len(frame), values.itemsize))
    if codec == L2 and kind is not None:
        index, after = base_aware.unpack(view, changed, values, kind, None if room is None else room.view(values.dtype))
        return Change(index, after.view(np.uint8))
    if room is not None:
        room[:] = frame
    if codec == GAP_XOR:
        index, after = zstd.unpack_gap_xor(view, changed, values)
    elif codec == L0 and kind is not None:
        index, after = base_free.unpack(view, changed, values)
    else:
        raise CorruptVersion(f"codec {codec} for {dtype} is unknown; a newer version of this package may know it")
    return Change(index, after.view(np.uint8))


def apply(codec: int, changed: int, payload: bytes | memoryview, frame: Bytes, dtype: str) -> Change:
    """Bring `frame` (uint8, writable, the old bytes) to the new ones, in place; and what that changed.

    Raises CorruptVersion; the frame is as it was then.
    """
    change = decode(codec, changed, payload, frame, dtype)
    write(change, frame, dtype)
    return change


def write(change: Change, frame: Bytes, dtype: str) -> None:
    """Into `frame` (uint8, writable)."""
    if change.at is None:
        frame[:] = change.data
    else:
        itemsize = ITEMSIZE[dtype]
        elements(frame, itemsize)[change.at] = elements(change.data, itemsize)
