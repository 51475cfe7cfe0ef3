from __future__ import annotations

import pytest
import torch

from astraflow.trainer.logprobs import token_logprobs


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_entropy_and_gradients_equal_plain_log_softmax(chunk: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.7, 1.0, 1.3])
    heads, targets = torch.tensor([0, 0, 1, 3, 3, 3, 4, 5, 6]), torch.tensor([1, 2, 2, 5, 5, 0, 10, 3, 3])
    upstream, slopes = torch.randn(9), torch.randn(7)

    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    logprobs, entropy = token_logprobs(leaves[0], leaves[1], temperatures, heads, targets, chunk)
    ((logprobs * upstream).sum() + (entropy * slopes).sum()).backward()  # type: ignore[no-untyped-call]

    plain = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    every = torch.log_softmax(plain[0] @ plain[1].T / temperatures[:, None], -1)
    plain_entropy = -(every.exp() * every).sum(-1)
    ((every[heads, targets] * upstream).sum() + (plain_entropy * slopes).sum()).backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(logprobs, every[heads, targets].float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy, plain_entropy.float(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(leaves, plain, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.ones(1), torch.tensor([0, 0]), torch.tensor([0, 1]))
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.tolist() == pytest.approx([0.0, -2e4])
    assert entropy.tolist() == [0.0]
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
