"""What an evaluation's samples say, with 95 % intervals: pure functions of one (sum, count) a prompt.

The samples of one prompt are alike, so that a prompt counts as a cluster: k samples of it are not k independent ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .figures import MetricSummary

Z95 = 1.959963984540054
Cluster = tuple[float, int]
"""A prompt's sum over its samples, and how many these are."""


def wilson(mean: float, n: float) -> tuple[float, float]:
    """Wilson's score interval (1927) at 95 % for a proportion `mean` of `n`."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


def average(clusters: Sequence[Cluster], *, binary: bool) -> MetricSummary:
    """avg@k: the mean over all samples, of at least one.

    The variance is that of a ratio of sums over clusters (Cochran 1977, section 6.3). For values in {0, 1} the interval
    is Wilson's at the sample size that has this variance (Kish's effective size, 1965), else the normal one.
    """
    n = sum(count for _, count in clusters)
    mean = sum(total for total, _ in clusters) / n
    variance = ratio_variance(clusters, mean, n)
    if binary:
        low, high = wilson(mean, effective_size(mean, variance, len(clusters), n))
    else:
        half = Z95 * math.sqrt(variance)
        low, high = mean - half, mean + half
    return MetricSummary(mean=mean, low=low, high=high, n=n)


def ratio_variance(clusters: Sequence[Cluster], mean: float, n: int) -> float:
    """Of the mean over all samples; 0 of a single cluster."""
    if len(clusters) < 2:
        return 0.0
    residuals = sum((total - mean * count) ** 2 for total, count in clusters)
    return len(clusters) / (len(clusters) - 1) * residuals / (n * n)


def effective_size(mean: float, variance: float, clusters: int, n: int) -> float:
    """Independent samples with the same variance: between one a cluster and one a sample."""
    if variance > 0:
        return min(float(n), max(float(clusters), mean * (1 - mean) / variance))
    # Without any spread between clusters nothing speaks for fewer, unless all samples are equal.
    return float(n if 0 < mean < 1 and clusters > 1 else max(1, clusters))


def pass_at(k: int, n: int, correct: int) -> float:
    """The chance that one of `k` samples is right, unbiased from `correct` of `n` (Chen et al. 2021, eq. 1)."""
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod((n - correct - i) / (n - i) for i in range(k))


def passes(k: int, n: int, correct: Sequence[int]) -> MetricSummary:
    """pass@k over prompts, each with so many of `n` samples right: normal interval within [0, 1], Wilson's where all
    prompts have the same value."""
    values = [pass_at(k, n, count) for count in correct]
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        low, high = wilson(min(1.0, max(0.0, mean)), len(values))
    else:
        spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        half = Z95 * math.sqrt(spread / len(values))
        low, high = max(0.0, mean - half), min(1.0, mean + half)
    return MetricSummary(mean=mean, low=low, high=high, n=len(values))
