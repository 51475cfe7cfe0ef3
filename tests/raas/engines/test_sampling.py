"""The sampler draws from the distribution whose log-probability it returns."""

from __future__ import annotations

import pytest
import torch

from astraflow.raas.engines.sampling import BLOCK, inverse_cdf, sample


@pytest.mark.parametrize("vocab", [7, BLOCK, 3 * BLOCK + 5])
def test_draws_have_the_distribution_of_the_softmax(vocab: int) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(vocab)
    probs = (logits / 0.7).softmax(-1)
    rows = 40_000
    uniforms = ((torch.arange(rows) + 0.5) / rows).tolist()
    tokens = torch.cat([sample(logits.expand(4000, -1), [0.7] * 4000, uniforms[i : i + 4000])[0]
                        for i in range(0, rows, 4000)])  # fmt: skip
    counts = torch.bincount(tokens, minlength=vocab).float()
    # Stratified numbers: every token is drawn as often as its probability says, to within its two ends.
    assert (counts - rows * probs).abs().max() <= 2.1


def test_rows_have_their_own_temperature_and_greedy_logprobs_are_at_one() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(3, 500)
    tokens, logprobs = sample(logits, [0.0, 1.0, 0.25], [0.3, 0.3, 0.3])
    assert tokens[0] == logits[0].argmax()
    expected = [logits[0].log_softmax(-1), logits[1].log_softmax(-1), (logits[2] / 0.25).log_softmax(-1)]
    for row, table in enumerate(expected):
        assert logprobs[row] == pytest.approx(float(table[tokens[row]]), abs=1e-6)


def test_a_token_without_probability_is_never_drawn() -> None:
    probs = torch.zeros(4, 2 * BLOCK + 9)
    probs[:, BLOCK + 3] = 0.5
    probs[:, BLOCK + 200] = 0.5
    ends = torch.tensor([0.0, 0.5 - 1e-12, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert inverse_cdf(probs, ends).tolist() == [BLOCK + 3, BLOCK + 3, BLOCK + 200, BLOCK + 200]
