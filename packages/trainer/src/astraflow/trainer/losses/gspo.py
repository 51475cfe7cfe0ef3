"""GSPO: the ratio of whole sequences (arXiv:2507.18071), in the form that allows an advantage per token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import LossConfig
from .clipped import clipped_surrogate, fixed_range
from .interface import LOG_RATIO_BOUND, LossInputs, RatioRange, TokenLoss


def sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """The mean of `values` [M] over each token's sequence (ids `sequence` int64 [M]), per token [M]."""
    count = int(sequence.max()) + 1
    sums = values.new_zeros(count).index_add_(0, sequence, values)
    lengths = values.new_zeros(count).index_add_(0, sequence, torch.ones_like(values))
    return (sums / lengths)[sequence]


class Gspo:
    """-min(s A, clip(s) A) with s = exp(mean over the sequence of (logprobs - old)) (eq. 5 and 7).

    Written as GSPO-token (eq. 13 and 14): every token carries s as its value and s * grad logprobs as its gradient,
    which sums to GSPO's where the advantage is one number a sequence.
    """

    whole_minibatch = False

    def __init__(self, config: LossConfig) -> None:
        self._config = config

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        return fixed_range(self._config, logprobs, old, advantages)

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss:
        mean = sequence_means((inputs.logprobs - inputs.old).detach(), inputs.sequence)
        mean = mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = (mean + inputs.logprobs - inputs.logprobs.detach()).exp()
        loss, clipped = clipped_surrogate(ratio, inputs.advantages, bounds.low, bounds.high, self._config.dual_clip)
        return TokenLoss(loss, ratio.detach(), clipped)
