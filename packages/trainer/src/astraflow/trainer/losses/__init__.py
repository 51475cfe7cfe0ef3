"""Policy losses as pure functions of per-token arrays; `load_loss` finds one by name."""

from .aggregate import aggregate_of, token_weights
from .clipped import clipped_surrogate, m2po_range, mean_moment, second_moments
from .correction import Correction, correction
from .gspo import sequence_means
from .interface import LossInputs, PolicyLoss, RatioRange, TokenLoss, bounded_ratio
from .kl import kl_estimate
from .load import LossFunction, load_loss

__all__ = [
    "Correction",
    "LossFunction",
    "LossInputs",
    "PolicyLoss",
    "RatioRange",
    "TokenLoss",
    "aggregate_of",
    "bounded_ratio",
    "clipped_surrogate",
    "correction",
    "kl_estimate",
    "load_loss",
    "m2po_range",
    "mean_moment",
    "second_moments",
    "sequence_means",
    "token_weights",
]
