"""Advantages: how much better a sample was than its group, as one number a sequence.

Pure functions of arrays. Invariant: a sample without a reward has no advantage and never reaches this module
(`batch.examples` drops it), so an error is never mistaken for a reward of 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .interface import AdvantageConfig

EPS = 1e-5


def group_advantages(
    rewards: NDArray[np.float64], means: NDArray[np.float64], stds: NDArray[np.float64], sizes: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(r - mean) / (std + 1e-5) within the group; 0 for a group of one. All arrays [N] (GRPO, arXiv:2402.03300)."""
    return np.where(sizes > 1, (rewards - means) / (stds + EPS), 0.0)


def batch_normalized(advantages: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Shift and scale to mean 0 and standard deviation 1 over the batch's trained tokens.

    Args:
        advantages: [N], one a sequence, carried by each of its trained tokens.
        tokens: [N], number of trained tokens of each sequence.
    """
    mean = np.average(advantages, weights=tokens)
    std = np.sqrt(np.average((advantages - mean) ** 2, weights=tokens))
    return np.asarray((advantages - mean) / (std + EPS))


def advantages(
    config: AdvantageConfig,
    rewards: NDArray[np.float64],
    means: NDArray[np.float64],
    stds: NDArray[np.float64],
    sizes: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> NDArray[np.float64]:
    """The advantage of every sequence [N] under `config`; without either normalisation, the reward itself."""
    values = group_advantages(rewards, means, stds, sizes) if config.group else rewards
    return batch_normalized(values, tokens) if config.batch else values
