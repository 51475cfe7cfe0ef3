"""The `weightsync` command as a person and a script use it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog
import trustme
from safetensors.numpy import load_file

from astraflow.weightsync import DirectoryStore, Publisher, WeightSyncError, cli

Arrays = dict[str, np.ndarray[Any, Any]]
COMMAND = [sys.executable, "-m", "astraflow.weightsync"]


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The command says where its process logs; the tests after it log as before."""
    yield
    structlog.reset_defaults()


@pytest.fixture
def tensors() -> Arrays:
    return {"w": np.random.default_rng(0).normal(size=(500, 100)).astype(np.float32)}


def publish(directory: Path, tensors: Arrays, first: int, last: int) -> None:
    """Versions `first` to `last`, each with an incarnation of its own and another change; `tensors` are the last."""

    async def work() -> None:
        for version in range(first, last + 1):
            tensors["w"][::9] += 0.25
            publisher = Publisher(DirectoryStore(directory), stream="policy", incarnation=version)
            await publisher.publish(tensors, version)

    anyio.run(work)


@pytest.fixture
def source(tmp_path: Path, tensors: Arrays) -> Path:
    publish(tmp_path / "source", tensors, 0, 2)
    return tmp_path / "source"


class Program:
    """A running `weightsync`; killed at the end of the test."""

    def __init__(self, *args: str | Path, **environment: str) -> None:
        argv = [*COMMAND, *map(str, args)]
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **environment},
        )

    def line(self, seconds: float = 60) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, "it prints nothing"
        return self.process.stdout.readline().strip()

    def end(self, number: int) -> tuple[int, str]:
        """Send a signal; exit code and what came on stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def run(*args: str | Path, **environment: str) -> Program:
        programs.append(Program(*args, **environment))
        return programs[-1]

    yield run
    for program in programs:
        program.process.kill()
        program.process.communicate(timeout=30)


def test_help_names_every_command_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command([]) == cli.command(["--help"]) == 0
    told = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"weightsync {name} " in told
    assert "Exit codes: 0 done; 1 damage" in told
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.command([name, "--help"])
        assert ended.value.code == 0


def test_pull(source: Path, tensors: Arrays, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    goal = tmp_path / "weights"
    assert cli.command(["pull", str(source), str(goal)]) == 0
    assert "version 2 (incarnation 2): full, 200 kB of 200 kB" in capsys.readouterr().out
    assert cli.command(["pull", source.as_uri(), str(goal)]) == 0
    assert "holds version 2, the newest" in capsys.readouterr().out
    publish(source, tensors, 3, 3)
    assert cli.command(["pull", str(source), str(goal), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["kind"]) == (3, "delta")
    assert (load_file(goal / "current/model.safetensors")["w"] == tensors["w"]).all()


def test_inspect(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command(["inspect", str(source)]) == 0
    told = capsys.readouterr().out
    assert "stream 'policy', version 2 of incarnation 2, 1 tensors of 200 kB" in told
    assert "from an anchor" in told
    assert cli.command(["inspect", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"][0]["version"] == 2


def test_verify_names_the_first_damage(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.command(["verify", str(source)]) == 0
    assert "3 versions are whole" in capsys.readouterr().out
    anchor = source / "1/v/1/model.safetensors"
    data = bytearray(anchor.read_bytes())
    data[-1] ^= 1
    anchor.write_bytes(data)
    with pytest.raises(WeightSyncError, match=r"1/v/1/model\.safetensors: is damaged at 'w', bytes"):
        cli.command(["verify", str(source), "--json"])
    assert json.loads(capsys.readouterr().out)["damage"][0]["version"] == 1


def test_a_mirror_made_once_is_a_copy(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    assert cli.command(["mirror", str(source), str(copy), "--once"]) == 0
    assert "version 2 (incarnation 2)" in capsys.readouterr().out
    for path in source.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            assert (copy / path.relative_to(source)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["verfiy", "x"], 2, "there is no command 'verfiy'; did you mean verify?"),
        (["pull", "gopher://x", "out"], 2, "is no address of a store; known are"),
        (["serve", "SOURCE", "--listen", "8600"], 2, "'8600' is not HOST:PORT"),
        (["serve", "SOURCE", "--listen", "0.0.0.0:0"], 2, "0.0.0.0 is not a loopback address"),
        (["serve", "SOURCE", "--cert", "c.pem"], 2, "--cert and --key go together"),
        (["mirror", "SOURCE", "out", "--cut-through"], 2, "--cut-through needs --serve"),
        (["inspect", "/nowhere"], 3, "/nowhere is not a directory"),
        (["pull", "EMPTY", "out"], 3, "nothing has been published there"),
        (["inspect", "EMPTY"], 3, "nothing has been published there"),
        (["serve", "SOURCE", "--require-token-file", "/no/token"], 3, "/no/token: No such file or directory"),
        (["inspect", "DAMAGED"], 1, "HEAD does not have the digest it should"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    source: Path, tmp_path: Path, args: list[str], code: int, told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/HEAD").write_bytes(b"x" * 99)
    names = {
        "SOURCE": str(source), "EMPTY": str(tmp_path / "empty"), "DAMAGED": str(tmp_path / "damaged"),
        "out": str(tmp_path / "out"),
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["weightsync", *(names.get(arg, arg) for arg in args)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    shown = capsys.readouterr()
    assert ended.value.code == code
    assert shown.err.startswith("weightsync: ")
    assert told in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_serve_and_pull_over_tls_with_a_token(
    source: Path, tensors: Arrays, tmp_path: Path, start: Callable[..., Program], capsys: pytest.CaptureFixture[str]
) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    for name, blobs in {
        "ca.pem": [authority.cert_pem],
        "cert.pem": certificate.cert_chain_pems,
        "key.pem": [certificate.private_key_pem],
    }.items():
        (tmp_path / name).write_bytes(b"".join(blob.bytes() for blob in blobs))
    (tmp_path / "token").write_text("a-token-of-some-length\n")
    (tmp_path / "wrong").write_text("another-token-of-some-length")
    at = ["--listen", "localhost:0", "--cert", tmp_path / "cert.pem", "--key", tmp_path / "key.pem"]
    server = start("serve", source, *at, "--require-token-file", tmp_path / "token")
    url = server.line().split()[-1]
    assert url.startswith("https://localhost:")
    access = ["--ca-file", str(tmp_path / "ca.pem"), "--token-file"]
    assert cli.command(["pull", url, str(tmp_path / "out"), *access, str(tmp_path / "token")]) == 0
    assert cli.command(["verify", url, *access, str(tmp_path / "token")]) == 0
    with pytest.raises(PermissionError, match=f"{url}/HEAD"):
        cli.command(["inspect", url, *access, str(tmp_path / "wrong")])
    assert (load_file(tmp_path / "out/current/model.safetensors")["w"] == tensors["w"]).all()
    assert server.end(signal.SIGTERM) == (0, "")


def test_a_puller_that_follows_a_mirror_that_follows(
    source: Path, tensors: Arrays, tmp_path: Path, start: Callable[..., Program]
) -> None:
    served = start("serve", source, "--listen", "127.0.0.1:0")
    url = served.line().split()[-1]
    relay = start("mirror", url, tmp_path / "mirror", "--serve", "127.0.0.1:0", "--cut-through", "--interval", "0.05")
    mirrored = relay.line().split()[-1]
    puller = start("pull", mirrored, tmp_path / "out", "--follow", "--json")
    assert json.loads(puller.line())["version"] == 2
    publish(source, tensors, 3, 3)
    assert json.loads(puller.line())["version"] == 3
    assert (load_file(tmp_path / "out/current/model.safetensors")["w"] == tensors["w"]).all()
    assert puller.end(signal.SIGINT) == (0, "")
    assert relay.end(signal.SIGTERM) == (0, "")
    assert served.end(signal.SIGINT) == (0, "")


def test_an_interrupted_command_says_so_by_its_code(tmp_path: Path, start: Callable[..., Program]) -> None:
    """`mirror --once` of a store in which nothing was published waits."""
    (tmp_path / "empty").mkdir()
    program = start("mirror", tmp_path / "empty", tmp_path / "copy", "--once", "--json")
    told = json.loads(program.line())
    assert "HEAD" in told["fault"]
    code, _ = program.end(signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
