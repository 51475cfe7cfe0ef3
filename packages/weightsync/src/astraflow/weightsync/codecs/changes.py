"""Which elements of a frame are meant: found by comparing, told by gaps.

Positions are int64, which numpy gathers and scatters twice as fast as int32, and ascend.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..interface import Bytes, CorruptVersion
from ..layout import elements

CHUNK_BYTES = 1 << 18
"""Dense bytes worked on at a time, so that inputs and masks stay in a core's cache."""

Index = NDArray[np.int64]
Unsigned = NDArray[np.unsignedinteger]
Bits = NDArray[np.uint8]
"""A set of elements: element i is bit i % 8 of byte i // 8; zeros up to a multiple of 8 bytes."""


def difference(old: Bytes, new: Bytes, itemsize: int) -> Bits:
    """The elements whose bits differ."""
    before, after = elements(old, itemsize), elements(new, itemsize)
    step = CHUNK_BYTES // itemsize
    bits = no_bits(len(before))
    mask = np.empty(min(step, len(before)), np.bool_)
    for start in range(0, len(before), step):
        stop = min(start + step, len(before))
        part = np.not_equal(before[start:stop], after[start:stop], out=mask[: stop - start])
        bits[start // 8 : -(-stop // 8)] = np.packbits(part, bitorder="little")
    return bits


def no_bits(size: int) -> Bits:
    """Of `size` elements, none."""
    return np.zeros(-(-size // 64) * 8, np.uint8)


def count(bits: Bits) -> int:
    return int(np.bitwise_count(bits.view(np.uint64)).sum(dtype=np.int64))


def positions(bits: Bits) -> Index:
    """Positions [K] of the elements in the set.

    The lowest bit of every word that has one, then the next lowest of those that have another: where one element in a
    hundred is set, that takes a third of the time of numpy's `flatnonzero` over a mask.
    """
    words = bits.view(np.uint32)
    at = np.flatnonzero(words != 0)
    left = words[at]
    at <<= 5
    found = [at[:0]]
    while len(left):
        lower = left - np.uint32(1)
        found.append(at + np.bitwise_count(~left & lower))
        left &= lower
        more = np.flatnonzero(left != 0)
        left, at = left[more], at[more]
    index = np.concatenate(found)
    index.sort(kind="stable")  # a merge of few runs
    return index


def changed_elements(old: Bytes, new: Bytes, itemsize: int) -> Index:
    """Positions [K] of the elements whose bits differ."""
    return positions(difference(old, new, itemsize))


def sparse_is_smaller(changed: int, itemsize: int, length: int) -> bool:
    """Whether int64 positions and values take less memory than the dense frame of `length` bytes."""
    return changed * (8 + itemsize) < length


def gaps(index: Index) -> NDArray[np.uint32]:
    """The number of elements left out before each one."""
    return (np.diff(index, prepend=-1) - 1).astype(np.uint32)


def from_gaps(between: NDArray[np.uint32], size: int) -> Index:
    """Ascending by construction: a gap is not negative, and 2^32 of them cannot overflow int64.

    Raises CorruptVersion for a position that is not below `size`.
    """
    index = between.astype(np.int64)
    index += 1
    np.cumsum(index, out=index)
    index -= 1
    if len(index) and index[-1] >= size:
        raise CorruptVersion(f"a change at element {int(index[-1])} of {size}")
    return index
