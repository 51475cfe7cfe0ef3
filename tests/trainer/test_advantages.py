from __future__ import annotations

import numpy as np
import pytest

from astraflow.trainer import AdvantageConfig
from astraflow.trainer.advantages import advantages, batch_normalized, group_advantages


def test_group_advantages_follow_the_formula_and_vanish_for_a_group_of_one() -> None:
    got = group_advantages(
        np.array([1.0, 0.0, 7.0]), np.array([0.25, 0.25, 3.0]), np.array([0.5, 0.5, 0.0]), np.array([4, 4, 1])
    )
    np.testing.assert_allclose(got, [0.75 / 0.50001, -0.25 / 0.50001, 0.0])


def test_batch_normalisation_counts_tokens_not_sequences() -> None:
    values, tokens = np.array([1.0, -2.0, 0.5]), np.array([1, 5, 2])
    got = batch_normalized(values, tokens)
    flat = np.repeat(values, tokens)
    want = (values - flat.mean()) / (flat.std() + 1e-5)
    np.testing.assert_allclose(got, want)
    spread = np.repeat(got, tokens)
    assert abs(spread.mean()) < 1e-12
    assert spread.std() == pytest.approx(1.0, abs=1e-4)


def test_equal_advantages_become_zero_not_nan() -> None:
    np.testing.assert_array_equal(batch_normalized(np.ones(3), np.array([1, 2, 3])), 0.0)


def test_without_normalisation_the_reward_is_the_advantage() -> None:
    config = AdvantageConfig(group=False, batch=False)
    rewards = np.array([1.0, 0.25])
    zeros, ones = np.zeros(2), np.ones(2, np.int64)
    np.testing.assert_array_equal(advantages(config, rewards, zeros, zeros, ones, ones), rewards)
