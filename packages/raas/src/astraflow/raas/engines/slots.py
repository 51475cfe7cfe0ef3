"""The key-value cache: one slot of contiguous positions per running request, and the attention that reads it.

The attention is registered with transformers as `astraflow_slots`, so that any decoder with full attention runs on
the cache unchanged. A batch is rectangular: rows are padded to the right to the longest, and what padding writes
lies behind a row's length, where no later query looks before the position is written again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

ATTENTION = "astraflow_slots"
GROWTH = 64
"""Positions by which the slots grow: memory follows the longest request so far, not the bound on it."""


class SlotCache:
    """Keys and values [layers, slots, key-value heads, positions, head size]; `positions` grows with need."""

    def __init__(
        self, *, layers: int, slots: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.zeros((layers, slots, heads, 0, head_dim), dtype=dtype, device=device)
        self.values = self.keys

    def reserve(self, positions: int) -> None:
        """Make room for positions [0, positions) of every slot, keeping what is there."""
        have = self.keys.shape[3]
        if positions > have:
            grow = (0, 0, 0, -(-positions // GROWTH) * GROWTH - have)
            self.keys, self.values = F.pad(self.keys, grow), F.pad(self.values, grow)

    def copy(self, sources: list[int], targets: list[int], positions: int) -> None:
        """Positions [0, positions) of each target slot become those of its source."""
        for tensor in (self.keys, self.values):
            tensor[:, targets, :, :positions] = tensor[:, sources, :, :positions]

    def clear(self, slot: int) -> None:
        """Forget a slot that holds values that are not finite: even masked, they would spoil the next request's."""
        self.keys[:, slot] = 0
        self.values[:, slot] = 0


@dataclass(slots=True, frozen=True)
class Window:
    """What one forward pass of B rows and q positions does with the cache. `rows`: the slots, int64 [B], or the
    first B when `prefix`; `positions` int64 [B, q]; `length`: the longest row, new tokens included."""

    cache: SlotCache
    rows: torch.Tensor
    prefix: bool
    positions: torch.Tensor
    length: int
    mask: torch.Tensor | None

    @classmethod
    def of(cls, cache: SlotCache, rows: torch.Tensor, *, prefix: bool, positions: torch.Tensor, length: int) -> Window:
        cache.reserve(int(positions[:, -1].max()) + 1)
        if not positions[:, 0].any():  # nothing cached: plain causal attention over the new tokens
            return cls(cache, rows, prefix, positions, length, None)
        mask = torch.arange(length, device=positions.device) <= positions[:, :, None]
        return cls(cache, rows, prefix, positions, length, mask[:, None])

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [B, heads, q, size]; return those of every position to attend to."""
        full = []
        for tensor, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            tensor[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
            if self.mask is None:
                full.append(new)
            else:
                rows = tensor[: len(self.rows)] if self.prefix else tensor[self.rows]
                full.append(rows[:, :, : self.length])
        return full[0], full[1]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    window: Window,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention over the slots: query [B, H, q, D], key and value [B, H_kv, q, D] -> [B, q, H, D].

    The heads that share keys are folded into the query positions, so that keys are never repeated.
    """
    key, value = window.update(module.layer_idx, key, value)  # type: ignore[arg-type]
    if window.mask is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * length, size)
    mask = window.mask if length == 1 else window.mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)
