from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "weightsync.md"


def test_the_example_of_the_docs_runs_and_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert sum(1 for line in example.splitlines() if line.strip()) < 30
    script = tmp_path / "example.py"
    script.write_text(example.replace("/tmp/weights-demo", str(tmp_path / "demo")))
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "published 4:" in printed
    assert "serving 4: " in printed
