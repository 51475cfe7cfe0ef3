"""Trainers that live outside the workspace pass the conformance kit and train one policy of a run beside torch."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINERS = {
    name: directory
    for directory in sorted((ROOT / "examples").iterdir())
    for name in tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"].get(
        "astraflow.trainers", {}
    )
}
LEARNING_RATE = {"minimal": "1.0"}
"""Where another than the kit's is wanted: plain SGD."""


def run(directory: Path, *command: str) -> str:
    done = subprocess.run(
        ["uv", "run", "--with", str(directory), *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_from_outside_passes_the_kit(name: str) -> None:
    kit = ["pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "astraflow.trainer.conformance", "--backend", name]
    lr = LEARNING_RATE.get(name)
    out = run(TRAINERS[name], *kit, *(["--backend-lr", lr] if lr else []))
    assert "19 passed" in out


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize("name", TRAINERS)
def test_it_trains_a_policy_beside_torch(name: str, tmp_path: Path) -> None:
    options = ["--steps", "2", "--eval.problems", "0", "--out", str(tmp_path), "--name", "mixed"]
    run(
        TRAINERS[name], "recipes", "math-multi-agent", "--preset", "tiny", "--policies.verifier.backend", name, *options
    )
    lines = (tmp_path / "mixed" / "metrics.jsonl").read_text("utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    versions = {event["model_id"]: event["version"] for event in events if "version" in event and "batch_id" in event}
    assert versions == {"solver": 2, "verifier": 2}


def test_nothing_of_ours_names_a_trainer_from_outside() -> None:
    """They are found by their entry points alone."""
    for path in ROOT.glob("packages/**/*.py"):
        text = path.read_text("utf-8")
        assert "trainer_jax" not in text and "trainer_minimal" not in text, path  # noqa: PT018
