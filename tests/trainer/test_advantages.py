"""Advantages against slow float64 implementations written from the formulas."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.trainer import AdvantageConfig
from astraflow.trainer.advantages import (
    Groups,
    generalized_advantages,
    group_advantages,
    leave_one_out_advantages,
    normalized,
    token_advantages,
)

GROUPS = Groups(np.array([1.0, 0.0, 7.0]), np.array([0.25, 0.25, 3.0]), np.array([0.5, 0.5, 0.0]), np.array([4, 4, 1]))


def test_group_advantages_follow_the_formula_and_vanish_for_a_group_of_one() -> None:
    np.testing.assert_allclose(group_advantages(GROUPS), [0.75 / 0.50001, -0.25 / 0.50001, 0.0])
    np.testing.assert_allclose(group_advantages(GROUPS, std=False), [0.75, -0.25, 0.0])


def test_leave_one_out_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = np.array([1.0, 0.0, 0.5, 3.0])
    spread = np.full(4, rewards.std(ddof=1))
    groups = Groups(rewards, np.full(4, rewards.mean()), spread, np.full(4, 4))
    want = [rewards[i] - np.delete(rewards, i).mean() for i in range(4)]
    np.testing.assert_allclose(leave_one_out_advantages(groups), want)
    assert leave_one_out_advantages(GROUPS)[2] == 0.0


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: the sum over l of (gamma lam)^l d_{t+l}."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * v1 - v0 for r, v1, v0 in zip(rewards, after, values, strict=True)]
    steps = range(len(rewards))
    return [sum((gamma * lam) ** (s - t) * errors[s] for s in steps if s >= t) for t in steps]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("length", [1, 2, 50])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_gae_equals_the_slow_one(gamma: float, lam: float, length: int, scale: float) -> None:
    rng = np.random.default_rng(length)
    rewards, values = rng.normal(size=length) * scale, rng.normal(size=length) * scale
    got = generalized_advantages(rewards, values, gamma, lam)
    np.testing.assert_allclose(got, slow_gae(rewards.tolist(), values.tolist(), gamma, lam), rtol=1e-9, atol=1e-9)


def test_gae_rewards_the_last_trained_token_and_starts_anew_with_each_sequence() -> None:
    config = AdvantageConfig(estimator="gae", gamma=0.5, lam=1.0)
    lengths = np.array([2, 1, 3])
    got, returns = token_advantages(config, GROUPS, lengths)
    np.testing.assert_allclose(got, [0.5, 1.0, 0.0, 1.75, 3.5, 7.0])
    np.testing.assert_allclose(returns, got)
    values = np.arange(6, dtype=np.float64)
    got, returns = token_advantages(config, GROUPS, lengths, values=values)
    np.testing.assert_allclose(returns, [0.5, 1.0, 0.0, 1.75, 3.5, 7.0])  # lambda 1: whole returns, whatever V
    np.testing.assert_allclose(got, returns - values)


def test_a_penalty_reaches_back_to_the_tokens_before_it() -> None:
    penalties = np.array([0.0, 0.2, 0.0, 0.0, 0.0, 0.1])
    got, _ = token_advantages(AdvantageConfig(estimator="reward"), GROUPS, np.array([2, 1, 3]), penalties=penalties)
    np.testing.assert_allclose(got, [0.8, 0.8, 0.0, 6.9, 6.9, 6.9])
    config = AdvantageConfig(estimator="gae", gamma=1.0, lam=1.0)
    gae, _ = token_advantages(config, GROUPS, np.array([2, 1, 3]), penalties=penalties)
    np.testing.assert_allclose(gae, got)


def test_batch_normalisation_counts_tokens_or_sequences() -> None:
    lengths = np.array([1, 5, 2])
    values = np.repeat([1.0, -2.0, 0.5], lengths)
    tokens = normalized(AdvantageConfig(batch="tokens"), values, lengths)
    np.testing.assert_allclose(tokens, (values - values.mean()) / (values.std() + 1e-5))
    assert tokens.std() == pytest.approx(1.0, abs=1e-4)
    each = np.array([1.0, -2.0, 0.5])
    sequences = normalized(AdvantageConfig(batch="sequences"), values, lengths)
    np.testing.assert_allclose(sequences, (values - each.mean()) / (each.std() + 1e-5))
    np.testing.assert_array_equal(normalized(AdvantageConfig(batch="none"), values, lengths), values)


@pytest.mark.parametrize("batch", ["tokens", "sequences"])
def test_equal_advantages_become_zero_not_nan(batch: str) -> None:
    config = AdvantageConfig(batch=batch)  # type: ignore[arg-type]
    np.testing.assert_array_equal(normalized(config, np.ones(6), np.array([1, 2, 3])), 0.0)


def test_the_reward_itself_can_be_the_advantage() -> None:
    got, _ = token_advantages(AdvantageConfig(estimator="reward"), GROUPS, np.array([1, 2, 1]))
    np.testing.assert_array_equal(got, [1.0, 0.0, 0.0, 7.0])
