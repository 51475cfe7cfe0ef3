"""The code of docs/weightsync.md runs as it is written, in the order in which it is read."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

PAGE = (Path(__file__).parents[2] / "docs" / "weightsync.md").read_text("utf-8")
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", PAGE, re.DOTALL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Shell:
    """Runs lines of the page; a line that ends with & goes on until the end, once it has said that it serves."""

    def __init__(self) -> None:
        self._ports = {str(port): str(free_port()) for port in range(8600, 8603)}
        self._running: list[subprocess.Popen[str]] = []
        here = str(Path(sys.executable).parent)
        self._environment = {**os.environ, "PATH": f"{here}{os.pathsep}{os.environ['PATH']}"}

    def run(self, line: str) -> None:
        line = re.sub(r"\b860\d\b", lambda found: self._ports[found[0]], line.partition("  #")[0])
        if not line.endswith("&"):
            done = subprocess.run(
                line, shell=True, env=self._environment, timeout=60, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}: {done.stderr}"
            return
        program = subprocess.Popen(shlex.split(line[:-1]), env=self._environment, stdout=subprocess.PIPE, text=True)
        self._running.append(program)
        assert program.stdout is not None
        assert "serving" in program.stdout.readline(), line

    def close(self) -> None:
        for program in self._running:
            program.kill()
            program.communicate(timeout=30)


@pytest.fixture
def shell() -> Iterator[Shell]:
    started = Shell()
    yield started
    started.close()


def test_the_example_is_short() -> None:
    kind, example = BLOCKS[0]
    assert kind == "python"
    assert sum(1 for line in example.splitlines() if line.strip()) < 30


def run_python(code: str, script: Path) -> None:
    script.write_text(code)
    runpy.run_path(str(script))


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, code in BLOCKS:
        if kind == "python":
            run_python(code, tmp_path / "block.py")
    printed = capsys.readouterr().out
    for told in ("published 4: ", "serving 4: ", "MirrorStatus(version=4"):
        assert told in printed


@pytest.mark.slow
def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    monkeypatch.chdir(tmp_path)
    run_python(BLOCKS[0][1], tmp_path / "example.py")
    for kind, code in BLOCKS:
        if kind == "bash":
            for line in code.splitlines():
                shell.run(line)
    for place in ("server", "server-behind", "server-far"):
        assert load_file(tmp_path / place / "current" / "model.safetensors")["w"].shape == (1000, 100)
