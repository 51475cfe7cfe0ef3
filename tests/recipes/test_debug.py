"""--debug: a debugger stops in a workflow, a data algorithm and a loss; a failure shows its one cause and its place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

SCRIPT = """
import sys, types
import anyio, msgspec
from rich.console import Console
from astraflow.recipes import math_workflows
from astraflow.recipes.config import resolve
from astraflow.recipes.inprocess import run_in_process
from astraflow.recipes.math_multi_agent import RECIPE, TINY
from astraflow.recipes.rundir import RunDirectory

replace = msgspec.structs.replace
policies = {name: replace(policy, batch_size=16) for name, policy in TINY.policies.items()}
no_evaluation = replace(TINY.eval, problems=0)
config = resolve(replace(TINY, debug=True, steps=1, out=sys.argv[1], policies=policies, eval=no_evaluation))

async def workflow(task, policies):
    WORKFLOW
    return await math_workflows.solver_verifier(task, policies)

module = types.ModuleType("mine")
module.workflow = workflow
sys.modules["mine"] = module
recipe = replace(RECIPE, workflows={**RECIPE.workflows, "solver_verifier": "mine:workflow"})
SETUP

async def main():
    await run_in_process(recipe, config, RunDirectory.create(config, "debugged"), Console())

try:
    anyio.run(main, backend_options={"use_uvloop": True})
except* Exception as group:
    from astraflow.raas import first_cause
    error = first_cause(group)
    print("CAUSE", type(error).__name__, error, *error.__notes__, sep=" | ")
"""


def run(tmp_path: Path, workflow: str, setup: str, stdin: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("WORKFLOW", workflow).replace("SETUP", setup))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs")],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_exception_shows_one_cause_and_where_it_belongs(tmp_path: Path) -> None:
    output = run(tmp_path, "raise LookupError('no such tool')", "", "")
    (cause,) = [line for line in output.splitlines() if line.startswith("CAUSE")]
    assert "LookupError | no such tool" in cause
    assert "task 'basic_arithmetic/train/0'" in cause
    assert "sample 0" in cause


def test_breakpoints_stop_in_a_workflow_a_filter_and_a_loss(tmp_path: Path) -> None:
    setup = """
from astraflow.dataflow import service
from astraflow.trainer.losses import clipped

def once(module, name):
    original = getattr(module, name)
    def stopped(*args, **kwargs):
        if not seen:
            seen.append(name)
            breakpoint()
        return original(*args, **kwargs)
    seen = []
    setattr(module, name, stopped)

once(service, "policy_group")
once(clipped, "clipped_surrogate")
"""
    workflow = "if not hasattr(module, 'seen'): module.seen = True; breakpoint()"
    output = run(tmp_path, workflow, setup, "p task.n_samples\nc\np name\nc\np name\nc\n")
    workflow_at, filter_at, loss_at = (
        output.find(said) for said in ("(Pdb) 8", "(Pdb) 'policy_group'", "(Pdb) 'clipped_surrogate'")
    )
    assert -1 < workflow_at < filter_at < loss_at, output
