"""Advantages: how much better a token, or a whole sample, was than expected.

Pure functions of arrays. Invariant: a sample without a reward has no advantage and never reaches this module
(`batch.examples` drops it), so an error is never mistaken for a reward of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .batch import Example
from .config import AdvantageConfig

EPS = 1e-5

Floats = NDArray[np.float64]


class Groups(NamedTuple):
    """Of each sequence [S]: its reward, and mean, unbiased standard deviation and size of its group."""

    rewards: Floats
    means: Floats
    stds: Floats
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> Groups:
        return cls(
            np.array([example.reward for example in examples], np.float64),
            np.array([example.group_mean for example in examples], np.float64),
            np.array([example.group_std for example in examples], np.float64),
            np.array([example.group_size for example in examples], np.int64),
        )


def group_advantages(groups: Groups, *, std: bool = True) -> Floats:
    """(r - mean) / (std + 1e-5) within the group, [S]; 0 for a group of one (GRPO, arXiv:2402.03300, section 4.1.2).

    Without `std` r - mean: hard and easy prompts then weigh less than those in between (Dr. GRPO, arXiv:2503.20783).
    """
    scale = groups.stds + EPS if std else np.ones_like(groups.stds)
    return np.where(groups.sizes > 1, (groups.rewards - groups.means) / scale, 0.0)


def leave_one_out_advantages(groups: Groups) -> Floats:
    """The reward less the mean of the group's others, [S]; 0 for a group of one (RLOO, arXiv:2402.14740, eq. 7)."""
    others = np.maximum(groups.sizes - 1, 1)
    return np.where(groups.sizes > 1, (groups.rewards - groups.means) * groups.sizes / others, 0.0)


def generalized_advantages(rewards: Floats, values: Floats, gamma: float, lam: float) -> Floats:
    """GAE (arXiv:1506.02438, eq. 16) over one sequence's trained tokens [K]; the value after the last one is 0.

    A_t = sum_l (gamma lam)^l d_{t+l}, d_t = r_t + gamma V_{t+1} - V_t; the return is A_t + V_t. Tokens that were not
    sampled (prompts, tools' answers) are not steps.
    """
    result = np.empty(len(rewards))
    ahead = following = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        ahead = rewards[t] + gamma * following - values[t] + gamma * lam * ahead
        following = values[t]
        result[t] = ahead
    return result


def token_advantages(
    config: AdvantageConfig,
    groups: Groups,
    lengths: NDArray[np.int64],
    *,
    values: Floats | None = None,
    penalties: Floats | None = None,
) -> tuple[Floats, Floats]:
    """The advantage of every trained token [N], before normalisation over the batch, and its return [N].

    Args:
        groups: of the S sequences; lengths: int64 [S], trained tokens of each, N in all.
        values: [N], the critic's, used by `gae` (default 0). penalties: [N], taken off the reward at each token
            (a divergence); for estimators other than `gae` a token carries those from it to the end
            (REINFORCE++, arXiv:2501.03262, eq. 4).
    """
    if config.estimator != "gae":
        whole = groups.rewards
        if config.estimator == "group":
            whole = group_advantages(groups, std=config.std)
        elif config.estimator == "leave_one_out":
            whole = leave_one_out_advantages(groups)
        result = np.repeat(whole, lengths)
        if penalties is not None:
            result = result - np.concatenate([np.cumsum(part[::-1])[::-1] for part in _parts(penalties, lengths)])
        return result, result
    values = np.zeros(int(lengths.sum())) if values is None else values
    rewards = np.zeros_like(values) if penalties is None else -penalties
    rewards[np.cumsum(lengths) - 1] += groups.rewards
    pairs = zip(_parts(rewards, lengths), _parts(values, lengths), strict=True)
    result = np.concatenate([generalized_advantages(r, v, config.gamma, config.lam) for r, v in pairs])
    return result, result + values


def normalized(config: AdvantageConfig, advantages: Floats, lengths: NDArray[np.int64]) -> Floats:
    """Advantages [N] shifted and scaled to mean 0 and standard deviation 1 (+ 1e-5).

    `tokens`: the statistics are taken over all N trained tokens, so a long sequence counts more; `sequences`: over the
    S sequences' means, so that each counts once.
    """
    if config.batch == "none":
        return advantages
    weights = np.ones(len(advantages)) if config.batch == "tokens" else np.repeat(1 / lengths, lengths)
    mean = np.average(advantages, weights=weights)
    std = np.sqrt(np.average((advantages - mean) ** 2, weights=weights))
    return np.asarray((advantages - mean) / (std + EPS))


def _parts(values: Floats, lengths: NDArray[np.int64]) -> list[Floats]:
    return np.split(values, np.cumsum(lengths)[:-1])
