from __future__ import annotations

import pytest

from astraflow.dataflow import Evaluation, MetricSummary, SuiteReport
from astraflow.recipes.recipe import Headline
from astraflow.recipes.summary import difference_interval, rows


def metric(mean: float, low: float, high: float) -> MetricSummary:
    return MetricSummary(mean=mean, low=low, high=high, n=300)


def test_difference_interval_is_newcombes() -> None:
    # Newcombe (1998), Table II, example (a): 56/70 against 48/80, difference .2000, interval .0524 to .3339.
    low, high = difference_interval(metric(48 / 80, 0.4904, 0.7004), metric(56 / 70, 0.6918, 0.8769))
    assert low == pytest.approx(0.0524, abs=2e-3)
    assert high == pytest.approx(0.3339, abs=2e-3)


def test_rows_keep_what_one_side_lacks() -> None:
    report = SuiteReport(
        suite="solver", done=3, total=3, missing=0, metrics={"correct": metric(0.5, 0.4, 0.6)}, versions={}
    )
    before = Evaluation(label="before", finished=True, suites=(report,))
    lines = [Headline(title="t", suite="solver", metric="correct"), Headline(title="u", suite="no", metric="x")]
    made = rows(lines, before, None)
    assert [r.title for r in made] == ["t"]
    assert made[0].before is not None
    assert made[0].gain is None
