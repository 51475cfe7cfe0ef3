"""The job on one GPU that engines and trainers share. Skipped where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]


@pytest.mark.parametrize("mode", [(), ("--split",)], ids=["one process", "split"])
def test_engines_and_trainers_share_a_gpu(tmp_path: Path, mode: tuple[str, ...]) -> None:
    arguments = [
        "--preset",
        "tiny",
        "--steps",
        "4",
        "--eval.problems",
        "40",
        "--device",
        "cuda",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "astraflow.recipes", "math-multi-agent", *arguments, *mode],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "summary.json").read_text())["versions"] == {"solver": 4, "verifier": 4}
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mismatch = [step["mismatch_mean"] for step in steps if "mismatch_mean" in step]
    assert mismatch
    assert max(mismatch) < 0.1
