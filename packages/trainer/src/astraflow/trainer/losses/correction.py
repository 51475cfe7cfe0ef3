"""Weights that correct for the distance between the policy that sampled and the proximal one.

`behaviour` are the engine's log-probabilities at sampling, `proximal` the trainer's before the batch's first step: what
lies between is the age of the weights and the engine's other arithmetic. Fixed for the batch, never differentiated.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import LossConfig
from .gspo import sequence_means
from .interface import bounded_ratio


class Correction(NamedTuple):
    """Per token [N]: what its loss is multiplied with. `masked` tokens are outside the range, `rejected` ones belong to
    a sequence that is; both have weight 0."""

    weights: Tensor
    masked: Tensor
    rejected: Tensor


def correction(proximal: Tensor, behaviour: Tensor, sequence: Tensor, config: LossConfig) -> Correction:
    """w = exp(proximal - behaviour) [N], used as `config.correction` says; `sequence` int64 [N] as in `LossInputs`.

    * `full`: w (decoupled PPO, arXiv:2110.00641, eq. 2; AReaL, arXiv:2505.24298, eq. 5);
    * `truncate`: min(w, high) (truncated importance sampling, Ionides 2008; for engines, Yao et al. 2025);
    * `mask`: w inside [low, high], else 0 (IcePop, arXiv:2510.18855);
    * `none`: 1.

    Sequences whose geometric mean of w lies outside [reject_low, reject_high] have weight 0 (sequence-level rejection,
    Liu et al. 2025, "When speed kills stability").
    """
    weights = bounded_ratio(proximal, behaviour)
    masked = torch.zeros_like(weights, dtype=torch.bool)
    if config.correction == "none":
        weights = torch.ones_like(weights)
    elif config.correction == "truncate":
        weights = weights.clamp(max=config.correction_high)
    elif config.correction == "mask":
        masked = (weights < config.correction_low) | (weights > config.correction_high)
        weights = weights.masked_fill(masked, 0.0)
    rejected = torch.zeros_like(masked)
    if config.reject_low > 0 or config.reject_high > 0:
        mean = sequence_means(proximal - behaviour, sequence).exp()
        rejected = (mean < config.reject_low) | (mean > (config.reject_high or math.inf))
        weights = weights.masked_fill(rejected, 0.0)
    return Correction(weights, masked, rejected)
