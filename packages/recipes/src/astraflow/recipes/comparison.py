"""Runs the variants of `math-efficient-data` one after another in this process, and says what became of the rollouts.

Invariant: every run of a comparison generates the same number of training samples (as nearly as whole groups allow) and
is evaluated after equal shares of them, on the same held-out problems.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from rich.console import Console

from astraflow.dataflow import Control, DataflowService, Evaluation, Status

from .comparing import leave, steps_of
from .comparison_report import plot, table
from .config import ConfigError
from .driver import Driver, RunResult
from .inprocess import run_services
from .math_efficient_data import EfficientConfig, variant_config
from .recipe import Recipe
from .rundir import RunDirectory, RunWriter
from .serve import prepare_torch
from .services import resolve_device, resolve_models
from .summary import find


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out accuracy after so many training rollouts, and the policy's version then."""

    rollouts: int
    version: int
    accuracy: float


class VariantRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one variant did on one seed. Counts are of samples (sequences) but for `prompts_skipped`.

    generated: training rollouts; rejected: of these, dropped by a filter; prompts_skipped: prompts that a selector kept
    from being rolled out; trained: samples in batches, `replayed` of them again; effective: the share of these with an
    advantage other than 0. accuracy and accuracy_half: after all and after half of the comparison's rollouts, between
    the evaluations around that.
    """

    variant: str
    seed: int
    generated: int
    rejected: int
    prompts_skipped: int
    steps: int
    trained: int
    replayed: int
    effective: float
    accuracy_half: float
    accuracy: float
    seconds: float
    points: tuple[Point, ...]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """As written to comparison.json."""

    recipe: str
    rollouts: int
    runs: tuple[VariantRun, ...]


class BudgetDriver(Driver):
    """Ends training after `budget` rollouts, and evaluates on the way: `evaluations` times in all but the first."""

    def __init__(
        self,
        dataflow: DataflowService,
        policies: Iterable[str],
        suites: Iterable[str],
        *,
        budget: int,
        evaluations: int,
    ) -> None:
        super().__init__(dataflow, policies, suites)
        self._budget = budget
        self._evaluations = evaluations
        self.points: list[tuple[int, Evaluation]] = []

    async def run(self, trainers_done: Any) -> RunResult:
        result = await super().run(trainers_done)
        for rollouts, evaluation in ((0, result.before), (self.generated(result.status), result.after)):
            if evaluation is not None:
                self.points.append((rollouts, evaluation))
        self.points.sort(key=lambda point: point[0])
        return result

    @staticmethod
    def generated(status: Status) -> int:
        """Training samples that came to an end, one way or another."""
        return sum(row.ended for row in status.lengths)

    async def _train(self) -> None:
        marks = [self._budget * (i + 1) // self._evaluations for i in range(self._evaluations)]
        while not self.stopping:
            status = await self._status()
            made = self.generated(status)
            if made >= self._budget or self._trained(status):
                break
            if made >= marks[0]:
                while made >= marks[0]:
                    del marks[0]
                evaluation = await self._evaluate(f"after {made} rollouts")
                if evaluation is not None:
                    self.points.append((made, evaluation))
                self.stage = "training"
            await self._pause()
        # No more rollouts begin, so that the last evaluation is at the budget.
        await self._dataflow.control(Control(phase="evaluating"))


async def compare(
    recipe: Recipe[EfficientConfig], config: EfficientConfig, run: RunDirectory, console: Console
) -> Comparison:
    """Run all variants on all seeds; print the table, write comparison.json and comparison.png.

    Raises:
        ConfigError: something that a comparison cannot do.
    """
    check(config)
    await anyio.to_thread.run_sync(prepare_torch)
    device = resolve_device(config.device)
    models = await resolve_models(config)
    runs = []
    for seed in range(config.seed, config.seed + config.seeds):
        for name in config.variants:
            made = await run_variant(recipe, variant_config(config, name, seed), name, run, models, device)
            runs.append(made)
            console.print(
                f"{name}, seed {seed}: accuracy {made.accuracy:.3f} after {made.generated} rollouts, "
                f"{made.steps} steps, {made.seconds:.0f} s",
                highlight=False,
            )
    comparison = Comparison(recipe=recipe.name, rollouts=config.rollouts, runs=tuple(runs))
    await leave(comparison, table(comparison), partial(plot, comparison), run, console)
    return comparison


def check(config: EfficientConfig) -> None:
    """Raises ConfigError for what a comparison cannot do."""
    if config.split or config.debug:
        raise ConfigError("a comparison runs in one process, one run after another: without --split and --debug")
    if config.eval.problems < 1 or config.seeds < 1 or config.evaluations < 1 or config.rollouts < 1:
        raise ConfigError("--eval.problems, --seeds, --evaluations and --rollouts must be above 0")
    if not config.variants:
        raise ConfigError("--variants is empty: name what is to be compared")
    for name in config.variants:
        variant_config(config, name, config.seed)


async def run_variant(
    recipe: Recipe[EfficientConfig],
    config: EfficientConfig,
    name: str,
    run: RunDirectory,
    models: dict[str, Path],
    device: str,
) -> VariantRun:
    """One run with a directory of its own inside the comparison's."""
    where = msgspec.structs.replace(config, out=str(run.path), name=f"{name}-{config.seed}")
    directory = RunDirectory.create(where, recipe.name)
    drivers: list[BudgetDriver] = []

    def driver(dataflow: DataflowService, policies: Iterable[str], suites: Iterable[str]) -> BudgetDriver:
        made = BudgetDriver(dataflow, policies, suites, budget=config.rollouts, evaluations=config.evaluations)
        drivers.append(made)
        return made

    with RunWriter(directory).running() as writer:
        result = await run_services(
            recipe, config, directory, models, device, writer, Console(quiet=True), make_driver=driver
        )
    return summarise(name, config, result, drivers[0].points, steps_of(directory))


def summarise(
    name: str,
    config: EfficientConfig,
    result: RunResult,
    evaluated: Sequence[tuple[int, Evaluation]],
    steps: Sequence[dict[str, Any]],
) -> VariantRun:
    (policy,) = result.status.policies
    points = tuple(
        Point(rollouts=rollouts, version=max(evaluation.suites[0].versions.values(), default=0), accuracy=metric.mean)
        for rollouts, evaluation in evaluated
        if (metric := find(evaluation, "solver", "solver_correct")) is not None
    )
    trained = sum(step["batch/samples"] for step in steps)
    effective = sum(step["batch/samples"] * step["batch/effective"] for step in steps)
    return VariantRun(
        variant=name,
        seed=config.seed,
        generated=BudgetDriver.generated(result.status),
        rejected=policy.dropped.get("zero_advantage", 0),
        prompts_skipped=int(result.status.data["selection"]["rejected"]),
        steps=len(steps),
        trained=int(trained),
        replayed=int(sum(step["batch/replayed"] for step in steps)),
        effective=effective / trained if trained else 0.0,
        accuracy_half=accuracy_at(points, config.rollouts // 2),
        accuracy=accuracy_at(points, config.rollouts),
        seconds=result.total_s,
        points=points,
    )


def accuracy_at(points: Sequence[Point], rollouts: int) -> float:
    """The accuracy after `rollouts`, on the straight line between the evaluations around it; the nearest one's outside
    of them. 0 without any."""
    ordered = sorted(points, key=lambda point: point.rollouts)
    for before, after in pairwise(ordered):
        if before.rollouts <= rollouts <= after.rollouts and after.rollouts > before.rollouts:
            share = (rollouts - before.rollouts) / (after.rollouts - before.rollouts)
            return before.accuracy + share * (after.accuracy - before.accuracy)
    return (ordered[0] if rollouts < ordered[0].rollouts else ordered[-1]).accuracy if ordered else 0.0
