"""compare-losses: what is compared, its table and picture, and a short comparison from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from astraflow.recipes.compare_losses import LOSSES, RECIPE, LossComparison, LossRun, loss_config, plot, smoothed, table
from astraflow.recipes.config import ConfigError, check


@pytest.mark.parametrize("preset", RECIPE.presets.values(), ids=RECIPE.presets)
def test_every_loss_is_a_possible_configuration_that_differs_in_the_loss_alone(preset: object) -> None:
    base = RECIPE.presets["tiny"]
    for name in LOSSES:
        made = loss_config(base, name)
        check(made)
        trainer = msgspec.structs.replace(made.trainer, loss=base.trainer.loss)
        assert msgspec.structs.replace(made, trainer=trainer) == base
        assert made.trainer.loss.kl == base.trainer.loss.kl
    with pytest.raises(ConfigError, match="no such loss; known: m2po"):
        loss_config(base, "m3po")


def test_the_report_has_a_row_for_each_loss_and_a_picture() -> None:
    ramp = tuple(i / 30 for i in range(30))
    runs = tuple(
        LossRun(loss=name, reward=ramp, kl=ramp, clip_share=ramp, grad_norm=ramp, before=0.5, after=0.75, seconds=1.0)
        for name in LOSSES
    )
    comparison = LossComparison(steps=30, seed=0, runs=runs)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(comparison))
    assert all(name in captured.get() for name in LOSSES)
    assert "0.750" in captured.get()
    assert plot(comparison).startswith(b"\x89PNG")
    assert smoothed([1.0, 3.0, 5.0]) == [1.0, 2.0, 3.0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_losses_from_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "astraflow.recipes", "compare-losses", "--preset", "tiny", "--steps", "2"]
    options = ["--losses", "ppo", "icepop", "--eval.problems", "20", "--out", str(tmp_path), "--name", "losses"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "losses" / "comparison.json").read_text("utf-8"))
    assert [run["loss"] for run in raw["runs"]] == ["ppo", "icepop"]
    assert all(len(run["reward"]) == 2 for run in raw["runs"])
    assert len({run["before"] for run in raw["runs"]}) == 1  # the same start
    assert (tmp_path / "losses" / "comparison.png").read_bytes().startswith(b"\x89PNG")
