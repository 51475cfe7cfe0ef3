"""Attention over a micro-batch of prefix trees, as an attention implementation of the transformers library.

Invariant: a token attends to its ancestors in its own tree and to nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "astraflow_trees"

Spans = Sequence[tuple[int, Tensor | None]]
"""Per tree its length T and additive mask [T, T] in the compute dtype (None: causal), on the model's device."""


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv heads, T, D] -> [1, T, heads, D].

    Raises:
        NotImplementedError: the model's attention has a window or soft cap, which would be silently ignored.
    """
    if sliding_window is not None or softcap is not None:
        raise NotImplementedError(f"{type(module).__name__}: sliding windows and soft-capped attention are not packed")
    if sum(length for length, _ in spans) != query.shape[2]:
        raise ValueError(f"trees of {sum(length for length, _ in spans)} tokens, the model was given {query.shape[2]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs, start = [], 0
    for length, mask in spans:
        span = slice(start, start + length)
        outputs.append(_attend(query[:, :, span], key[:, :, span], value[:, :, span], mask, scale))
        start += length
    return torch.cat(outputs, 2).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":
        return _matmul_attention(query, key, value, mask, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _matmul_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention by batched matrix products: on CPU in bf16 the backward of the fused kernel is 3 to 6 times slower."""
    _, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    repeat = heads // kv_heads
    if mask is None:
        mask = torch.full((length, length), -torch.inf, dtype=query.dtype).triu_(1)
    folded = (query * scale).reshape(kv_heads, repeat * length, dim)
    scores = torch.baddbmm(mask.repeat(repeat, 1), folded, key[0].transpose(1, 2))
    return torch.bmm(scores.softmax(-1), value[0]).reshape(1, heads, length, dim)


AttentionInterface.register(NAME, tree_attention)
