"""What no code can do better than, in bits a change, for the changes of one pair of versions.

Positions as independent coin flips and steps as independent draws, with the frequencies of this pair: once the same for
all elements, which is what a code can know that ignores the old values; once for each exponent of the old value.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codecs.base_aware import exponent
from ..codecs.order import FLOATS, steps


class Bounds(NamedTuple):
    base_free: float
    given_exponent: float


def bounds(old: NDArray[np.uint16], new: NDArray[np.uint16]) -> Bounds:
    """`old` and `new`: bf16 bits [n] of all tensors."""
    at = np.flatnonzero(old != new)
    kind = FLOATS["BF16"]
    every, changed = exponent(old, kind), exponent(old[at], kind)
    zigzag = steps(old[at], new[at]).astype(np.int64)
    held, hit = np.bincount(every, minlength=256), np.bincount(changed, minlength=256)
    free = _flips(len(at), len(old)) + _draws(zigzag)
    given = 0.0
    for power in np.flatnonzero(hit):
        given += _flips(int(hit[power]), int(held[power])) + _draws(zigzag[changed == power])
    return Bounds(free / len(at), given / len(at))


def _flips(ones: int, total: int) -> float:
    """Bits to say which `ones` of `total`."""
    return _entropy(np.array([ones, total - ones]))


def _draws(values: NDArray[np.int64]) -> float:
    return _entropy(np.bincount(values))


def _entropy(counts: NDArray[np.int64]) -> float:
    """Of all draws together, in bits."""
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / counts.sum())).sum())
