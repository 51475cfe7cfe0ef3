"""A run's directory: configuration, metrics, trajectories, policies, checkpoints, logs.

Invariant: whatever is written here is whole or absent: single files by temporary name and rename, line files one
complete JSON object a line (a torn last line of a killed process is ended by the next one).
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog

from astraflow.dataflow import Evaluation, RolloutGroup, StepReport

from .config import ConfigError, RunConfig, to_toml

QUEUE_LIMIT = 10_000

log = structlog.get_logger("astraflow.recipes")


class RunDirectory:
    """Names inside a run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: RunConfig, recipe: str) -> RunDirectory:
        """Make the directory and write the resolved configuration.

        Raises:
            ConfigError: the named directory exists already, or none can be made there.
        """
        path = Path(config.out).expanduser() / (config.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
        for attempt in range(100):
            candidate = path if attempt == 0 or config.name else path.with_name(f"{path.name}-{attempt}")
            try:
                candidate.mkdir(parents=True, exist_ok=False)
            except FileExistsError as error:
                if config.name:
                    raise ConfigError(f"{candidate} exists already; choose another --name") from error
                continue
            except OSError as error:
                raise ConfigError(f"--out {config.out}: cannot make {candidate}: {error.strerror}") from error
            run = cls(candidate)
            run.logs.mkdir()
            write_atomic(run.config_file, f'recipe = "{recipe}"\n\n{to_toml(config)}'.encode())
            return run
        raise ConfigError(f"no free directory name like {path}")

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trajectories_file(self) -> Path:
        return self.path / "trajectories.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def journal(self) -> Path:
        """What the dataflow goes on from, beside the checkpoints that go with it."""
        return self.path / "journal.sqlite"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def policy(self, model_id: str) -> Path:
        """The trained policy as a Hugging Face directory."""
        return self.path / "policies" / model_id

    def checkpoints(self, model_id: str) -> Path:
        return self.path / "checkpoints" / model_id

    def weights(self, model_id: str) -> Path:
        """The weight store of a policy whose trainer is a process of its own."""
        return self.path / "weights" / model_id


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` whole: temporary name, sync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def trajectory_record(group: RolloutGroup) -> Iterator[dict[str, Any]]:
    """One record per trajectory: messages, metrics, and every sequence's tokens, mask, log-probabilities, versions."""
    task = group.task
    for index, trajectory in enumerate(group.trajectories):
        if trajectory is None:
            continue
        sequences = [
            {
                "model_id": s.model_id,
                "role": s.role,
                "reward": s.reward,
                "finish_reason": s.finish_reason,
                "temperature": s.temperature,
                "tokens": s.tokens.numpy().tolist(),
                "loss_mask": s.loss_mask.numpy().astype(int).tolist(),
                "logprobs": s.logprobs.numpy().round(5).tolist(),
                "versions": s.versions.numpy().tolist(),
            }
            for s in trajectory.sequences
        ]
        yield {
            "task_id": task.task_id,
            "sample": index,
            "purpose": task.purpose,
            "suite": task.suite,
            "prompt_id": task.prompt.id,
            "reference": task.prompt.reference,
            "status": trajectory.status,
            "error": trajectory.error,
            "metrics": trajectory.metrics,
            "messages": [msgspec.to_builtins(m) for m in trajectory.messages],
            "sequences": sequences,
        }


class RunWriter:
    """Writes trajectories and metrics as they come, from a thread of its own: an observer of the dataflow.

    The callbacks only queue; when the disk cannot follow, trajectories beyond `QUEUE_LIMIT` groups are dropped and
    counted in the metrics, never waited for.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._queue: queue.Queue[RolloutGroup | dict[str, Any] | None] = queue.Queue(QUEUE_LIMIT)
        self._started = time.time()
        self.dropped = 0

    def on_group(self, group: RolloutGroup) -> None:
        self._put(group)

    def on_step(self, report: StepReport) -> None:
        record = msgspec.to_builtins(report)
        self._put({"kind": "step", **record.pop("metrics"), **record})

    def on_evaluation(self, evaluation: Evaluation) -> None:
        suites = [msgspec.structs.replace(suite, examples=()) for suite in evaluation.suites]
        self._put({"kind": "evaluation", "label": evaluation.label, "suites": msgspec.to_builtins(suites)})

    def metrics(self, kind: str, **values: object) -> None:
        """Append one line of other metrics."""
        self._put({"kind": kind, **values})

    def _put(self, item: RolloutGroup | dict[str, Any]) -> None:
        if isinstance(item, dict):
            item["time_s"] = round(time.time() - self._started, 3)
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.dropped += 1

    @contextmanager
    def running(self) -> Iterator[RunWriter]:
        """Write while the block runs; at its end everything queued is on disk."""
        thread = threading.Thread(target=self._write, name="run-writer")
        thread.start()
        try:
            yield self
        finally:
            self._queue.put(None)
            thread.join()

    def _write(self) -> None:
        try:
            self._write_lines()
        except OSError as error:  # a full disk must not stop the run: go on without these files, and say so
            log.error("metrics and trajectories are no longer written", run=str(self._run.path), cause=str(error))
            while self._queue.get() is not None:
                self.dropped += 1

    def _write_lines(self) -> None:
        encoder = msgspec.json.Encoder()
        with append_lines(self._run.metrics_file) as metrics, append_lines(self._run.trajectories_file) as trajectories:
            while (item := self._queue.get()) is not None:
                if isinstance(item, dict):
                    metrics.write(encoder.encode(item) + b"\n")
                else:
                    for record in trajectory_record(item):
                        trajectories.write(encoder.encode(record) + b"\n")
                if self._queue.empty():
                    metrics.flush()
                    trajectories.flush()


@contextmanager
def append_lines(path: Path) -> Iterator[Any]:
    """Open for appending, ending a line that a killed process left torn."""
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            torn = file.read(1) != b"\n"
            file.seek(0, os.SEEK_END)
            if torn:
                file.write(b"\n")
        yield file
