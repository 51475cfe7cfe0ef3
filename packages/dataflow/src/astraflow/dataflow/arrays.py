"""Arrays on the wire. Invariant: what `numpy()` gives is a read-only view of the received bytes, checked."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

DTYPES = {name: np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32", "float64")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Array(msgspec.Struct, gc=False, frozen=True, array_like=True):
    """An n-dimensional array on the wire; `numpy()` is a view of the received bytes, without a copy."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @classmethod
    def of(cls, values: NDArray[Any]) -> Array:
        """Wrap a C-contiguous view of `values` (a copy only if it is not contiguous).

        Raises:
            ValueError: the dtype is not one of `DTYPES`.
        """
        name = _NAMES.get(values.dtype)
        if name is None:
            raise ValueError(f"dtype {values.dtype} cannot travel; use one of {sorted(DTYPES)} in native byte order")
        contiguous = np.ascontiguousarray(values)
        data = contiguous.data.cast("B") if contiguous.size else memoryview(b"")
        return cls(name, tuple(values.shape), data)

    def numpy(self) -> NDArray[Any]:
        """A read-only view [shape] of dtype `dtype`.

        Raises:
            ValueError: the dtype is unknown or the number of bytes is not what dtype and shape say.
        """
        dtype, shape = DTYPES.get(self.dtype), self.shape
        if dtype is None or (shape and min(shape) < 0):
            raise ValueError(f"malformed array: dtype {self.dtype!r}, shape {shape}")
        view = np.frombuffer(self.data, dtype)
        if view.size != math.prod(shape):
            raise ValueError(f"malformed array: {view.size} values for shape {shape}")
        view.flags.writeable = False
        return view if len(shape) == 1 else view.reshape(shape)
