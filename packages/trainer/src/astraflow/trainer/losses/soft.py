"""Losses that never cut a token's gradient off: SAPO's soft gate and CISPO's clipped weight."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import LossConfig
from .clipped import fixed_range, mean_moment
from .interface import LOG_RATIO_BOUND, LossInputs, RatioRange, TokenLoss, bounded_ratio


class Sapo:
    """-f(r) A with f(r) = sigmoid(t (r - 1)) * 4 / t, t by the advantage's sign (SAPO, arXiv:2511.20347, eq. 5 and 6).

    Its gradient is the ratio's times 4 p (1 - p), p = sigmoid(t (r - 1)): 1 at r = 1, fading on both sides. A token
    counts as clipped where less than half of it is left.
    """

    whole_minibatch = False

    def __init__(self, config: LossConfig) -> None:
        self._positive, self._negative = config.sapo_positive, config.sapo_negative

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        return RatioRange(0.0, math.exp(LOG_RATIO_BOUND), mean_moment(logprobs, old, advantages))

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss:
        ratio = bounded_ratio(inputs.logprobs, inputs.old)
        positive, negative = ratio.new_tensor(self._positive), ratio.new_tensor(self._negative)
        temperature = torch.where(inputs.advantages > 0, positive, negative)
        gate = torch.sigmoid(temperature * (ratio - 1))
        loss = -gate * (4 / temperature) * inputs.advantages
        left = 4 * gate.detach() * (1 - gate.detach())
        return TokenLoss(loss, ratio.detach(), left < 0.5)


class Cispo:
    """-sg(clip(r, low, high)) A logprobs: REINFORCE with a clipped importance weight (CISPO, MiniMax-M1,
    arXiv:2506.13585, eq. 4 and 5). A token counts as clipped where its weight is."""

    whole_minibatch = False

    def __init__(self, config: LossConfig) -> None:
        self._config = config

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        return fixed_range(self._config, logprobs, old, advantages)

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss:
        ratio = bounded_ratio(inputs.logprobs, inputs.old).detach()
        weight = ratio.clamp(bounds.low, bounds.high)
        return TokenLoss(-weight * inputs.advantages * inputs.logprobs, ratio, weight != ratio)
