"""Policy losses as pure functions of per-token arrays [N].

Every loss here is the clipped surrogate of PPO; what differs is the range its ratio may move in and how tokens are
weighted:

* `ppo`: range 1 - low, 1 + high, fixed; every trained token counts the same;
* `grpo`: symmetric range 1 - low, 1 + low; every sequence counts the same (mean over its tokens, then over sequences);
* `m2po`: range from the second moment of the log-ratios over the whole mini-batch; every trained token counts the same.

Invariant: a loss is a sum over tokens with weights fixed by the whole mini-batch, and the range is fixed before any
backward, so neither depends on how the mini-batch is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .batch import Example
from .interface import LossConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut here before exp, far outside every clip range, so that float32 does not overflow."""

M2PO_WIDE = (0.05, 21.0)

EDGE = 1e-5
"""M2PO's range ends exactly at the ratio of the last token it keeps: widened by this share, so that rounding, which
differs between packings, does not clip that token after all."""


class RatioRange(NamedTuple):
    """The ratio's range, and M2PO's second moment over the tokens it looks at (before anything is dropped)."""

    low: float
    high: float
    second_moment: float


class TokenLoss(NamedTuple):
    """Per token [N]: the unweighted loss (differentiable), the ratio and whether clipping removed its gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def token_weights(examples: Sequence[Example], config: LossConfig) -> Tensor:
    """Weights of a mini-batch's trained tokens, float32 [N]: 1/N, or for `grpo` 1/(sequences * tokens of its own),
    times the sample's importance weight."""
    lengths = torch.tensor([example.trained.size for example in examples])
    samples = torch.tensor([example.weight for example in examples], dtype=torch.float64)
    share = lengths * len(examples) if config.name == "grpo" else lengths.sum()
    samples = samples / share
    return samples.repeat_interleave(lengths).float()


def second_moments(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """(old - logprobs)^2 of the tokens whose ratio moves the way the advantage pushes, [K <= N]."""
    pushed = ((advantages > 0) & (logprobs > old)) | ((advantages < 0) & (logprobs < old))
    return (old - logprobs)[pushed].square()


def m2po_range(logprobs: Tensor, old: Tensor, advantages: Tensor, threshold: float) -> RatioRange:
    """M2PO's ratio range from the whole mini-batch's arrays [N] ("Prosperity before Collapse", arXiv:2510.01161).

    With m = `second_moments`: none, or mean(m) <= threshold: the wide range. Otherwise the largest m are dropped until
    the mean of the kept is below `threshold` (the smallest always stays), delta = sqrt(largest kept m), and the
    range is [1 - min(1 - e^-delta, 0.95), 1 + min(e^delta - 1, 20)].
    """
    moments = second_moments(logprobs, old, advantages).double()
    if not moments.numel():
        return RatioRange(*M2PO_WIDE, 0.0)
    mean = float(moments.mean())
    if mean <= threshold:
        return RatioRange(*M2PO_WIDE, mean)
    ordered = moments.sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Means of a sorted sequence ascend, so those below the threshold come first.
    kept = max(int((means < threshold).sum()), 1)
    delta = ordered[kept - 1].sqrt()
    low = 1 - torch.clamp(-torch.expm1(-delta), max=0.95)
    high = 1 + torch.clamp(torch.expm1(delta), max=20.0)
    return RatioRange(float(low), float(high), mean)


def ratio_range(config: LossConfig, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
    """The range of `config`'s loss for a mini-batch whose current log-probabilities [N] are `logprobs`."""
    if config.name == "m2po":
        low, high, moment = m2po_range(logprobs, old, advantages, config.m2_threshold)
        return RatioRange(low * (1 - EDGE), high * (1 + EDGE), moment)
    moments = second_moments(logprobs, old, advantages)
    mean = float(moments.mean()) if moments.numel() else 0.0
    high = config.clip_low if config.name == "grpo" else config.clip_high
    return RatioRange(1 - config.clip_low, 1 + high, mean)


def clipped_surrogate(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = 0.0
) -> TokenLoss:
    """-min(r A, clip(r, low, high) A) with r = exp(logprobs - old) (PPO, arXiv:1707.06347, eq. 7).

    `dual_clip` c > 1 bounds the loss at -c A where A < 0 (arXiv:1912.09729, eq. 5); 0 switches it off.
    """
    ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    plain, clamped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss = torch.maximum(plain, clamped)
    clipped = clamped > plain
    if dual_clip:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return TokenLoss(loss, ratio.detach(), clipped)


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(policy || reference) per token: e^d - d - 1, d = reference - logprobs
    (Schulman, "Approximating KL divergence"; GRPO, arXiv:2402.03300, eq. 4). Never negative."""
    difference = (reference - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(difference) - difference
