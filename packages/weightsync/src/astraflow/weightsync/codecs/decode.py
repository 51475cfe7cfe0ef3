"""From a frame and a payload to the next version of the frame.

Nothing about a payload is trusted: not a length, a position or a count. What does not add up is a CorruptVersion,
before memory of a claimed size is touched.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from ..interface import Bytes, CorruptVersion
from ..layout import ITEMSIZE, elements
from . import base_aware, base_free, zstd
from .changes import Index
from .kinds import GAP_XOR, L0, L2, PLANES, RAW
from .order import FLOATS

PATCH_BYTES = 1 << 19
"""Dense bytes made at a time: twice that stays in a core's cache until it is hashed."""


class Change(NamedTuple):
    """What a frame becomes: `data` replaces the elements `at` these positions (in no order), or all of it where `at` is
    None."""

    at: Index | None
    data: Bytes


def decode(codec: int, changed: int, payload: bytes | memoryview, frame: Bytes, dtype: str) -> Change:
    """What a payload says about `frame` (uint8, the old bytes). Raises CorruptVersion."""
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
        index, after = base_aware.unpack(view, changed, values, kind)
    elif codec == GAP_XOR:
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


def patch(change: Change, frame: Bytes, room: Bytes, dtype: str) -> bytes:
    """Make in `room` (uint8, of the frame's size; it may be `frame`) what `frame` becomes; the xxh3-128 of that.

    One pass: what is copied is changed and hashed while it is in the cache. Cheapest where the positions are a few
    ascending runs, as the codecs' are.
    """
    if change.at is None:
        room[:] = change.data
        return xxhash.xxh3_128_digest(room.data)
    itemsize, at = ITEMSIZE[dtype], change.at
    data, target = elements(change.data, itemsize), elements(room, itemsize)
    edges = np.minimum(np.arange(-(-len(room) // PATCH_BYTES) + 1) * (PATCH_BYTES // itemsize), len(target))
    starts = [0, *(np.flatnonzero(at[1:] < at[:-1]) + 1).tolist(), len(at)]
    runs = [(low + np.searchsorted(at[low:high], edges)).tolist() for low, high in pairwise(starts)]
    in_place, digest = np.may_share_memory(frame, room), xxhash.xxh3_128()
    for number, start in enumerate(range(0, len(room), PATCH_BYTES)):
        part = room[start : start + PATCH_BYTES]
        if not in_place:
            part[:] = frame[start : start + PATCH_BYTES]
        for run in runs:
            low, high = run[number], run[number + 1]
            target[at[low:high]] = data[low:high]
        digest.update(part.data)
    return digest.digest()


def write(change: Change, frame: Bytes, dtype: str) -> None:
    """Into `frame` (uint8, writable)."""
    if change.at is None:
        frame[:] = change.data
    else:
        itemsize = ITEMSIZE[dtype]
        elements(frame, itemsize)[change.at] = elements(change.data, itemsize)
