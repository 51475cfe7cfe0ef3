"""math-efficient-data: its variants, its figures, and a short comparison from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from astraflow.recipes.cli import parse_run
from astraflow.recipes.comparison import Comparison, Point, VariantRun, accuracy_at, check
from astraflow.recipes.comparison_report import plot, table
from astraflow.recipes.config import ConfigError, dataflow_config
from astraflow.recipes.math_efficient_data import RECIPE, VARIANTS, variant_config

TINY = RECIPE.presets["tiny"]


def test_every_variant_is_a_possible_configuration() -> None:
    for preset in RECIPE.presets.values():
        for name in VARIANTS:
            dataflow_config(variant_config(preset, name, 0), RECIPE.workflow)


def test_a_variant_changes_the_data_algorithms_and_nothing_else() -> None:
    vanilla, full = variant_config(TINY, "vanilla", 3), variant_config(TINY, "ds_replay_greso", 3)
    assert (vanilla.data.filters, vanilla.data.selectors, vanilla.data.replay.ratio) == ((), (), 0.0)
    assert (full.data.filters, full.data.selectors, full.data.replay.ratio) == (("zero_advantage",), ("greso",), 0.3)
    replace = msgspec.structs.replace
    assert replace(vanilla, data=TINY.data) == replace(full, data=TINY.data) == replace(TINY, seed=3)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--variants", "dss"], "no such variant"),
        (["--variants"], "--variants is empty"),
        (["--seeds", "0"], "must be above 0"),
        (["--split"], "runs in one process"),
    ],
)
def test_what_cannot_be_compared_is_refused(args: list[str], says: str) -> None:
    _, config = parse_run(RECIPE, ["--preset", "tiny", *args])
    with pytest.raises(ConfigError, match=says):
        check(msgspec.convert(msgspec.to_builtins(config), type(TINY)))


def test_accuracy_at_equal_rollouts_lies_between_the_evaluations_around() -> None:
    points = [Point(rollouts=r, version=0, accuracy=a) for r, a in ((0, 0.2), (110, 0.4), (90, 0.3))]
    assert accuracy_at(points, 100) == pytest.approx(0.35)
    assert accuracy_at(points, 45) == pytest.approx(0.25)
    assert accuracy_at(points, 200) == 0.4
    assert accuracy_at([], 100) == 0.0


def made_up(variant: str, seed: int) -> VariantRun:
    points = tuple(Point(rollouts=r, version=r // 10, accuracy=0.5 + r / 1000 + seed / 100) for r in (0, 50, 100))
    return VariantRun(
        variant=variant, seed=seed, generated=104, rejected=16, prompts_skipped=3, steps=8, trained=80, replayed=8,
        effective=0.5, accuracy_half=0.55, accuracy=0.6, seconds=1.0, points=points,
    )  # fmt: skip


def test_the_report_has_a_row_for_each_variant_and_a_picture() -> None:
    runs = tuple(made_up(name, seed) for seed in (0, 1) for name in VARIANTS)
    comparison = Comparison(recipe="math-efficient-data", rollouts=100, runs=runs)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(comparison))
    text = captured.get()
    assert all(variant.title in text for variant in VARIANTS.values())
    assert "mean (least – greatest) of 2 seeds" in text
    assert plot(comparison).startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_comparison_from_end_to_end(tmp_path: Path) -> None:
    args = ["--preset", "tiny", "--seeds", "1", "--rollouts", "320", "--evaluations", "2", "--eval.problems", "20"]
    args += ["--policies.solver.batch-size", "32", "--variants", "vanilla", "ds_replay_greso", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "astraflow.recipes", "math-efficient-data", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        env={**os.environ, "COLUMNS": "160"},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    (run,) = tmp_path.iterdir()
    assert "raw figures in" in done.stdout
    assert (run / "comparison.png").read_bytes().startswith(b"\x89PNG")
    vanilla, full = json.loads((run / "comparison.json").read_text())["runs"]
    for made in (vanilla, full):
        assert 320 <= made["generated"] < 320 + 2 * 64, "in flight when the budget was reached, at most"
        assert made["steps"] > 0
        assert len(made["points"]) >= 3
        assert made["points"][0]["rollouts"] == 0
    assert (vanilla["rejected"], vanilla["prompts_skipped"], vanilla["replayed"]) == (0, 0, 0)
    assert vanilla["effective"] < 1.0, "some groups of the vanilla run have equal rewards"
    assert full["rejected"] > 0
    assert full["replayed"] > 0
    assert full["effective"] == 1.0, "dynamic sampling leaves no sample without an advantage"
