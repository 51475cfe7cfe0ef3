"""The losses against slow float64 implementations written from the formulas, one token at a time."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from astraflow.trainer import LOSS_NAMES, LossConfig
from astraflow.trainer.losses import (
    LossInputs,
    RatioRange,
    TokenLoss,
    kl_estimate,
    load_loss,
    m2po_range,
    token_weights,
)


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


SEQUENCE = torch.arange(10).repeat_interleave(20)
"""Ten sequences of 20 tokens: the `arrays` below."""


def run(config: LossConfig, new: Tensor, old: Tensor, advantages: Tensor) -> tuple[TokenLoss, Tensor, RatioRange]:
    """Token losses, d (their sum) / d new, and the range."""
    new = new.clone().requires_grad_()
    loss = load_loss(config)
    bounds = loss.range(new.detach(), old, advantages)
    tokens = loss.tokens(LossInputs(new, old, advantages, SEQUENCE[: len(new)]), bounds)
    tokens.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return TokenLoss(tokens.loss.detach(), tokens.ratio, tokens.clipped), new.grad, bounds


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("bounds", [(0.2, 0.28), (0.95, 20.0), (0.01, 0.01)])
@pytest.mark.parametrize("dual", [0.0, 3.0])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_ppo_and_grpo_and_their_gradients_equal_the_slow_one(
    name: str, scale: float, bounds: tuple[float, float], dual: float
) -> None:
    new, old, advantages = arrays(7, scale)
    config = LossConfig(name=name, clip_low=bounds[0], clip_high=bounds[1], dual_clip=dual)
    tokens, grad, _ = run(config, new, old, advantages)
    high = 1 + (bounds[0] if name == "grpo" else bounds[1])
    slow = [
        slow_ppo(a, b, c, 1 - bounds[0], high, dual)
        for a, b, c in zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
    ]
    np.testing.assert_allclose(tokens.loss.tolist(), [loss for loss, _ in slow], rtol=1e-12)
    # At ratio 1 exactly both branches are equal and torch splits the tie; the slope is the same on either side.
    np.testing.assert_allclose(grad.tolist(), [slope for _, slope in slow], rtol=1e-12)
    dead = [slope == 0.0 for _, slope in slow]
    assert [bool(c) or abs(a - b) >= 20 for c, a, b in zip(tokens.clipped, new, old, strict=True)] == dead


def slow_gspo(new: list[float], old: list[float], advantage: float, low: float, high: float) -> tuple[float, float]:
    """A sequence's loss and its slope in every one of its tokens: -min(s A, clip(s) A), d s / d token = s / length."""
    s = math.exp(min(max(sum(a - b for a, b in zip(new, old, strict=True)) / len(new), -20.0), 20.0))
    clipped = min(max(s, low), high)
    if s * advantage <= clipped * advantage:
        return -s * advantage, -s * advantage / len(new)
    return -clipped * advantage, 0.0


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 5.0])
def test_gspo_and_its_gradient_equal_the_slow_one(scale: float) -> None:
    new, old, _ = arrays(3, scale)
    each = torch.randn(10, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    advantages = each.repeat_interleave(20)
    config = LossConfig(name="gspo", clip_low=0.03, clip_high=0.04)
    tokens, grad, _ = run(config, new, old, advantages)
    for i in range(10):
        part = slice(20 * i, 20 * i + 20)
        loss, slope = slow_gspo(new[part].tolist(), old[part].tolist(), float(each[i]), 0.97, 1.04)
        assert float(tokens.loss[part].mean()) == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose((grad[part] / 20).tolist(), [slope] * 20, rtol=1e-9)


@pytest.mark.parametrize("scale", [0.0, 0.1, 2.0])
def test_sapo_and_cispo_equal_the_formulas(scale: float) -> None:
    new, old, advantages = arrays(4, scale)
    sapo, sapo_grad, _ = run(LossConfig(name="sapo"), new, old, advantages)
    cispo, cispo_grad, _ = run(LossConfig(name="cispo", clip_low=0.5, clip_high=1.0), new, old, advantages)
    for i, (a, b, advantage) in enumerate(zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)):
        ratio = math.exp(a - b)
        t = 1.0 if advantage > 0 else 1.05
        p = 1 / (1 + math.exp(-t * (ratio - 1)))
        assert float(sapo.loss[i]) == pytest.approx(-p * 4 / t * advantage, rel=1e-9)
        assert float(sapo_grad[i]) == pytest.approx(-4 * p * (1 - p) * ratio * advantage, rel=1e-6, abs=1e-12)
        weight = min(max(ratio, 0.5), 2.0)
        assert float(cispo.loss[i]) == pytest.approx(-weight * advantage * a, rel=1e-12)
        assert float(cispo_grad[i]) == pytest.approx(-weight * advantage, rel=1e-12)  # also where it is clipped
        assert bool(cispo.clipped[i]) == (weight != ratio)


@pytest.mark.parametrize("name", ["m2po", "ppo", "grpo", "gspo", "sapo", "cispo"])
def test_extreme_ratios_stay_finite_in_float32(name: str) -> None:
    old = torch.full((4,), -50.0)
    new = torch.tensor([-1e-3, -1000.0, -50.0, -120.0])
    for advantages in (torch.full((4,), 5.0), torch.full((4,), -5.0), torch.zeros(4)):
        tokens, grad, _ = run(LossConfig(name=name), new, old, advantages)
        assert torch.isfinite(tokens.loss).all()
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("difference", [0.0, 1e-9, 0.3, -0.3, 5.0, -5.0])
def test_the_divergence_estimates(difference: float) -> None:
    want = {
        "k1": (-difference, 1.0),
        "k2": (difference**2 / 2, -difference),
        "k3": (math.exp(difference) - difference - 1, 1 - math.exp(difference)),
    }
    for name, (value, slope) in want.items():
        logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        got = kl_estimate(name, logprobs, logprobs.detach() + difference)  # type: ignore[arg-type]
        got.backward()  # type: ignore[no-untyped-call]
        assert got.item() == pytest.approx(value, abs=1e-15)
        assert logprobs.grad is not None
        assert logprobs.grad.item() == pytest.approx(slope, abs=1e-15)


def test_weights_by_tokens_by_sequences_and_by_a_constant() -> None:
    lengths, samples = torch.tensor([1, 3]), torch.tensor([1.0, 2.0])
    tokens = token_weights(lengths, samples, LossConfig(name="ppo"))
    np.testing.assert_allclose(tokens, [1 / 4, 2 / 4, 2 / 4, 2 / 4])
    sequences = token_weights(lengths, samples, LossConfig(name="grpo"))
    np.testing.assert_allclose(sequences, [1 / 2, 1 / 3, 1 / 3, 1 / 3])
    constant = token_weights(lengths, samples, LossConfig(aggregate="constant", aggregate_tokens=10))
    np.testing.assert_allclose(constant, [1 / 20, 2 / 20, 2 / 20, 2 / 20])
    of_two_ranks = token_weights(lengths, samples, LossConfig(name="grpo"), tokens=8, sequences=4)
    np.testing.assert_allclose(of_two_ranks, [1 / 4, 1 / 6, 1 / 6, 1 / 6])


def test_the_last_token_that_m2po_keeps_is_not_clipped() -> None:
    new = torch.tensor([0.05, 0.1, 0.15, -0.15, 0.4, -0.4])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, -1.0])
    tokens, _, _ = run(LossConfig(m2_threshold=0.02), new, torch.zeros(6), advantages)
    assert tokens.clipped.tolist() == [False, False, False, False, True, True]


def squared(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    """A loss of the user's own."""
    ratio = (inputs.logprobs - inputs.old).exp()
    return TokenLoss((ratio - 1 - inputs.advantages).square(), ratio.detach(), ratio.detach() > 1 + config.clip_high)


def short(inputs: LossInputs, config: LossConfig) -> TokenLoss:
    tokens = squared(inputs, config)
    return TokenLoss(tokens.loss.sum(), tokens.ratio, tokens.clipped)


def test_a_loss_of_the_users_own_is_found_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("my_losses")
    module.squared, module.short, module.number = squared, short, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_losses", module)
    new, old, advantages = arrays(1, 0.1)
    tokens, _, bounds = run(LossConfig(name="my_losses:squared"), new, old, advantages)
    torch.testing.assert_close(tokens.loss, ((new - old).exp() - 1 - advantages).square())
    assert bounds.second_moment > 0
    with pytest.raises(ValueError, match=r"my_losses:short gave arrays of"):
        run(LossConfig(name="my_losses:short"), new, old, advantages)
    for path, reason in [("my_losses:nothing", "cannot be imported"), ("my_losses:number", "is no function"),
                         ("no_such_module:f", "cannot be imported"), ("pppo", "is none of m2po, ppo")]:  # fmt: skip
        with pytest.raises(ValueError, match=reason):
            load_loss(LossConfig(name=path))


def test_the_page_about_losses_has_a_loss_that_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "losses.md", "exec"), names)
    new, old, advantages = arrays(1, 0.1)
    tokens = names["loss"](LossInputs(new.requires_grad_(), old, advantages, SEQUENCE), LossConfig())
    tokens.loss.sum().backward()
    torch.testing.assert_close(new.grad, -(new - old).exp().detach() * advantages)
    assert all(f"`{name}`" in page for name in LOSS_NAMES)
