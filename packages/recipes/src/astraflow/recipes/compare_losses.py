"""compare-losses: every loss for the same steps from the same start, on the same problems; reward and divergence drawn.

One solver learns sums under each loss of `LOSSES` in turn. What differs between two runs is the trainer's loss alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from rich.console import Console
from rich.table import Table

from astraflow.trainer import LossConfig, TrainerConfig

from .comparing import leave, png, steps_of
from .config import ConfigError, DataConfig, EvalConfig, PolicyConfig, RolloutConfig
from .math_tasks import MathTask
from .recipe import Recipe
from .rundir import RunDirectory, RunWriter
from .sums import SOLVER, SOLVER_ONLY, SumsConfig, SumsParts

LOSSES: Mapping[str, LossConfig] = {
    "m2po": LossConfig(name="m2po"),
    "ppo": LossConfig(name="ppo"),
    "ppo_dual": LossConfig(name="ppo", dual_clip=3.0),
    "grpo": LossConfig(name="grpo"),
    "gspo": LossConfig(name="gspo", clip_low=3e-3, clip_high=4e-3),
    "sapo": LossConfig(name="sapo"),
    "cispo": LossConfig(name="cispo", clip_low=1.0, clip_high=1.0),
    "decoupled": LossConfig(name="ppo", proximal=True),
    "tis": LossConfig(name="ppo", proximal=True, correction="truncate"),
    "icepop": LossConfig(name="ppo", proximal=True, correction="mask", correction_high=5.0),
}
"""By the name they are compared under; all with the run's weight of the divergence."""

SMOOTH = 5
"""Steps over which a drawn curve is averaged."""


class LossesConfig(SumsConfig, frozen=True, kw_only=True):
    """The same solver under several losses."""

    losses: tuple[str, ...] = tuple(LOSSES)
    """What is compared."""


class LossRun(msgspec.Struct, frozen=True, kw_only=True):
    """One loss: of each step the mean reward of its batch, the divergence from the reference, the clipped share and
    the gradients' norm; held-out accuracy before and after."""

    loss: str
    reward: tuple[float, ...]
    kl: tuple[float, ...]
    clip_share: tuple[float, ...]
    grad_norm: tuple[float, ...]
    before: float
    after: float
    seconds: float


class LossComparison(msgspec.Struct, frozen=True, kw_only=True):
    """As written to comparison.json."""

    steps: int
    seed: int
    runs: tuple[LossRun, ...]


def loss_config(config: LossesConfig, name: str) -> LossesConfig:
    """The configuration of one run of the comparison.

    Raises:
        ConfigError: there is no such loss.
    """
    if name not in LOSSES:
        raise ConfigError(f"--losses {name}: there is no such loss; known: {', '.join(LOSSES)}")
    loss = msgspec.structs.replace(LOSSES[name], kl=config.trainer.loss.kl)
    return msgspec.structs.replace(config, trainer=msgspec.structs.replace(config.trainer, loss=loss))


async def compare(
    recipe: Recipe[LossesConfig], config: LossesConfig, run: RunDirectory, console: Console
) -> LossComparison:
    """Run all losses; print the table, write comparison.json and comparison.png.

    Raises:
        ConfigError: something that a comparison cannot do.
    """
    from .serve import prepare_torch
    from .services import resolve_device, resolve_models

    if config.split or config.debug or config.eval.problems < 1 or not config.losses:
        raise ConfigError("a comparison runs in one process, with --eval.problems above 0 and at least one of --losses")
    for name in config.losses:
        loss_config(config, name)
    await anyio.to_thread.run_sync(prepare_torch)
    device, models = resolve_device(config.device), await resolve_models(config)
    runs = []
    for name in config.losses:
        runs.append(await run_loss(recipe, loss_config(config, name), name, run, models, device))
        console.print(f"{name}: accuracy {runs[-1].after:.3f}, {runs[-1].seconds:.0f} s", highlight=False)
    comparison = LossComparison(steps=config.steps, seed=config.seed, runs=tuple(runs))
    await leave(comparison, table(comparison), partial(plot, comparison), run, console)
    return comparison


async def run_loss(
    recipe: Recipe[LossesConfig],
    config: LossesConfig,
    name: str,
    run: RunDirectory,
    models: dict[str, Path],
    device: str,
) -> LossRun:
    """One run with a directory of its own inside the comparison's."""
    from .inprocess import run_services
    from .summary import find

    directory = RunDirectory.create(msgspec.structs.replace(config, out=str(run.path), name=name), recipe.name)
    with RunWriter(directory).running() as writer:
        result = await run_services(recipe, config, directory, models, device, writer, Console(quiet=True))
    steps = steps_of(directory)

    def column(key: str) -> tuple[float, ...]:
        return tuple(float(step.get(key, 0.0)) for step in steps)

    def accuracy(evaluation: Any) -> float:
        metric = find(evaluation, "solver", "solver_correct") if evaluation is not None else None
        return metric.mean if metric is not None else 0.0

    return LossRun(
        loss=name,
        reward=column("reward_mean"),
        kl=column("kl"),
        clip_share=column("clip_share"),
        grad_norm=column("grad_norm"),
        before=accuracy(result.before),
        after=accuracy(result.after),
        seconds=result.total_s,
    )


def table(comparison: LossComparison) -> Table:
    """One row a loss; rewards are means over the first and the last `SMOOTH` steps."""
    made = Table(title=f"compare-losses: {comparison.steps} steps from the same start, seed {comparison.seed}")
    made.add_column("", no_wrap=True)
    for column in (
        "accuracy before",
        "after",
        "reward, first steps",
        "last steps",
        "KL at the end",
        "clipped",
        "|grad|",
    ):
        made.add_column(column, justify="right")
    for run in comparison.runs:
        values = (
            f"{run.before:.3f}",
            f"{run.after:.3f}",
            f"{statistics.fmean(run.reward[:SMOOTH]):.3f}",
            f"{statistics.fmean(run.reward[-SMOOTH:]):.3f}",
            f"{statistics.fmean(run.kl[-SMOOTH:]):.4f}",
            f"{statistics.fmean(run.clip_share):.4f}",
            f"{statistics.fmean(run.grad_norm):.2f}",
        )
        made.add_row(run.loss, *values)
    return made


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value and those before it, at most `SMOOTH` of them."""
    return [statistics.fmean(values[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(values))]


def plot(comparison: LossComparison) -> bytes:
    """A PNG: reward and divergence over steps, a curve a loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, run in enumerate(comparison.runs):
        style: dict[str, Any] = {"color": f"C{index % 10}", "ls": "-" if index < 6 else "--", "label": run.loss}
        left.plot(range(1, len(run.reward) + 1), smoothed(run.reward), **style)
        right.plot(range(1, len(run.kl) + 1), smoothed(run.kl), **style)
    left.set(xlabel="step", ylabel=f"mean reward of the batch (mean of {SMOOTH} steps)")
    right.set(xlabel="step", ylabel="KL to the reference, per token")
    left.legend(fontsize="small", ncols=2)
    return png(figure)


TINY = LossesConfig(
    steps=30,
    policies={"solver": PolicyConfig(model="package:tiny", batch_size=64, max_new_tokens=4)},
    data=DataConfig(max_staleness=4),
    rollout=RolloutConfig(max_context=96, max_running=64, capacity=64),
    trainer=TrainerConfig(lr=1e-4, minibatches=2, loss=LossConfig(kl=0.001), checkpoint_every=0),
    eval=EvalConfig(problems=200),
    task=MathTask(digits=(2, 2), reversed_digits=True),
)

LAPTOP = LossesConfig(
    steps=30,
    policies={"solver": PolicyConfig(batch_size=96, max_new_tokens=4)},
    trainer=TrainerConfig(lr=1e-5, loss=LossConfig(kl=0.001), checkpoint_every=0),
)

RECIPE: Recipe[LossesConfig] = Recipe(
    name="compare-losses",
    summary="every loss for the same steps from the same start; a plot of reward and KL",
    parts=SumsParts(),
    presets={"tiny": TINY, "laptop": LAPTOP},
    default_preset="tiny",
    gpu_preset="laptop",
    workflow="solver_only",
    workflows=SOLVER_ONLY,
    suites=("solver",),
    headlines=(SOLVER,),
    view_metrics=("solver_correct",),
    comparison="astraflow.recipes.compare_losses:compare",
)
