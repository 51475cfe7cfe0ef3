"""The clipped surrogate of PPO, and the range its ratio may move in: fixed, or M2PO's from the second moment.

* `ppo`: range 1 - low, 1 + high, fixed;
* `grpo`: symmetric range 1 - low, 1 + low;
* `m2po`: range from the second moment of the log-ratios over the whole mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LossConfig
from .interface import LossInputs, RatioRange, TokenLoss, bounded_ratio

M2PO_WIDE = (0.05, 21.0)

EDGE = 1e-5
"""M2PO's range ends exactly at the ratio of the last token it keeps: widened by this share, so that rounding, which
differs between packings, does not clip that token after all."""


def second_moments(logprobs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """(old - logprobs)^2 of the tokens whose ratio moves the way the advantage pushes, [K <= N]."""
    pushed = ((advantages > 0) & (logprobs > old)) | ((advantages < 0) & (logprobs < old))
    return (old - logprobs)[pushed].square()


def mean_moment(logprobs: Tensor, old: Tensor, advantages: Tensor) -> float:
    """The mean of `second_moments`; 0 where there are none."""
    moments = second_moments(logprobs, old, advantages)
    return float(moments.mean()) if moments.numel() else 0.0


def fixed_range(config: LossConfig, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
    """1 - `clip_low` to 1 + `clip_high`, whatever the mini-batch."""
    return RatioRange(1 - config.clip_low, 1 + config.clip_high, mean_moment(logprobs, old, advantages))


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


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A) (PPO, arXiv:1707.06347, eq. 7), and where it has no gradient; all [N].

    `dual_clip` c > 1 bounds the loss at -c A where A < 0 (arXiv:1912.09729, eq. 5); 0 switches it off.
    """
    plain, clamped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    loss, clipped = torch.maximum(plain, clamped), clamped > plain
    if dual_clip:
        bound = -dual_clip * advantages
        over = (advantages < 0) & (loss > bound)
        loss, clipped = torch.where(over, bound, loss), clipped | over
    return loss, clipped


class Clipped:
    """`ppo`, `grpo` and `m2po`."""

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self._m2po = config.name == "m2po"
        self._high = config.clip_low if config.name == "grpo" else config.clip_high
        self.whole_minibatch = self._m2po

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        if self._m2po:
            low, high, moment = m2po_range(logprobs, old, advantages, self._config.m2_threshold)
            return RatioRange(low * (1 - EDGE), high * (1 + EDGE), moment)
        return RatioRange(1 - self._config.clip_low, 1 + self._high, mean_moment(logprobs, old, advantages))

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss:
        ratio = bounded_ratio(inputs.logprobs, inputs.old)
        loss, clipped = clipped_surrogate(ratio, inputs.advantages, bounds.low, bounds.high, self._config.dual_clip)
        return TokenLoss(loss, ratio.detach(), clipped)
