"""`L2`: positions coded given what the receiver holds already, the old values.

An optimiser step moves every weight by about as much, so the smaller a weight, the finer its grid and the likelier it
changes: the 1 % of the elements with the smallest exponents hold a third of the changes, 2 % half of them. The smallest
are sorted by exponent and cut into classes; a change among them is told by its rank in its class (a gap between ranks),
every other change by the gap over all elements. Each class has its own statistics, for values too.

One pass over the frame finds the members of all classes, so that it is their number that costs, not that of the cuts.
The decoder needs the exact old bytes.

Payload: u8 number of classes C, the C exponents (u8, ascending) below which each class ends, then for every class and
for the rest u32 changes, u32 length of the gaps' part, u32 length of the values' part; then the parts, in that order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..interface import CorruptVersion
from . import numbers
from .changes import CHUNK_BYTES, Bits, Index, Unsigned, count, from_gaps, gaps, no_bits, positions
from .order import Float, add_steps, steps

MAX_CLASSES = 4
"""More of them than this do not pay for the headers of their parts."""
MIN_CHANGES = 300
"""Changes that a class must hold to be worth the header of its parts."""
MEMBERS = 1 / 80
"""The share of the elements that all classes may hold together: finding them is most of the decoder's work."""
MOST_MEMBERS = 1 / 2
"""The share that a decoder takes for an honest mistake of the encoder's sample; it bounds the memory."""
WORTH = 0.97
"""`choose_cuts` answers with cuts where they should leave this of the base-free positions, or less."""
_SAMPLE = 1 << 14

_PART = struct.Struct("<III")


def exponent(values: Unsigned, kind: Float) -> NDArray[np.uint8]:
    """The biased exponents."""
    return ((values << 1) >> (kind.mantissa + 1)).astype(np.uint8)


def choose_cuts(values: Unsigned, exponents: NDArray[np.uint8], kind: Float) -> list[int]:
    """Exponents, ascending, at which to cut; empty where that would not pay. `values` [n] are the old ones,
    `exponents` [changed] those of the changed.

    The highest cut is the one under which lie as many elements as are allowed; under it, each exponent is a class as
    long as it has changes enough. Sizes are entropies from a histogram of a sample.
    """
    sample = values[:: len(values) // _SAMPLE | 1]
    held = np.bincount(exponent(sample, kind), minlength=256) * (len(values) / len(sample))
    changed = np.bincount(exponents, minlength=256)
    below = np.cumsum(changed)
    allowed = min(max(MEMBERS, len(exponents) / len(values)), 0.25) * len(values)
    top = min(int(np.searchsorted(np.cumsum(held), allowed, side="right")), (1 << kind.exponent) - 1)
    cuts: list[int] = []
    while top > 0 and len(cuts) < MAX_CLASSES and below[top - 1] >= MIN_CHANGES:
        if cuts and changed[top] < MIN_CHANGES:
            break
        cuts.insert(0, top)
        top -= 1
    if not cuts:
        return []
    edges = [0, *cuts]
    spans = [slice(low, high) for low, high in zip(edges, cuts, strict=False)]
    aware = sum(_position_bits(changed[span].sum(), held[span].sum()) for span in spans)
    aware += _position_bits(changed[cuts[-1] :].sum(), len(values)) + 8 * 40 * len(cuts)
    return cuts if aware < WORTH * _position_bits(len(exponents), len(values)) else []


def pack(index: Index, old: Unsigned, new: Unsigned, kind: Float) -> bytes | None:
    """The changes at `index` from `old` to `new` (all elements of the frame); None where classes would not pay."""
    exponents = exponent(old[index], kind)
    cuts = choose_cuts(old, exponents, kind)
    small = _below(old, cuts[-1], kind) if cuts else None
    if small is None or count(small) > MOST_MEMBERS * len(old):
        return None
    members, ends = _members(old, small, cuts, kind)
    ranks = np.flatnonzero(old[members] != new[members])
    rest = index[exponents >= cuts[-1]]
    parts = [(rest, rest)]
    for start, end in reversed(list(pairwise(ends))):
        low, high = np.searchsorted(ranks, (start, end))
        parts.insert(0, (ranks[low:high] - start, members[ranks[low:high]]))
    packed = [(numbers.pack(gaps(ranks)), numbers.pack(steps(old[at], new[at]))) for ranks, at in parts]
    header = bytes([len(cuts), *cuts]) + b"".join(
        _PART.pack(len(at), len(first), len(second)) for (_, at), (first, second) in zip(parts, packed, strict=True)
    )
    return header + b"".join(part for pair in packed for part in pair)


def unpack(payload: memoryview, changed: int, values: Unsigned, kind: Float) -> tuple[Index, Unsigned]:
    """Positions, ascending within each class and the rest, and new values, both [changed]; `values` are the old ones of
    all elements. Raises CorruptVersion."""
    cuts, parts = _read(payload, changed, kind)
    small = _below(values, cuts[-1], kind)
    if count(small) > MOST_MEMBERS * len(values):
        raise CorruptVersion(f"a payload has classes that hold {count(small)} of {len(values)} elements")
    members, ends = _members(values, small, cuts, kind)
    ranks = [
        from_gaps(numbers.unpack(part.ranks, part.changed, np.uint32), end - start) + start
        for part, (start, end) in zip(parts, pairwise(ends), strict=False)
    ]
    rest = from_gaps(numbers.unpack(parts[-1].ranks, parts[-1].changed, np.uint32), len(values))
    index = np.concatenate([members[np.concatenate(ranks)], rest])
    zigzag = [numbers.unpack(part.steps, part.changed, values.dtype) for part in parts]
    return index, add_steps(values[index], np.concatenate(zigzag))


class _Part(NamedTuple):
    """The changes of a class, or of the rest: how many, and the two parts of the payload that tell them."""

    changed: int
    ranks: memoryview
    steps: memoryview


def _read(payload: memoryview, changed: int, kind: Float) -> tuple[Sequence[int], list[_Part]]:
    """The cuts, and a part for every class and the rest."""
    classes = payload[0] if len(payload) else 0
    cuts = bytes(payload[1 : 1 + classes])
    start = 1 + classes + (classes + 1) * _PART.size
    ascending = all(low < high for low, high in zip((0, *cuts), cuts, strict=False))
    if not 0 < classes <= MAX_CLASSES or len(payload) < start or not ascending or cuts[-1] >= 1 << kind.exponent:
        raise CorruptVersion(f"a payload of {len(payload)} bytes has {classes} classes that end at {[*cuts]}")
    parts = []
    for held, first, second in _PART.iter_unpack(payload[1 + classes : start]):
        middle = start + first
        parts.append(_Part(held, payload[start:middle], payload[middle : middle + second]))
        start = middle + second
    if start != len(payload) or sum(part.changed for part in parts) != changed:
        raise CorruptVersion(
            f"a payload of {len(payload)} bytes has parts that end at {start}, or not {changed} changes"
        )
    return cuts, parts


def _members(values: Unsigned, small: Bits, cuts: Sequence[int], kind: Float) -> tuple[Index, list[int]]:
    """The elements that are `small`, by class and then by position; class k is `[ends[k], ends[k + 1])` of them."""
    inside = positions(small)
    classes = np.zeros(256, np.uint8)
    for cut in cuts:
        classes[cut:] += 1
    of = classes[exponent(values[inside], kind)]
    return inside[np.argsort(of, kind="stable")], [0, *(int(np.count_nonzero(of <= k)) for k in range(len(cuts)))]


def _below(values: Unsigned, cut: int, kind: Float) -> Bits:
    """The elements whose exponent is below `cut`."""
    limit = values.dtype.type(cut << (kind.mantissa + 1))
    step = CHUNK_BYTES // values.itemsize
    bits = no_bits(len(values))
    magnitude = np.empty(min(step, len(values)), values.dtype)
    mask = np.empty(len(magnitude), np.bool_)
    for start in range(0, len(values), step):
        stop = min(start + step, len(values))
        part = values[start:stop]
        doubled = np.add(part, part, out=magnitude[: stop - start])  # without the sign
        small = np.less(doubled, limit, out=mask[: stop - start])
        bits[start // 8 : -(-stop // 8)] = np.packbits(small, bitorder="little")
    return bits


def _position_bits(changed: float, size: float) -> float:
    """The entropy of which `changed` of `size` elements."""
    share = min(max(changed / max(size, 1), 1e-12), 1 - 1e-12)
    return -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
