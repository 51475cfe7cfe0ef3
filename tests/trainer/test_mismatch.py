"""Each cause of a mismatch between engine and trainer is named from log-probabilities that have it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from astraflow.trainer.mismatch import mismatch


def logits(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(400, 50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampled(scores: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def of(scores: torch.Tensor, tokens: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = scores.log_softmax(-1)[torch.arange(len(tokens)), tokens].float().numpy()
    return values


def test_agreement_has_no_cause() -> None:
    scores = logits()
    tokens = sampled(scores)
    got = mismatch(of(scores, tokens), of(scores + 0.01 * torch.randn_like(scores), tokens))
    assert got is not None
    assert got.cause == ""
    assert 0 < got.mean < got.max < 0.2


def top_k(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(scores < scores.topk(3).values[:, -1:], -torch.inf)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda scores: scores / 0.6, "another temperature"),
        (lambda scores: scores / 1.4, "another temperature"),
        (lambda scores: logits(9), "other weights"),
        (lambda scores: scores + 0.4 * torch.randn(scores.shape, dtype=torch.float64), "other arithmetic"),
    ],
)
def test_the_cause_is_named(change: object, said: str) -> None:
    scores = logits()
    engine = change(scores)  # type: ignore[operator]
    tokens = sampled(engine)
    got = mismatch(of(scores, tokens), of(engine, tokens))
    assert got is not None
    assert said in got.cause


def test_a_cut_off_is_named() -> None:
    scores = logits() / 2
    tokens = sampled(top_k(scores))
    got = mismatch(of(scores, tokens), of(top_k(scores), tokens))
    assert got is not None
    assert "renormalises" in got.cause


def test_few_tokens_say_nothing_and_none_are_no_figure() -> None:
    few = np.full(5, -3.0, np.float32)
    got = mismatch(few, few - 2)
    assert got is not None
    assert got.share == 1.0
    assert got.cause == ""
    assert mismatch(few[:0], few[:0]) is None
