"""What a run showed: the same figures before and after training, with intervals, as a table, JSON and Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from rich.table import Table

from astraflow.dataflow import Evaluation, MetricSummary

from .driver import RunResult
from .lag import LoopLag
from .recipe import Headline

Z95 = 1.959963984540054


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure before and after training. `low`, `high`: the 95 % interval of the difference."""

    title: str
    before: MetricSummary | None
    after: MetricSummary | None
    gain: float | None = None
    low: float | None = None
    high: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run's figures, as written to summary.json."""

    recipe: str
    seed: int
    rows: tuple[Row, ...]
    versions: dict[str, int]
    stopped: bool
    train_s: float
    total_s: float
    wait_fraction: dict[str, float]
    staleness_mean: dict[str, float]
    dropped: dict[str, dict[str, int]]
    weights_full_mb: float
    weights_delta_mb: float
    loop_lag: LoopLag | None = None


def difference_interval(before: MetricSummary, after: MetricSummary) -> tuple[float, float]:
    """The 95 % interval of after - before from the two single intervals (Newcombe 1998, method 10, where these are
    Wilson's): the samples are taken as independent, which is wider than a paired interval."""
    gain = after.mean - before.mean
    low = gain - math.hypot(after.mean - after.low, before.high - before.mean)
    high = gain + math.hypot(after.high - after.mean, before.mean - before.low)
    return low, high


def find(evaluation: Evaluation | None, suite: str, metric: str) -> MetricSummary | None:
    for report in evaluation.suites if evaluation else ():
        if report.suite == suite:
            return report.metrics.get(metric)
    return None


def rows(headlines: Iterable[Headline], before: Evaluation | None, after: Evaluation | None) -> list[Row]:
    made = []
    for line in headlines:
        a, b = find(before, line.suite, line.metric), find(after, line.suite, line.metric)
        if a is None and b is None:
            continue
        if a is None or b is None:
            made.append(Row(title=line.title, before=a, after=b))
            continue
        low, high = difference_interval(a, b)
        made.append(Row(title=line.title, before=a, after=b, gain=b.mean - a.mean, low=low, high=high))
    return made


def summarise(recipe: str, seed: int, headlines: Iterable[Headline], result: RunResult, lag: LoopLag | None) -> Summary:
    policies, workers = result.status.policies, result.status.workers
    return Summary(
        recipe=recipe,
        seed=seed,
        rows=tuple(rows(headlines, result.before, result.after)),
        versions={p.model_id: p.version for p in policies},
        stopped=result.stopped,
        train_s=result.train_s,
        total_s=result.total_s,
        wait_fraction={p.model_id: p.wait_fraction for p in policies},
        staleness_mean={p.model_id: p.staleness_mean for p in policies},
        dropped={p.model_id: p.dropped for p in policies},
        weights_full_mb=sum(w.pulled_full_bytes for w in workers) / 1e6,
        weights_delta_mb=sum(w.pulled_delta_bytes for w in workers) / 1e6,
        loop_lag=lag,
    )


def show(metric: MetricSummary | None) -> str:
    return "–" if metric is None else f"{metric.mean:.3f} [{metric.low:.3f}, {metric.high:.3f}] n={metric.n}"


def table(summary: Summary) -> Table:
    """The summary as people see it at the end of a run."""
    made = Table(title=f"{summary.recipe}, seed {summary.seed}: held-out accuracy, 95 % intervals")
    for name in ("", "before", "after", "difference"):
        made.add_column(name)
    for row in summary.rows:
        gain = "–" if row.gain is None else f"{row.gain:+.3f} [{row.low:+.3f}, {row.high:+.3f}]"
        made.add_row(row.title, show(row.before), show(row.after), gain)
    return made


def footer(summary: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    waits = ", ".join(f"{name} {share:.0%}" for name, share in summary.wait_fraction.items())
    text = "interrupted before its last step · " if summary.stopped else ""
    text += (
        f"versions: {versions} · waiting for data: {waits}"
        f" · training {summary.train_s:.0f} s of {summary.total_s:.0f} s"
        f"\nweights pulled: {summary.weights_full_mb:.0f} MB full, {summary.weights_delta_mb:.1f} MB delta"
    )
    if summary.loop_lag is not None:
        lag = summary.loop_lag
        text += f" · event loop late: p99 {lag.p99_ms:.1f} ms, max {lag.max_ms:.0f} ms"
    return text
