"""The kit passes for our backend, as anyone would run it, and fails for one that breaks the contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KIT = [sys.executable, "-m", "pytest", "--pyargs", "astraflow.trainer.conformance", "-q", "-p", "no:cacheprovider"]


def test_the_kit_passes_for_torch(tmp_path: Path) -> None:
    run = subprocess.run([*KIT, "--backend", "torch"], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout
    assert "19 passed" in run.stdout


BROKEN = """
from astraflow.trainer.torch_backend import TorchBackend
from astraflow.trainer import StepResult

class Broken(TorchBackend):
    def step(self, batch):
        result = super().step(batch)
        result.metrics["loss"] = float("nan")
        return StepResult(metrics=result.metrics)

    def weights(self):
        return {name: tensor + 0.01 for name, tensor in super().weights().items()}

    def load(self, directory):
        pass
"""


def test_the_kit_finds_what_is_broken(tmp_path: Path) -> None:
    """A backend that publishes other weights, resumes nothing and reports NaN."""
    (tmp_path / "broken_backend.py").write_text(BROKEN)
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[astraflow.trainers]\nbroken = broken_backend:Broken\n")
    run = subprocess.run(
        [*KIT, "--backend", "broken"], cwd=tmp_path, capture_output=True, text=True, timeout=110,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 1, run.stdout + run.stderr
    failed = {line.split("::")[1].split(" ")[0].split("[")[0] for line in run.stdout.splitlines() if "FAILED" in line}
    assert {
        "test_it_publishes_what_it_trained",
        "test_it_resumes_exactly",
        "test_it_reports_the_required_metrics",
    } <= failed
    assert "test_a_sample_without_a_reward_is_left_out" not in failed


@pytest.mark.parametrize("arguments", [[], ["--backend", "tourch"]])
def test_without_a_backend_it_says_what_it_needs(arguments: list[str], tmp_path: Path) -> None:
    run = subprocess.run([*KIT, "-rs", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert ("did you mean 'torch'" in run.stdout) if arguments else ("needs --backend NAME" in run.stdout)
