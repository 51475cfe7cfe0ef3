"""What torch tensors and numpy arrays are called here. Torch is imported only for a torch tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .interface import TensorSpec
from .layout import ITEMSIZE

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def is_torch(tensor: object) -> bool:
    """Whether it is a torch.Tensor, without importing torch for what is not."""
    if isinstance(tensor, np.ndarray):
        return False
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor or a numpy array, got {type(tensor).__name__}")
    return True


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Raises ValueError for a dtype that safetensors has no name for."""
    native = str(tensor.dtype).removeprefix("torch.") if is_torch(tensor) else tensor.dtype.name
    dtype = _DTYPES.get(native)
    if dtype is None or (isinstance(tensor, np.ndarray) and not tensor.dtype.isnative):
        raise ValueError(f"tensor {name!r} has dtype {tensor.dtype}; supported: {', '.join(_DTYPES)}, native order")
    shape = tuple(int(size) for size in tensor.shape)
    return TensorSpec(name=name, dtype=dtype, shape=shape, nbytes=math.prod(shape) * ITEMSIZE[dtype])
