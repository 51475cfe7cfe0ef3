"""Estimates of KL(policy || reference) from one sampled token (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .interface import LOG_RATIO_BOUND


def kl_estimate(name: Literal["k1", "k2", "k3"], logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per token [N], with d = reference - logprobs; differentiable in `logprobs`.

    * `k1`: -d, unbiased, of either sign; as a loss its expected gradient is 0, so it belongs in the reward;
    * `k2`: d^2 / 2, biased, whose gradient as a loss is that of the divergence;
    * `k3`: e^d - d - 1, unbiased and never negative (GRPO, arXiv:2402.03300, eq. 4).
    """
    difference = (reference - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if name == "k1":
        return -difference
    if name == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference
