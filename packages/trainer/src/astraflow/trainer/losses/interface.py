"""What a policy loss is: per-token arrays of one micro-batch in, one number a token out.

Invariant: a loss is a sum over tokens with weights fixed by the whole mini-batch, and what it takes from other tokens
is fixed by the mini-batch before any backward (`range`) or lies within a sequence, which is never split; so it does not
depend on how the mini-batch is cut into micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut here before exp, far outside every clip range, so that float32 does not overflow."""


class LossInputs(NamedTuple):
    """Trained tokens of one micro-batch [M], sequence by sequence, every sequence whole.

    logprobs: float [M], the policy's now, differentiable. old: float [M], what the ratio is to (the behaviour policy's,
    or the proximal policy's). advantages: float [M]. sequence: int64 [M], ids 0 … S-1 of the tokens' sequences.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor


class RatioRange(NamedTuple):
    """The ratio's range in a mini-batch; the second moment over all the tokens that M2PO looks at."""

    low: float
    high: float
    second_moment: float


class TokenLoss(NamedTuple):
    """Per token [M]: the unweighted loss (differentiable), the ratio and whether clipping removed its gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


class PolicyLoss(Protocol):
    """A loss as the backend calls it. `whole_minibatch`: its range is taken from all tokens of the mini-batch, so a
    forward pass over it comes before any backward."""

    whole_minibatch: bool

    def range(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> RatioRange:
        """From the mini-batch's arrays [N], detached (all ranks' where there are several)."""
        ...

    def tokens(self, inputs: LossInputs, bounds: RatioRange) -> TokenLoss: ...


def bounded_ratio(logprobs: Tensor, old: Tensor) -> Tensor:
    """exp(logprobs - old), the log-ratio cut at +-`LOG_RATIO_BOUND`."""
    return (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
