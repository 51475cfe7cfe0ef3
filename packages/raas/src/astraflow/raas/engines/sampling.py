"""Draw one token per row of logits, each row with a temperature and a random number of its own.

Invariant: the log-probability returned is that of the distribution drawn from (after the temperature); a greedy
row (temperature 0) takes its log-probability at temperature 1. A row depends on its own logits and number only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

BLOCK = 256
"""Tokens a first, coarse draw chooses among: a running sum over the whole vocabulary would cost five times as much,
and `torch.multinomial` eight times (32 rows of 49 152, one CPU thread)."""


def sample(
    logits: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row of `logits` (float32 [B, V]); `uniforms` [B] lie in [0, 1).

    Returns tokens int64 [B] and log-probabilities float32 [B].
    """
    greedy = [temperature == 0 for temperature in temperatures]
    scale = torch.tensor([1.0 if at_one else t for at_one, t in zip(greedy, temperatures, strict=True)])
    logprobs = torch.log_softmax(logits / scale.to(logits.device)[:, None], dim=-1)
    if all(greedy):
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = inverse_cdf(logprobs.exp(), torch.tensor(uniforms, dtype=torch.float64, device=logits.device))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def inverse_cdf(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of `probs` (float32 [B, V]) passes `uniforms` (float64 [B]): int64 [B].

    A token of probability 0 is never returned.
    """
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).view(len(probs), -1, BLOCK)
    block, rest = _search(blocks.sum(-1), uniforms)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]
    return (block * BLOCK + _search(inside, rest)[0]).clamp_(max=probs.shape[1] - 1)  # not-a-number rows stay in range


def _search(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index whose share of the weights' sum [B, K] holds `uniforms` [B], and where in that share, in [0, 1)."""
    cdf = weights.double().cumsum(-1)
    target = (uniforms * cdf[:, -1])[:, None]
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=weights.shape[1] - 1)
    share = weights.gather(1, index).double()
    inside = (target - (cdf.gather(1, index) - share)) / share
    return index[:, 0], inside[:, 0].clamp(0.0, 1.0 - 1e-12)
