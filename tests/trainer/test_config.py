"""A configuration that contradicts itself is refused with the field's name."""

from __future__ import annotations

import pytest

from astraflow.trainer import AdvantageConfig, CriticConfig, LossConfig, TrainerConfig, check


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (TrainerConfig(loss=LossConfig(name="pppo")), "loss.name"),
        (TrainerConfig(loss=LossConfig(clip_low=1.5)), "loss.clip_low"),
        (TrainerConfig(loss=LossConfig(dual_clip=0.5)), "loss.dual_clip"),
        (TrainerConfig(loss=LossConfig(kl=-1.0)), "loss.kl"),
        (TrainerConfig(loss=LossConfig(aggregate="constant", aggregate_tokens=0)), "loss.aggregate_tokens"),
        (TrainerConfig(loss=LossConfig(correction="mask")), "loss.proximal"),
        (TrainerConfig(loss=LossConfig(reject_high=2.0)), "loss.proximal"),
        (TrainerConfig(loss=LossConfig(proximal=True, correction_low=3.0)), "loss.correction_low"),
        (TrainerConfig(loss=LossConfig(kl=0.0, kl_in_reward=True)), "loss.kl_in_reward"),
        (TrainerConfig(critic=CriticConfig(enabled=True)), "critic.enabled"),
        (TrainerConfig(advantage=AdvantageConfig(gamma=1.5)), "advantage.gamma"),
    ],
)
def test_contradictions_are_refused(config: TrainerConfig, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        check(config)


def test_the_defaults_and_a_path_pass() -> None:
    check(TrainerConfig())
    check(TrainerConfig(loss=LossConfig(name="my.module:loss", proximal=True, correction="mask", reject_high=2.0)))
