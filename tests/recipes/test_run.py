"""The whole job on the tiny model, as a person runs it: in one process, split, killed in the middle, by hand."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = ["--preset", "tiny", "--steps", "6", "--eval.problems", "40"]
KILLED = ["--preset", "tiny", "--steps", "6", "--eval.problems", "8", "--trainer.checkpoint-every", "2", "--split"]


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "astraflow.recipes", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "160"},
    )


def finish(process: subprocess.Popen[str], timeout: float = 200) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, output
    return output


def run_directory(out: Path) -> Path:
    (made,) = out.iterdir()
    return made


def summary(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_directory(out) / "summary.json").read_text())
    return loaded


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps_done(out: Path, *model_ids: str) -> int:
    """Training steps so far, of these policies or of all."""
    files = list(out.glob("*/metrics.jsonl"))
    steps = [r for r in lines(files[0]) if r["kind"] == "step"] if files else []
    return sum(1 for r in steps if not model_ids or r["model_id"] in model_ids)


def wait_for_steps(out: Path, n: int, process: subprocess.Popen[str], *model_ids: str, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while steps_done(out, *model_ids) < n:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "no training steps"
        time.sleep(0.2)


def child(process: subprocess.Popen[str], service: str) -> int:
    """Pid of a supervised service of a run."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == process.pid and service in arguments:
            return int(entry.name)
    raise AssertionError(f"no child {service}")


def check_run(out: Path, steps: int) -> None:
    """What every finished run leaves behind."""
    run = run_directory(out)
    result = summary(out)
    assert result["versions"] == {"solver": steps, "verifier": steps}
    trained = lines(run / "trajectories.jsonl")
    assert any(t["purpose"] == "train" and t["sequences"] for t in trained)
    for model_id in ("solver", "verifier"):
        mine = [r for r in lines(run / "metrics.jsonl") if r["kind"] == "step" and r["model_id"] == model_id]
        assert {r["version"] for r in mine} == set(range(1, steps + 1))
        assert (run / "policies" / model_id / "config.json").exists()


def test_in_one_process(tmp_path: Path) -> None:
    finish(start("math-multi-agent", *SHORT, "--out", str(tmp_path)))
    check_run(tmp_path, 6)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(run_directory(tmp_path) / "policies" / "solver")


def test_split_survives_a_kill_of_raas_and_of_a_trainer(tmp_path: Path) -> None:
    process = start(
        "math-multi-agent",
        *SHORT,
        "--steps",
        "12",
        "--trainer.checkpoint-every",
        "3",
        "--split",
        "--out",
        str(tmp_path),
    )
    wait_for_steps(tmp_path, 4, process)
    os.kill(child(process, "raas"), signal.SIGKILL)
    os.kill(child(process, "solver"), signal.SIGKILL)
    output = finish(process)
    assert output.count("service died, starting it again") == 2
    check_run(tmp_path, 12)


def test_split_survives_a_kill_of_the_dataflow(tmp_path: Path) -> None:
    """Its next process goes on from the journal: every step is made, of batches that have no sample in common."""
    process = start("math-multi-agent", *KILLED, "--out", str(tmp_path))
    wait_for_steps(tmp_path, 4, process)
    os.kill(child(process, "dataflow"), signal.SIGKILL)
    output = finish(process)
    assert output.count("service died, starting it again") == 1
    check_run(tmp_path, 6)
    check_lineage(tmp_path, 6)


def test_a_run_that_was_killed_is_resumed(tmp_path: Path) -> None:
    """Everything dies at once; another command goes on from checkpoints and journal."""
    process = start("math-multi-agent", *KILLED, "--out", str(tmp_path))
    wait_for_steps(tmp_path, 6, process)
    killed = [child(process, service) for service in ("dataflow", "raas", "solver", "verifier")]
    for pid in (process.pid, *killed):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    run = str(run_directory(tmp_path))
    overview = finish(start("inspect", run))
    assert "policy solver" in overview
    output = finish(start("resume", run))
    assert f"going on in {run}" in output.replace("\n", "")
    check_run(tmp_path, 6)
    check_lineage(tmp_path, 6)


def check_lineage(out: Path, steps: int) -> None:
    """In the journal: the batches that made the final versions, one each, and no sample trained twice."""
    with sqlite3.connect(f"file:{run_directory(out)}/journal.sqlite?mode=ro", uri=True) as journal:
        for model_id in ("solver", "verifier"):
            (checkpoint,) = sorted((run_directory(out) / "checkpoints" / model_id).glob("version-*"))[-1:]
            consumed = json.loads((checkpoint / "checkpoint.json").read_text())["consumed"]
            rows = journal.execute(
                "SELECT batch_id, samples FROM batches WHERE model_id = ? ORDER BY version", (model_id,)
            )
            batches = rows.fetchall()
            assert [batch_id for batch_id, _ in batches] == consumed
            assert len(consumed) == steps
            query = "SELECT count(*) FROM sequences WHERE model_id = ? AND outcome = 'trained'"
            (trained,) = journal.execute(query, (model_id,)).fetchone()
            assert trained == sum(samples for _, samples in batches)


def test_a_stalled_trainer_does_not_hold_the_other_back(tmp_path: Path) -> None:
    process = start("math-multi-agent", *SHORT, "--steps", "8", "--split", "--out", str(tmp_path))
    wait_for_steps(tmp_path, 1, process, "solver")
    solver = child(process, "solver")
    os.kill(solver, signal.SIGSTOP)
    try:
        stalled_at = steps_done(tmp_path, "solver")
        wait_for_steps(tmp_path, 8, process, "verifier")
        assert steps_done(tmp_path, "solver") <= stalled_at + 1 < 8
    finally:
        os.kill(solver, signal.SIGCONT)
    finish(process)
    check_run(tmp_path, 8)


def test_ctrl_c_saves_what_was_learned(tmp_path: Path) -> None:
    process = start("math-multi-agent", *SHORT, "--steps", "500", "--out", str(tmp_path))
    wait_for_steps(tmp_path, 4, process)
    process.send_signal(signal.SIGINT)
    finish(process, timeout=60)
    result = summary(tmp_path)
    assert result["stopped"]
    assert 0 < result["versions"]["solver"] < 500
    assert (run_directory(tmp_path) / "policies" / "solver" / "config.json").exists()


def test_by_hand_from_the_printed_commands(tmp_path: Path) -> None:
    printed = finish(start("math-multi-agent", *SHORT, "--steps", "2", "--out", str(tmp_path), "--print-commands"))
    processes = [start(*line.split()[1:]) for line in printed.splitlines()]
    try:
        finish(processes[-1])
        for process in processes[1:-1]:
            finish(process, timeout=60)
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)
    check_run(tmp_path, 2)


def weights_digest(out: Path) -> dict[str, bytes]:
    return {p.parent.name: p.read_bytes() for p in run_directory(out).glob("policies/*/model.safetensors")}


def test_debug_runs_are_bit_identical(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        args = [*SHORT, "--steps", "2", "--eval.problems", "0", "--debug", "--out", str(tmp_path / name)]
        args += ["--policies.solver.batch-size", "16", "--policies.verifier.batch-size", "16"]
        finish(start("math-multi-agent", *args))
        made.append(weights_digest(tmp_path / name))
    assert len(made[0]) == 2
    assert made[0] == made[1]


def test_synchronous_trains_only_on_tokens_of_the_current_version(tmp_path: Path) -> None:
    finish(start("math-multi-agent", *SHORT, "--steps", "3", "--synchronous", "--out", str(tmp_path)))
    check_run(tmp_path, 3)
    steps = [r for r in lines(run_directory(tmp_path) / "metrics.jsonl") if r["kind"] == "step"]
    assert {r["staleness"] for r in steps} == {0.0}


def ranks_of(policy: str, out: Path) -> list[int]:
    """Pids of the processes that train a policy together, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().decode().split("\0")
            variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
        except (OSError, UnicodeDecodeError):
            continue
        if policy in arguments and any(str(out) in argument for argument in arguments) and "LOCAL_RANK" in variables:
            found[int(variables["RANK"])] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


def test_two_processes_train_each_policy_and_one_of_them_is_killed(tmp_path: Path) -> None:
    process = start(
        "math-multi-agent", *SHORT, "--eval.problems", "0", "--trainer.checkpoint-every", "2", "--split",
        "--trainer.processes", "2", "--out", str(tmp_path),
    )  # fmt: skip
    wait_for_steps(tmp_path, 3, process, "solver")
    ranks = ranks_of("solver", tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    output = finish(process)
    assert output.count("service died, starting it again") == 1
    check_run(tmp_path, 6)
    assert not ranks_of("solver", tmp_path)
