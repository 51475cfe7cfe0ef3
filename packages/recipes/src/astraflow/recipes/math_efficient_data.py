"""math-efficient-data: what dynamic sampling, replay and GRESO save, measured side by side on the same problems.

One solver learns sums from the same prompts under each variant, for the same number of training rollouts, on several
seeds. What a variant is, is a few lines of the data configuration: see `VARIANTS`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from astraflow.dataflow import Replay
from astraflow.trainer import LossConfig, TrainerConfig

from .config import ConfigError, DataConfig, EvalConfig, PolicyConfig, RolloutConfig
from .math_tasks import MathTask
from .recipe import Recipe
from .sums import SOLVER, SOLVER_ONLY, SumsConfig, SumsParts

DYNAMIC_SAMPLING = ("zero_advantage",)
GRESO = ("greso",)


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The data algorithms of one variant."""

    title: str
    selectors: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    replay_ratio: float = 0.0


VARIANTS: Mapping[str, Variant] = {
    "vanilla": Variant(title="vanilla"),
    "ds": Variant(title="DS", filters=DYNAMIC_SAMPLING),
    "ds_replay": Variant(title="DS + replay 0.3", filters=DYNAMIC_SAMPLING, replay_ratio=0.3),
    "ds_greso": Variant(title="DS + GRESO", filters=DYNAMIC_SAMPLING, selectors=GRESO),
    "ds_replay_greso": Variant(
        title="DS + replay 0.3 + GRESO", filters=DYNAMIC_SAMPLING, selectors=GRESO, replay_ratio=0.3
    ),
    "ds_replay_half": Variant(title="DS + replay 0.5", filters=DYNAMIC_SAMPLING, replay_ratio=0.5),
    "ds_replay_most": Variant(title="DS + replay 0.7", filters=DYNAMIC_SAMPLING, replay_ratio=0.7),
}


class EfficientConfig(SumsConfig, frozen=True, kw_only=True):
    """The same solver under several data algorithms."""

    variants: tuple[str, ...] = ("vanilla", "ds", "ds_replay", "ds_replay_greso")
    """What is compared."""
    seeds: int = 3
    """Runs of each variant: seeds --seed, --seed + 1, ..."""
    rollouts: int = 1920
    """Training samples that each run generates."""
    evaluations: int = 6
    """Held-out evaluations on the way, the last one at the end."""


def variant_config(config: EfficientConfig, name: str, seed: int) -> EfficientConfig:
    """The configuration of one run of the comparison.

    Raises:
        ConfigError: there is no such variant.
    """
    if name not in VARIANTS:
        raise ConfigError(f"--variants {name}: there is no such variant; known: {', '.join(VARIANTS)}")
    variant, replace = VARIANTS[name], msgspec.structs.replace
    data: DataConfig = replace(
        config.data,
        selectors=config.data.selectors + variant.selectors,
        filters=variant.filters,
        replay=replace(config.data.replay, ratio=variant.replay_ratio),
    )
    return replace(config, seed=seed, data=data)


LAPTOP = EfficientConfig(
    steps=60,
    policies={"solver": PolicyConfig(batch_size=96, max_new_tokens=4)},
    data=DataConfig(max_staleness=4, replay=Replay(max_staleness=8)),
    trainer=TrainerConfig(lr=1e-5, loss=LossConfig(name="m2po", kl=0.0)),
    task=MathTask(train_problems=96),
    rollouts=3000,
)

TINY = EfficientConfig(
    steps=200,
    policies={"solver": PolicyConfig(model="package:tiny", batch_size=64, max_new_tokens=4)},
    data=DataConfig(max_staleness=2),
    rollout=RolloutConfig(max_context=96, max_running=64, capacity=64),
    trainer=TrainerConfig(lr=1.5e-5, minibatches=2, loss=LossConfig(name="m2po", kl=0.0), checkpoint_every=0),
    eval=EvalConfig(problems=300),
    task=MathTask(digits=(2, 2), reversed_digits=True, train_problems=64),
)

GPU = EfficientConfig(
    steps=400,
    policies={"solver": PolicyConfig(batch_size=256, max_new_tokens=4)},
    data=DataConfig(max_staleness=4),
    rollout=RolloutConfig(capacity=256, max_running=256),
    trainer=TrainerConfig(lr=2e-5, micro_tokens=16384, loss=LossConfig(name="m2po", kl=0.0)),
    task=MathTask(train_problems=200),
    rollouts=20_000,
)

RECIPE: Recipe[EfficientConfig] = Recipe(
    name="math-efficient-data",
    summary="vanilla, dynamic sampling, replay and GRESO compared at equal rollouts",
    parts=SumsParts(),
    presets={"laptop": LAPTOP, "tiny": TINY, "gpu": GPU},
    default_preset="laptop",
    gpu_preset="gpu",
    workflow="solver_only",
    workflows=SOLVER_ONLY,
    suites=("solver",),
    headlines=(SOLVER,),
    view_metrics=("solver_correct",),
    comparison="astraflow.recipes.comparison:compare",
)
