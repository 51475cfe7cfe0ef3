"""Importance corrections between the sampling policy and the proximal one."""

from __future__ import annotations

import pytest
import torch

from astraflow.trainer import LossConfig
from astraflow.trainer.losses import correction

PROXIMAL = torch.tensor([-1.0, -1.0, -2.0, -3.0])
LOG = torch.tensor([0.0, 1.0, -1.0, 0.1])
SEQUENCE = torch.tensor([0, 0, 1, 1])


def weights(**fields: object) -> tuple[list[float], list[bool], list[bool]]:
    config = LossConfig(proximal=True, **fields)  # type: ignore[arg-type]
    got = correction(PROXIMAL, PROXIMAL - LOG, SEQUENCE, config)
    return got.weights.tolist(), got.masked.tolist(), got.rejected.tolist()


def test_full_truncated_masked_and_none() -> None:
    plain = [1.0, 2.718282, 0.367879, 1.105171]
    assert weights()[0] == pytest.approx(plain, rel=1e-5)
    assert weights(correction="truncate", correction_high=2.0)[0] == pytest.approx(
        [1.0, 2.0, 0.367879, 1.105171], rel=1e-5
    )
    kept, masked, _ = weights(correction="mask", correction_low=0.5, correction_high=2.0)
    assert kept == pytest.approx([1.0, 0.0, 0.0, 1.105171])
    assert masked == [False, True, True, False]
    assert weights(correction="none")[0] == [1.0] * 4


def test_a_sequence_outside_the_range_is_rejected_whole() -> None:
    # geometric means: exp(0.5) = 1.65 and exp(-0.45) = 0.64
    kept, _, rejected = weights(correction="none", reject_high=1.5)
    assert kept == [0.0, 0.0, 1.0, 1.0]
    assert rejected == [True, True, False, False]
    assert weights(correction="none", reject_low=0.7, reject_high=2.0)[0] == [1.0, 1.0, 0.0, 0.0]


def test_extreme_differences_stay_finite() -> None:
    got = correction(torch.tensor([-1e-3, -500.0]), torch.tensor([-500.0, -1e-3]), torch.tensor([0, 1]), LossConfig())
    assert torch.isfinite(got.weights).all()
