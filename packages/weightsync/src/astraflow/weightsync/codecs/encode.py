"""From two versions of a frame to a payload."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..interface import Bytes
from ..layout import ITEMSIZE, elements
from . import base_aware, base_free, zstd
from .changes import Bits, Index, Unsigned, count, difference, positions
from .kinds import GAP_XOR, L0, L2, PLANES, RAW, UNCHANGED, Codec, Encoded
from .order import FLOATS

_SAMPLE = 1 << 16
"""Elements that are encoded to see what all would take."""


class Difference(NamedTuple):
    """The elements of a frame whose bits changed: a set of them, and how many."""

    bits: Bits
    changed: int


def compare(old: Bytes, new: Bytes, dtype: str) -> Difference:
    bits = difference(old, new, ITEMSIZE[dtype])
    return Difference(bits, count(bits))


def encode(old: Bytes, new: Bytes, dtype: str, codec: Codec = "auto", found: Difference | None = None) -> Encoded:
    """The change from `old` to `new` (uint8, same length); `found` is what `compare` says, if that is known.

    `auto`: `l2` where the histogram of exponents says that it pays, else `l0`; `xor` for dtypes that are not floats;
    `planes` or `raw` where a frame has changed so much that they are smaller. By name: that codec where it exists for
    the dtype and is smaller than the frame, else what `auto` would fall back to. A `RAW` payload is a view of `new`,
    not a copy.
    """
    itemsize = ITEMSIZE[dtype]
    bits, changed = found if found is not None else compare(old, new, dtype)
    if not changed:
        return UNCHANGED
    raw = Encoded(RAW, changed, new.data)
    if codec == "raw":
        return raw
    if codec == "planes":
        return min(Encoded(PLANES, changed, zstd.pack_planes(new, itemsize)), raw, key=_size)
    before, after = elements(old, itemsize), elements(new, itemsize)
    if 2 * changed > len(before) and not _pays(before, after, dtype, codec):
        sparse = raw
    else:
        sparse = _sparse(before, after, positions(bits), dtype, codec)
    if 2 * _size(sparse) < len(new):
        return sparse
    return min(sparse, Encoded(PLANES, changed, zstd.pack_planes(new, itemsize)), raw, key=_size)


def _sparse(before: Unsigned, after: Unsigned, index: Index, dtype: str, codec: Codec) -> Encoded:
    kind = FLOATS.get(dtype)
    if kind is None or codec == "xor":
        return Encoded(GAP_XOR, len(index), zstd.pack_gap_xor(index, before[index], after[index]))
    aware = base_aware.pack(index, before, after, kind) if codec != "l0" else None
    if aware is not None:
        return Encoded(L2, len(index), aware)
    return Encoded(L0, len(index), base_free.pack(index, before[index], after[index]))


def _pays(before: Unsigned, after: Unsigned, dtype: str, codec: Codec) -> bool:
    """Whether changes are smaller than the elements, by a stretch in the middle: millions of positions, only to find
    that they were for nothing, would cost ten times the memory of the frame."""
    start = max(0, len(before) - _SAMPLE) // 2
    old, new = before[start : start + _SAMPLE], after[start : start + _SAMPLE]
    index = np.flatnonzero(old != new)
    return not len(index) or _size(_sparse(old, new, index, dtype, codec)) < 0.9 * new.nbytes


def _size(encoded: Encoded) -> int:
    return len(encoded.payload)
