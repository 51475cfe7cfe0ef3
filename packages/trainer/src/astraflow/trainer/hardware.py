"""What a step cost, in the device's own terms: arithmetic, the share of what it can do, memory."""

from __future__ import annotations

import functools
import resource
import time
from typing import Any

import torch

_SIZE = {"cpu": 768, "cuda": 8192}


def model_flops(model: Any, tokens: int) -> float:
    """Floating-point operations of one forward and backward pass over `tokens`: 6 per parameter that multiplies
    (arXiv:2001.08361, section 2.1; attention's own share, small for short rows, is left out)."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    parameters = sum(p.numel() for p in model.parameters()) - (0 if tied else embedding.numel())
    return 6.0 * float(parameters) * tokens


@functools.cache
def peak_flops(device_type: str, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product here and now, the fastest of three: what MFU is a share of."""
    size = _SIZE.get(device_type, 4096)
    left = torch.ones(size, size, dtype=dtype, device=device_type)
    best = float("inf")
    for _ in range(4):  # the first warms up
        started = time.perf_counter()
        left @ left
        if device_type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes: the most the device's allocator held since the last call, or this process's largest resident size."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
