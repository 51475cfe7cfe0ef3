from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from astraflow.dataflow import Message, PolicyStatus, Status, Trajectory, WorkerStatus
from astraflow.recipes.cli import command
from astraflow.recipes.config import ConfigError
from astraflow.recipes.view import plain, screen


def recipes(*args: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "astraflow.recipes", *args], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_list_names_the_recipe_and_its_presets() -> None:
    done = recipes("list")
    assert done.returncode == 0
    assert "math-multi-agent" in done.stdout
    assert "laptop, tiny, gpu" in done.stdout


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean math-multi-agent"):
        command(["math-multi-agnet"], Console())
    done = recipes("math-multi-agnet")
    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean math-multi-agent?" in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_resolved_configuration() -> None:
    done = recipes("math-multi-agent", "--preset", "tiny", "--trainer.lr", "0.125", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "lr = 0.125" in done.stdout
    assert 'recipe = "math-multi-agent"' in done.stdout


def test_help_shows_nested_options() -> None:
    done = recipes("math-multi-agent", "--help")
    assert done.returncode == 0
    for option in ("--trainer.lr", "--preset", "--policies.solver.model", "--split", "--synchronous", "--debug"):
        assert option in done.stdout


def test_print_commands_prints_one_line_a_service(tmp_path: Path) -> None:
    done = recipes("math-multi-agent", "--preset", "tiny", "--out", str(tmp_path), "--print-commands")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["serve"] * 4 + ["drive"]
    assert (next(tmp_path.iterdir()) / "config.toml").exists()


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    done = recipes("serve", "dataflow", "--run", str(tmp_path))
    assert done.returncode == 2
    assert "config.toml" in done.stderr


def test_a_command_line_error_is_found_before_torch_is_loaded() -> None:
    code = "import sys; import astraflow.recipes.cli as c; c.parse_run(c.load_recipe('math-multi-agent'), []);"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False, env=os.environ).returncode == 0


STATUS = Status(
    phase="running",
    policies=(PolicyStatus(model_id="solver", version=3, steps=9, reward_mean=0.5, wait_fraction=0.25),),
    workers=(
        WorkerStatus(
            worker_id="worker-0",
            pool="local",
            capacity=8,
            alive=False,
            running=2,
            tokens_per_s=120.0,
            versions={"solver": 3},
            silent_s=4.0,
        ),
    ),
    metrics={"solver_correct": 0.75},
    example=Trajectory(messages=(Message("user", "1 + 1 ="), Message("assistant", "2", name="solver"))),
)


def test_the_screen_shows_policies_pool_and_an_exchange() -> None:
    console = Console(width=140, record=True)
    console.print(screen(STATUS, "training", 9, ("solver_correct",)))
    text = console.export_text()
    for shown in ("solver", "3/9", "0.50", "25%", "worker-0 (silent 4 s)", "120", "solver_correct 0.75", "solver: 2"):
        assert shown in text


def test_the_plain_line_holds_the_same_figures() -> None:
    line = plain(STATUS, "training", 9, ("solver_correct",))
    assert "solver v3/9 reward 0.50 wait 25%" in line
    assert "solver_correct 0.75" in line
