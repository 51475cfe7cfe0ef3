"""How per-token losses become one number: the weight of each trained token of a mini-batch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..config import LossConfig

Aggregate = Literal["tokens", "sequences", "constant"]

PUBLISHED: dict[str, Aggregate] = {"grpo": "sequences", "gspo": "sequences", "sapo": "sequences"}
"""Losses that were published with a mean over sequences; the others are means over tokens."""


def aggregate_of(config: LossConfig) -> Aggregate:
    return PUBLISHED.get(config.name, "tokens") if config.aggregate == "auto" else config.aggregate


def token_weights(
    lengths: Tensor, samples: Tensor, config: LossConfig, *, tokens: int | None = None, sequences: int | None = None
) -> Tensor:
    """Weights of a mini-batch's trained tokens, float32 [N].

    Args:
        lengths: int64 [S], trained tokens of each sequence; samples: float [S], the samples' own importance weights.
        tokens, sequences: the mini-batch's totals over all ranks (default: these sequences are all there is).

    Returns:
        sample weight times: `tokens` 1 / tokens (DAPO, arXiv:2503.14476, eq. 8); `sequences` 1 / (sequences * length)
        (GRPO, arXiv:2402.03300, eq. 3); `constant` 1 / (sequences * aggregate_tokens) (Dr. GRPO, arXiv:2503.20783).
    """
    tokens = int(lengths.sum()) if tokens is None else tokens
    sequences = len(lengths) if sequences is None else sequences
    how = aggregate_of(config)
    if how == "tokens":
        shares = samples.double() / tokens
    elif how == "sequences":
        shares = samples.double() / (sequences * lengths)
    else:
        shares = samples.double() / (sequences * config.aggregate_tokens)
    return shares.repeat_interleave(lengths).float()
