from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow.dataflow import (
    Array,
    Message,
    Prompt,
    RolloutGroup,
    RolloutTask,
    Sampling,
    Sequence,
    StepReport,
    Trajectory,
)
from astraflow.recipes.config import ConfigError
from astraflow.recipes.math_multi_agent import TINY
from astraflow.recipes.rundir import RunDirectory, RunWriter, append_lines, write_atomic


def group() -> RolloutGroup:
    sequence = Sequence(
        model_id="solver",
        role="solver",
        tokens=Array.of(np.array([1, 2, 3], np.int32)),
        loss_mask=Array.of(np.array([False, True, True])),
        logprobs=Array.of(np.array([0, -0.5, -0.25], np.float32)),
        versions=Array.of(np.array([-1, 4, 5], np.int32)),
        temperature=1.0,
        finish_reason="stop",
        reward=1.0,
    )
    task = RolloutTask(
        task_id="t/0/0",
        prompt=Prompt(id="p", source="s", messages=(Message("user", "1 + 1"),), reference="2"),
        workflow="w",
        n_samples=2,
        sampling={"solver": Sampling()},
        seed=0,
        deadline_s=10,
    )
    trajectory = Trajectory(sequences=(sequence,), messages=(Message("user", "1 + 1"),), metrics={"right": 1.0})
    return RolloutGroup(task=task, trajectories=(trajectory, None))


def test_two_runs_at_once_get_directories_of_their_own(tmp_path: Path) -> None:
    config = msgspec.structs.replace(TINY, out=str(tmp_path))
    made = {RunDirectory.create(config, "r").path for _ in range(3)}
    assert len(made) == 3
    named = msgspec.structs.replace(config, name="mine")
    RunDirectory.create(named, "r")
    with pytest.raises(ConfigError, match="exists already"):
        RunDirectory.create(named, "r")


def test_a_place_that_cannot_hold_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (str(tmp_path / "file"), "/proc/astraflow"):
        with pytest.raises(ConfigError, match=f"--out {out}: cannot make"):
            RunDirectory.create(msgspec.structs.replace(TINY, out=out), "r")


def test_everything_queued_is_on_disk_at_the_end(tmp_path: Path) -> None:
    run = RunDirectory.create(msgspec.structs.replace(TINY, out=str(tmp_path)), "r")
    step = StepReport(
        model_id="solver", incarnation=1, version=1, batch_id="b", wait_s=0.5, step_s=1.0, metrics={"loss": 0.1}
    )
    with RunWriter(run).running() as writer:
        for _ in range(50):
            writer.on_group(group())
        writer.on_step(step)
    records = [json.loads(line) for line in run.trajectories_file.read_text().splitlines()]
    assert len(records) == 50
    assert records[0]["sequences"][0]["tokens"] == [1, 2, 3]
    assert records[0]["sequences"][0]["versions"] == [-1, 4, 5]
    assert records[0]["messages"][0]["content"] == "1 + 1"
    (metrics,) = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert (metrics["kind"], metrics["loss"], metrics["wait_s"]) == ("step", 0.1, 0.5)


def test_a_torn_last_line_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"a": 1}\n{"b"')
    with append_lines(file) as out:
        out.write(b'{"c": 3}\n')
    assert file.read_bytes() == b'{"a": 1}\n{"b"\n{"c": 3}\n'


def test_a_disk_that_fails_stops_neither_the_run_nor_its_end(tmp_path: Path) -> None:
    run = RunDirectory.create(msgspec.structs.replace(TINY, out=str(tmp_path)), "r")
    run.trajectories_file.symlink_to("/dev/full")
    with RunWriter(run).running() as writer:
        for _ in range(2000):
            writer.on_group(group())
    assert writer.dropped > 0


def test_an_atomic_write_replaces_whole(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    write_atomic(file, b"one")
    write_atomic(file, b"two")
    assert file.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [file]
