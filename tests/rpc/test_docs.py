"""The documentation's program is run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "rpc.md"


def test_the_typed_service_of_the_documentation_runs() -> None:
    program, expected = re.findall(r"```(?:python|text)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[:2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == (expected, "")
    assert len([line for line in program.splitlines() if line.strip()]) <= 26
