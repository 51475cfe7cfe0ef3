"""The losses against slow float64 implementations written from the formulas, one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from astraflow.trainer import LossConfig
from astraflow.trainer.batch import Example
from astraflow.trainer.losses import clipped_surrogate, kl_k3, m2po_range, ratio_range, token_weights


def slow_m2po(logprobs: list[float], old: list[float], advantages: list[float], tau: float) -> tuple[float, float]:
    moments = []
    for new, behaviour, advantage in zip(logprobs, old, advantages, strict=True):
        ratio_up = new > behaviour
        if (advantage > 0 and ratio_up) or (advantage < 0 and new < behaviour):
            moments.append((behaviour - new) ** 2)
    if not moments or sum(moments) / len(moments) <= tau:
        return 0.05, 21.0
    moments.sort()
    kept = list(moments)
    while len(kept) > 1 and sum(kept) / len(kept) >= tau:
        kept.pop()
    delta = math.sqrt(kept[-1])
    return 1 - min(1 - math.exp(-delta), 0.95), 1 + min(math.exp(delta) - 1 if delta < 700 else math.inf, 20.0)


def slow_ppo(new: float, old: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """Loss and d loss / d new."""
    ratio = math.exp(min(max(new - old, -20.0), 20.0))
    inside = abs(new - old) < 20
    clipped = min(max(ratio, low), high)
    if ratio * advantage <= clipped * advantage:
        loss, slope = -ratio * advantage, -ratio * advantage if inside else 0.0
    else:
        loss, slope = -clipped * advantage, 0.0
    if dual and advantage < 0 and loss > -dual * advantage:
        return -dual * advantage, 0.0
    return loss, slope


def arrays(seed: int, scale: float, n: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 5
    new = old + scale * torch.randn(n, generator=generator, dtype=torch.float64)
    return new, old, torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-6, 0.01, 0.1, 0.3, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("tau", [0.002, 0.01, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_m2po_range_equals_the_slow_one(scale: float, tau: float, seed: int) -> None:
    new, old, advantages = arrays(seed, scale)
    low, high, _ = m2po_range(new, old, advantages, tau)
    assert (low, high) == pytest.approx(slow_m2po(new.tolist(), old.tolist(), advantages.tolist(), tau), rel=1e-12)


@pytest.mark.parametrize(
    ("differences", "advantages", "tau", "want"),
    [
        ([0.5, -0.5], [-1.0, 1.0], 0.01, (0.05, 21.0)),  # every ratio moves against its advantage
        ([0.0, 0.0], [1.0, -1.0], 0.01, (0.05, 21.0)),
        ([2.0, 3.0], [1.0, 1.0], 0.01, (math.exp(-2.0), math.exp(2.0))),  # none qualifies: the smallest alone
        ([90.0], [1.0], 0.01, (0.05, 21.0)),  # both bounds capped
        ([0.125, 1.0], [1.0, 1.0], 0.015625, (math.exp(-0.125), math.exp(0.125))),  # "below" is strict; one stays
    ],
)
def test_m2po_extremes(
    differences: list[float], advantages: list[float], tau: float, want: tuple[float, float]
) -> None:
    old = torch.full((len(differences),), -100.0, dtype=torch.float64)
    low, high, _ = m2po_range(old + torch.tensor(differences), old, torch.tensor(advantages), tau)
    assert (low, high) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("bounds", [(0.8, 1.28), (0.05, 21.0), (0.99, 1.01)])
@pytest.mark.parametrize("dual", [0.0, 3.0])
def test_surrogate_and_its_gradient_equal_the_slow_one(scale: float, bounds: tuple[float, float], dual: float) -> None:
    new, old, advantages = arrays(7, scale)
    if scale == 0:
        new = old.clone()
    new.requires_grad_()
    tokens = clipped_surrogate(new, old, advantages, *bounds, dual_clip=dual)
    tokens.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    slow = [
        slow_ppo(a, b, c, *bounds, dual)
        for a, b, c in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    np.testing.assert_allclose(tokens.loss.tolist(), [loss for loss, _ in slow], rtol=1e-12)
    # At ratio 1 exactly both branches are equal and torch splits the tie; the slope is the same on either side.
    np.testing.assert_allclose(new.grad.tolist(), [slope for _, slope in slow], rtol=1e-12)
    dead = [slope == 0.0 for _, slope in slow]
    assert [bool(c) or abs(a - b) >= 20 for c, a, b in zip(tokens.clipped, new, old, strict=True)] == dead


@pytest.mark.parametrize("difference", [0.0, 1e-9, 0.3, -0.3, 5.0, -5.0])
def test_k3(difference: float) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    value = kl_k3(logprobs, logprobs.detach() + difference)
    value.backward()  # type: ignore[no-untyped-call]
    assert value.item() == pytest.approx(math.exp(difference) - difference - 1, abs=1e-15)
    assert value.item() >= 0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(difference), abs=1e-15)


def example(length: int, weight: float = 1.0) -> Example:
    return Example(
        np.arange(length + 1), np.arange(1, length + 1), np.zeros(length, np.float32), np.zeros(length, np.int32),
        1.0, 1.0, 1.0, weight, "g",
    )  # fmt: skip


def test_weights_normalise_by_tokens_or_by_sequences() -> None:
    samples = [example(1), example(3, weight=2.0)]
    tokens = token_weights(samples, LossConfig(name="ppo"))
    np.testing.assert_allclose(tokens, [1 / 4, 2 / 4, 2 / 4, 2 / 4])
    sequences = token_weights(samples, LossConfig(name="grpo"))
    np.testing.assert_allclose(sequences, [1 / 2, 1 / 3, 1 / 3, 1 / 3])


def test_ranges_of_the_fixed_losses() -> None:
    new, old, advantages = arrays(0, 0.1)
    ppo = ratio_range(LossConfig(name="ppo", clip_low=0.1, clip_high=0.3), new, old, advantages)
    grpo = ratio_range(LossConfig(name="grpo", clip_low=0.1, clip_high=0.3), new, old, advantages)
    assert ppo[:2] == (0.9, 1.3)
    assert grpo[:2] == (0.9, 1.1)


def test_the_last_token_that_m2po_keeps_is_not_clipped() -> None:
    old = torch.zeros(6)
    new = torch.tensor([0.05, 0.1, 0.15, -0.15, 0.4, -0.4], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    low, high, _ = ratio_range(LossConfig(m2_threshold=0.02), new.detach(), old, advantages)
    tokens = clipped_surrogate(new, old, advantages, low, high)
    assert tokens.clipped.tolist() == [False, False, False, False, True, True]
