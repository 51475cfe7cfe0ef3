"""Floats as integers in the order of the values they mean, so that a small step is a small number.

A bijection of all bits: NaN payloads and the sign of zero survive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .changes import Unsigned


class Float(NamedTuple):
    """Sign, `exponent` bits, and then `mantissa` bits."""

    exponent: int
    mantissa: int


FLOATS = {
    "BF16": Float(8, 7),
    "F16": Float(5, 10),
    "F32": Float(8, 23),
    "F8_E4M3": Float(4, 3),
    "F8_E5M2": Float(5, 2),
}
"""The dtypes that have this order here, by safetensors' name."""

_SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32}


def steps(before: Unsigned, after: Unsigned) -> Unsigned:
    """How many representable numbers lie between, modulo 2^bits, as zigzag: small for small steps of either sign."""
    difference = (_ordered(after) - _ordered(before)).view(_signed(before))
    zigzag: Unsigned = ((difference << 1) ^ (difference >> _top(before))).view(before.dtype)
    return zigzag


def add_steps(before: Unsigned, zigzag: Unsigned) -> Unsigned:
    """What `steps` was given as `after`."""
    one = before.dtype.type(1)
    difference = (zigzag >> one) ^ (~(zigzag & one) + one)
    ordered = _ordered(before) + difference
    return ordered ^ _flip(~ordered)


def _ordered(bits: Unsigned) -> Unsigned:
    return bits ^ _flip(bits)


def _flip(bits: Unsigned) -> Unsigned:
    """The sign bit, and all others too where it is set."""
    sign: Unsigned = (bits.view(_signed(bits)) >> _top(bits)).view(bits.dtype)
    return sign | bits.dtype.type(1 << _top(bits))


def _signed(bits: NDArray[Any]) -> Any:
    return _SIGNED[bits.itemsize]


def _top(bits: NDArray[Any]) -> int:
    return bits.itemsize * 8 - 1
