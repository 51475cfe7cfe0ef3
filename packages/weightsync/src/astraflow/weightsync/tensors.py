"""Torch tensors and numpy arrays as dense bytes on the host. Torch is imported only for a torch tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .interface import Bytes, Tensors, TensorSpec
from .layout import ITEMSIZE, canonical

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class HostTensors:
    """A set of tensors in canonical order. `views[i]` uint8 [nbytes] is the i-th one's bytes: the caller's own memory
    where it is contiguous on the CPU, a copy (`owned[i]`) otherwise."""

    def __init__(self, layout: Sequence[TensorSpec], views: list[Bytes], owned: list[bool]) -> None:
        self.layout = tuple(layout)
        self.views = views
        self.owned = owned

    @classmethod
    def of(cls, tensors: Tensors) -> HostTensors:
        """Raises TypeError or ValueError for what is no tensor of a known dtype."""
        layout = canonical(spec_of(name, tensor) for name, tensor in tensors.items())
        pairs = [_host(tensors[spec.name]) for spec in layout]
        return cls(layout, [view for view, _ in pairs], [owned for _, owned in pairs])


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


def _host(tensor: Any) -> tuple[Bytes, bool]:
    if not is_torch(tensor):
        flat = np.ascontiguousarray(tensor)
        return flat.reshape(-1).view(np.uint8), not np.shares_memory(flat, tensor)
    import torch

    view: Bytes = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()
    return view, tensor.device.type != "cpu" or not tensor.is_contiguous()
