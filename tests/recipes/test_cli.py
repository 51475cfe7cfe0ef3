from __future__ import annotations

import os
import subprocess
import sys
from bdb import BdbQuit
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from astraflow.dataflow import Message, PolicyStatus, Status, Trajectory, WorkerStatus
from astraflow.recipes import cli
from astraflow.recipes.cli import command, finish
from astraflow.recipes.config import ConfigError
from astraflow.recipes.driver import Abandoned
from astraflow.recipes.logs import show_failure
from astraflow.recipes.math_multi_agent import TINY
from astraflow.recipes.models import ModelError
from astraflow.recipes.registry import load_recipe
from astraflow.recipes.rundir import RunDirectory
from astraflow.recipes.summary import Summary
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
    assert f"{tmp_path} is not a run's directory: it has no config.toml" in done.stderr


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda"], "use --device cpu"),
        (["--policies.solver.model", "./no-model"], "no such directory"),
        (["--policies.solver.model", "package:huge"], "no packaged model 'huge'"),
    ],
)
@pytest.mark.parametrize("mode", ["--split", "--no-split"])
def test_what_no_service_could_load_is_refused_before_the_run_has_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str, mode: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        command(["math-multi-agent", "--preset", "tiny", "--out", str(tmp_path), mode, *options], Console())
    assert list(tmp_path.iterdir()) == []


def test_the_start_of_a_name_is_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean math-multi-agent"):
        command(["math-multi"], Console())


def test_the_configuration_of_another_recipe_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('recipe = "another"\nsteps = 3\n')
    with pytest.raises(ConfigError, match="is for the recipe another, not for math-multi-agent"):
        command(["math-multi-agent", "--config", str(file), "--dry-run"], Console())


def test_the_plain_line_has_no_rate_without_workers() -> None:
    assert plain(Status(phase="running", policies=(), workers=()), "loading models", 9, ()) == "[loading models]"


def test_what_the_person_did_is_shown_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ModelError("no model there"), Abandoned("interrupted twice")):
        show_failure(error, tmp_path / "run.log", debug=False)
        assert capsys.readouterr().err == f"recipes: {error}\n"
    show_failure(BdbQuit(), tmp_path / "run.log", debug=True)
    assert capsys.readouterr().err == "recipes: ended in the debugger\n"
    show_failure(RuntimeError("a fault"), tmp_path / "run.log", debug=False)
    assert f"traceback in {tmp_path / 'run.log'}" in capsys.readouterr().err


def test_a_run_without_evaluation_shows_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "execute", lambda *_: summary())
    run = RunDirectory.create(msgspec.structs.replace(TINY, out=str(tmp_path)), "r")
    console = Console(width=200, record=True)

    async def nothing() -> None: ...

    finish(load_recipe("math-multi-agent"), run, TINY, console, nothing)
    text = console.export_text()
    assert "held-out" not in text
    assert text.startswith("interrupted before its last step · versions: solver 1")


def summary() -> Summary:
    return Summary(
        recipe="r",
        seed=0,
        rows=(),
        versions={"solver": 1},
        stopped=True,
        train_s=1.0,
        total_s=2.0,
        wait_fraction={},
        staleness_mean={},
        dropped={},
        weights_full_mb=0.0,
        weights_delta_mb=0.0,
    )
