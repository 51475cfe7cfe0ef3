"""The wheel by itself, in an environment with nothing else of ours and without torch, runs the example of the page."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*argv: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(arg) for arg in argv], cwd=cwd, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv builds and installs the wheel")
def test_the_wheel_alone_runs_the_example(tmp_path: Path) -> None:
    run("uv", "build", "--quiet", "--wheel", "--package", "astraflow-weightsync", "--out-dir", tmp_path, cwd=ROOT)
    [wheel] = tmp_path.glob("*.whl")
    python = tmp_path / "env" / "bin" / "python"
    run("uv", "venv", "--quiet", tmp_path / "env", cwd=tmp_path)
    run("uv", "pip", "install", "--quiet", "--python", python, wheel, cwd=tmp_path)
    installed = run("uv", "pip", "list", "--format=freeze", "--python", python, cwd=tmp_path)
    names = {line.partition("==")[0] for line in installed.split()}
    assert {name for name in names if name.startswith("astraflow")} == {"astraflow-weightsync"}
    assert not {"torch", "rich", "tyro", "granian"} & names

    page = (ROOT / "docs" / "weightsync.md").read_text("utf-8")
    (tmp_path / "example.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    assert "serving 4: " in run(python, "example.py", cwd=tmp_path)
    told = subprocess.run(
        [python.with_name("weightsync"), "inspect", "weights"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stdout) == (1, "")
    assert re.fullmatch(r"weightsync: the command needs \w+: pip install 'astraflow-weightsync\[cli\]'\n", told.stderr)

    run("uv", "pip", "install", "--quiet", "--python", python, f"{wheel}[cli]", cwd=tmp_path)
    assert "stream 'policy', version 4" in run(python.with_name("weightsync"), "inspect", "weights", cwd=tmp_path)
    assert "5 versions are whole" in run(python.with_name("weightsync"), "verify", "weights", cwd=tmp_path)
