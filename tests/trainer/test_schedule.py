from __future__ import annotations

import pytest

from astraflow.trainer import OptimConfig
from astraflow.trainer.optim import learning_rate


def rates(count: int = 9, **fields: object) -> list[float]:
    config = OptimConfig(lr=1.0, **fields)  # type: ignore[arg-type]
    return [learning_rate(config, step) for step in range(count)]


def test_constant_after_the_warm_up() -> None:
    assert rates(5) == [1.0] * 5
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_straight_and_cosine_down_to_the_end_and_no_further() -> None:
    linear = rates(warmup_steps=2, schedule="linear", schedule_steps=6, lr_end=0.2)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
    cosine = rates(schedule="cosine", schedule_steps=4)
    assert cosine == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0, 0.0, 0.0, 0.0, 0.0], abs=1e-6)
