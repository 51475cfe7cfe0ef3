"""A comparison as people see it: a table, and a picture of accuracy over rollouts and of where the rollouts went.

Pure functions of the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from .comparing import png
from .math_efficient_data import VARIANTS

if TYPE_CHECKING:
    from .comparison import Comparison, VariantRun


def by_variant(comparison: Comparison) -> dict[str, list[VariantRun]]:
    made: dict[str, list[VariantRun]] = {}
    for run in comparison.runs:
        made.setdefault(run.variant, []).append(run)
    return made


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The mean and, where they differ, the least and the greatest."""
    mean, least, greatest = (f"{value:.{digits}f}" for value in (statistics.fmean(values), min(values), max(values)))
    return mean if least == greatest else f"{mean} ({least} – {greatest})"


COLUMNS: tuple[tuple[str, Callable[[VariantRun], float], int], ...] = (
    ("rollouts", lambda run: run.generated, 0),
    ("prompts skipped before", lambda run: run.prompts_skipped, 0),
    ("rejected after", lambda run: run.rejected, 0),
    ("steps", lambda run: run.steps, 0),
    ("samples trained", lambda run: run.trained, 0),
    ("of these replayed", lambda run: run.replayed, 0),
    ("effective share", lambda run: run.effective, 2),
    ("effective per rollout", lambda run: run.trained * run.effective / max(run.generated, 1), 2),
    ("accuracy halfway", lambda run: run.accuracy_half, 3),
    ("accuracy", lambda run: run.accuracy, 3),
)


def table(comparison: Comparison) -> Table:
    """One row a variant: means over the seeds, and the range."""
    seeds = len({run.seed for run in comparison.runs})
    title = f"{comparison.recipe}: after {comparison.rollouts} rollouts; mean (least – greatest) of {seeds} seeds"
    made = Table(title=title)
    made.add_column("", no_wrap=True)
    for column, _, _ in COLUMNS:
        made.add_column(column, justify="right", min_width=max(map(len, column.split())))
    for name, runs in by_variant(comparison).items():
        made.add_row(VARIANTS[name].title, *(spread([value(r) for r in runs], digits) for _, value, digits in COLUMNS))
    return made


def plot(comparison: Comparison) -> bytes:
    """A PNG: accuracy over rollouts (thin: a seed, thick: their mean), and samples per variant by what became of
    them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    variants = by_variant(comparison)
    for index, (name, runs) in enumerate(variants.items()):
        _curves(left, runs, VARIANTS[name].title, f"C{index}")
    left.set(xlabel="training rollouts", ylabel="held-out accuracy", xlim=(0, None))
    left.axvline(comparison.rollouts, color="0.8", zorder=0)
    left.legend(fontsize="small")
    _bars(right, variants)
    return png(figure)


def _curves(axes: Any, runs: Sequence[VariantRun], title: str, color: str) -> None:
    for run in runs:
        axes.plot([p.rollouts for p in run.points], [p.accuracy for p in run.points], color=color, alpha=0.3, lw=0.8)
    # Runs are evaluated at nearly the same points: the n-th of each seed.
    columns = list(zip(*(run.points for run in runs), strict=False))
    means = [(statistics.fmean(p.rollouts for p in c), statistics.fmean(p.accuracy for p in c)) for c in columns]
    axes.plot(*zip(*means, strict=True), color=color, marker="o", ms=3, label=title)


def _bars(axes: Any, variants: dict[str, list[VariantRun]]) -> None:
    parts: tuple[tuple[str, Callable[[VariantRun], float]], ...] = (
        ("generated", lambda run: run.generated),
        ("rejected", lambda run: run.rejected),
        ("trained", lambda run: run.trained),
        ("trained with an advantage", lambda run: run.trained * run.effective),
    )
    width = 0.8 / len(parts)
    for index, (label, value) in enumerate(parts):
        heights = [statistics.fmean(value(run) for run in runs) for runs in variants.values()]
        places = [at + (index - (len(parts) - 1) / 2) * width for at in range(len(variants))]
        axes.bar(places, heights, width, label=label)
    titles = [VARIANTS[name].title.replace(" + ", "\n+ ") for name in variants]
    axes.set_xticks(range(len(variants)), titles, fontsize="small")
    axes.set_ylabel("samples, mean over seeds")
    axes.margins(y=0.25)
    axes.legend(fontsize="small")
