"""Every prompt's sample is trained once, or dropped for a reason, whatever is killed or cut, however often.

`python -m tests.dataflow.chaos --help` runs one such run by hand. ASTRAFLOW_CHAOS_STRIKES and ASTRAFLOW_CHAOS_SEEDS
make the tests longer: 100 and 3 take about six minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STRIKES = int(os.environ.get("ASTRAFLOW_CHAOS_STRIKES", "25"))
SEEDS = int(os.environ.get("ASTRAFLOW_CHAOS_SEEDS", "1"))
PROMPTS = 500 if STRIKES >= 100 else 150
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("options", [(), ("--drops",), ("--cut",), ("--cut", "--drops")], ids=" ".join)
def test_exactly_once_whatever_dies(options: tuple[str, ...], seed: int) -> None:
    sizes = ["--seed", str(seed), "--strikes", str(STRIKES), "--prompts", str(PROMPTS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.dataflow.chaos", *sizes, *options], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    print(done.stdout)
    assert figures["faults"] == []
    assert figures["strikes"] >= STRIKES // 2, "the run was over too soon to show anything"
    samples = 3 * 2 * PROMPTS
    for policy in ("alpha", "beta"):
        dropped = sum(figures["dropped"][policy].values())
        assert figures["trained"][policy] + dropped == samples
        assert (dropped > 0) == ("--drops" in options)
