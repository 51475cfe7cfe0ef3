"""Log-probabilities of chosen tokens from hidden states, without the full logits in memory.

The head is by far the widest layer: it is evaluated only for hidden states that predict a trained token, a chunk at a
time, and again in the backward pass instead of being kept.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

CHUNK = 256
"""Hidden states per chunk: 256 * 49k vocabulary * 4 bytes = 50 MB of logits."""


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, temperatures: Tensor, heads: Tensor, targets: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        normalizer = torch.empty_like(entropy)
        for rows, pairs in _chunks(heads, len(hidden), chunk):
            logits = _logits(hidden[rows], weight, temperatures[rows])
            normalizer[rows] = logits.logsumexp(-1)
            within = heads[pairs] - rows.start
            logprobs[pairs] = logits[within, targets[pairs]] - normalizer[rows][within]
            logits -= normalizer[rows, None]
            entropy[rows] = -torch.linalg.vecdot(logits.exp(), logits)
        ctx.save_for_backward(hidden, weight, temperatures, heads, targets, normalizer, entropy)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor, None, None, None, None]:
        # d logprob / d logits = (onehot(target) - p) / temperature; d entropy / d logits = -p (log p + entropy) / ...
        hidden, weight, temperatures, heads, targets, normalizer, entropy = ctx.saved_tensors
        grad = torch.zeros(len(targets), device=hidden.device) if grads[0] is None else grads[0]
        entropy_grad = grads[1]
        chunks = _chunks(heads, len(hidden), ctx.chunk)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None if len(chunks) == 1 else torch.zeros_like(weight, dtype=torch.float32)
        for rows, pairs in chunks:
            within = heads[pairs] - rows.start
            sums = torch.zeros(rows.stop - rows.start, device=hidden.device).index_add_(0, within, grad[pairs])
            table = _logits(hidden[rows], weight, temperatures[rows]).sub_(normalizer[rows, None])
            slopes = -sums[:, None]
            if entropy_grad is not None:
                slopes = slopes - entropy_grad[rows, None] * (table + entropy[rows, None])
            delta = table.exp_().mul_(slopes)
            delta.index_put_((within, targets[pairs]), grad[pairs], accumulate=True)
            delta /= temperatures[rows, None]
            delta = delta.to(weight.dtype)
            grad_hidden[rows] = delta @ weight
            part = delta.T @ hidden[rows]
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
        assert grad_weight is not None
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def token_logprobs(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, heads: Tensor, targets: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """log p(targets[m]) after hidden state `heads[m]`, at that state's temperature.

    Args:
        hidden: [U, H], U >= 1; weight: [V, H], the output embedding, same dtype.
        temperatures: float32 [U]. heads: int64 [M], ascending, into `hidden`; targets: int64 [M], token ids.
        chunk: hidden states evaluated at once; the result does not depend on it.

    Returns:
        log-probabilities float32 [M], differentiable in `hidden` and `weight`; entropy of every state's distribution,
        float32 [U], in nats, differentiable too.
    """
    logprobs, entropy = cast(
        "tuple[Tensor, Tensor]", _TokenLogprobs.apply(hidden, weight, temperatures, heads, targets, chunk)
    )
    return logprobs, entropy


def _chunks(heads: Tensor, count: int, chunk: int) -> list[tuple[slice, slice]]:
    """Slices of the hidden states and of the (ascending) pairs that belong to them."""
    starts = list(range(0, count, chunk))
    bounds = [0, *torch.searchsorted(heads, torch.tensor([*starts[1:], count], device=heads.device)).tolist()]
    return [
        (slice(start, min(start + chunk, count)), slice(bounds[i], bounds[i + 1])) for i, start in enumerate(starts)
    ]


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    return (hidden @ weight.T).float().div_(temperatures[:, None])
