"""What a journal holds, read back: everything a dataflow needs to go on as if it had never stopped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from ..algorithms.entry import Entry
from ..batches import Served
from ..ingest import place_of
from ..interface import (
    EvaluateRequest,
    Evaluation,
    Registration,
    RolloutGroup,
    RolloutTask,
    TrainBatch,
    TrainSample,
    Trajectory,
)
from .apply import INDEX_BITS, INDEX_MASK, samples_of
from .codec import Codec, clothed
from .pools import replayable_ids

decode = msgspec.msgpack.decode


class OldTask(msgspec.Struct, kw_only=True):
    """An open task: who had it, and the samples that are in (None: failed, `errors` says why)."""

    task: RolloutTask
    evaluation: str
    worker_id: str
    newest_version: dict[str, int]
    trajectories: dict[int, Trajectory | None]
    errors: dict[int, str]


class OldEvaluation(msgspec.Struct, kw_only=True):
    """An evaluation: its figures if it has ended, else the groups that are in."""

    request: EvaluateRequest
    versions: dict[str, int]
    report: Evaluation | None
    groups: list[RolloutGroup]


class Restored(msgspec.Struct, kw_only=True):
    """The whole of it: `buffers`, `batches` (by version, without their contents) and `replayable` (consumed samples,
    which may be replayed) by policy, in order; `state` holds small states by name, encoded."""

    state: dict[str, bytes]
    tasks: list[OldTask]
    buffers: dict[str, list[Entry]]
    batches: dict[str, list[tuple[int, Served]]]
    replayable: dict[str, list[TrainSample]]
    evaluations: list[OldEvaluation]
    workers: list[Registration]


class Reader:
    """Reads from one connection, in one thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._codec = Codec()
        self._recent: dict[int, Trajectory] = {}

    def restore(self) -> Restored | None:
        """What there is to go on from; None if nothing was ever written."""
        state = {str(key): bytes(value) for key, value in self._db.execute("SELECT key, value FROM state")}
        if not state:
            return None
        return Restored(
            state=state,
            tasks=self._tasks(),
            buffers=self._buffers(),
            batches=self._batches(),
            replayable={model_id: self._samples_named(ids) for model_id, ids in replayable_ids(state).items()},
            evaluations=self._evaluations(),
            workers=[
                decode(packed, type=Registration) for (packed,) in self._db.execute("SELECT registration FROM workers")
            ],
        )

    def _tasks(self) -> list[OldTask]:
        rows = self._db.execute(
            "SELECT id, evaluation, worker, attempt, bounds, packed FROM groups JOIN tasks ON id = group_id "
            "WHERE open ORDER BY id"
        )
        tasks = []
        for group, evaluation, worker, attempt, bounds, task in rows.fetchall():
            trajectories, errors = self._samples(group)
            tasks.append(
                OldTask(
                    task=msgspec.structs.replace(self._codec.unpack(task, RolloutTask), attempt=attempt),
                    evaluation=evaluation,
                    worker_id=worker,
                    newest_version=decode(bounds, type=dict[str, int]) if bounds else {},
                    trajectories=trajectories,
                    errors=errors,
                )
            )
        return tasks

    def _samples(self, group: int) -> tuple[dict[int, Trajectory | None], dict[int, str]]:
        trajectories: dict[int, Trajectory | None] = {}
        errors: dict[int, str] = {}
        rows = self._db.execute(
            "SELECT id, error, packed FROM samples LEFT JOIN trajectories ON id = sample WHERE id >= ? AND id < ?",
            samples_of(group),
        )
        for row, error, trajectory in rows:
            trajectories[row & INDEX_MASK] = self._codec.trajectory(trajectory) if trajectory else None
            if error:
                errors[row & INDEX_MASK] = error
        return trajectories, errors

    def _buffers(self) -> dict[str, list[Entry]]:
        buffers: dict[str, list[Entry]] = {}
        rows = self._db.execute(
            "SELECT model_id, sample, position, arrival, oldest, packed FROM sequences "
            "JOIN contents USING (sample, position) WHERE buffered = 1 ORDER BY model_id, arrival"
        )
        for model_id, sample, position, arrival, oldest, content in rows.fetchall():
            whole = clothed(decode(content, type=TrainSample), self._trajectory(sample).sequences[position])
            buffers.setdefault(model_id, []).append(Entry(oldest, arrival, whole))
        return buffers

    def _batches(self) -> dict[str, list[tuple[int, Served]]]:
        batches: dict[str, list[tuple[int, Served]]] = {}
        rows = self._db.execute("SELECT model_id, version, batch_id, fresh FROM batches WHERE kept ORDER BY version")
        for model_id, version, batch_id, fresh in rows:
            batches.setdefault(model_id, []).append((version, Served(batch_id, fresh)))
        return batches

    def batch(self, batch_id: str) -> TrainBatch:
        """A batch that is kept, as it was cut. Raises LookupError if it was forgotten."""
        row = self._db.execute(
            "SELECT model_id, version, packed FROM batches JOIN served ON id = batch WHERE batch_id = ?", (batch_id,)
        ).fetchone()
        if row is None:
            raise LookupError(f"batch {batch_id} is not kept any more: there are checkpoints after it")
        model_id, version, packed = row
        samples = tuple(self._whole(sample) for sample in self._codec.unpack(packed, list[TrainSample]))
        return TrainBatch(batch_id=batch_id, model_id=model_id, version=version, samples=samples)

    def _whole(self, sample: TrainSample) -> TrainSample:
        """A batch's sample with its arrays."""
        found = self._sample(sample.sample_id)
        assert found is not None
        return clothed(sample, found.sequence)

    def _samples_named(self, sample_ids: Iterable[str]) -> list[TrainSample]:
        """Those of these samples that are still here."""
        found = (self._sample(sample_id) for sample_id in sample_ids)
        return [sample for sample in found if sample is not None]

    def _sample(self, sample_id: str) -> TrainSample | None:
        """A sample as it went into its buffer; None if it is gone."""
        task_id, index, position = place_of(sample_id)
        row = self._db.execute(
            f"SELECT sample, packed FROM contents JOIN groups ON sample = (id << {INDEX_BITS}) + ? "
            "WHERE task_id = ? AND position = ?",
            (index, task_id, position),
        ).fetchone()
        if row is None:
            return None
        return clothed(decode(row[1], type=TrainSample), self._trajectory(row[0]).sequences[position])

    def _trajectory(self, sample: int) -> Trajectory:
        """The trajectory of a sample row; several sequences share one."""
        trajectory = self._recent.get(sample)
        if trajectory is None:
            (data,) = self._db.execute("SELECT packed FROM trajectories WHERE sample = ?", (sample,)).fetchone()
            trajectory = self._recent[sample] = self._codec.trajectory(data)
        return trajectory

    def _evaluations(self) -> list[OldEvaluation]:
        found = []
        rows = self._db.execute("SELECT label, request, versions, report FROM evaluations ORDER BY id").fetchall()
        for label, request, versions, report in rows:
            found.append(
                OldEvaluation(
                    request=decode(request, type=EvaluateRequest),
                    versions=decode(versions, type=dict[str, int]),
                    report=self._codec.unpack(report, Evaluation) if report else None,
                    groups=[] if report else self._closed_groups(label),
                )
            )
        return found

    def _closed_groups(self, label: str) -> list[RolloutGroup]:
        groups = []
        rows = self._db.execute(
            "SELECT id, packed FROM groups JOIN tasks ON id = group_id WHERE evaluation = ? AND NOT open ORDER BY id",
            (label,),
        )
        for group, packed in rows.fetchall():
            task = self._codec.unpack(packed, RolloutTask)
            trajectories, _ = self._samples(group)
            ordered = tuple(trajectories.get(index) for index in range(task.n_samples))
            groups.append(RolloutGroup(task=task, trajectories=ordered))
        return groups
