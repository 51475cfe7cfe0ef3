"""Writes records into the tables, one transaction for all that came together, and forgets what nothing needs.

Runs in the writer's thread. Invariant: a payload stays as long as its task is open, its evaluation goes on, a buffer, a
batch that may be served again or a replay pool holds it, or it is among the newest `READABLE_GROUPS`; rows without
payload stay for the newest `REMEMBERED_GROUPS`. So the file is bounded by what is under way, however long the run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import msgspec

from ..ingest import place_of
from .codec import Codec, bare
from .pools import Named, replayable_ids
from .records import (
    MUST_SURVIVE_POWER,
    TRAINED,
    Attached,
    Bounded,
    Closed,
    Cut,
    Dropped,
    EvaluationBegun,
    EvaluationEnded,
    Forgotten,
    Kept,
    Leased,
    Opened,
    Published,
    Record,
    Registered,
    Settled,
    StateSet,
    Stepped,
)

INDEX_BITS = 16
INDEX_MASK = (1 << INDEX_BITS) - 1
READABLE_GROUPS = 200
REMEMBERED_GROUPS = 10_000
REMEMBERED_VERSIONS = 10_000
REMEMBERED_EVALUATIONS = 256
REMEMBERED_WORKERS = 10_000
REMEMBERED_IDS = 20_000
"""Rows of tasks that need not be looked up."""

PRUNE_EVERY = 200
"""Groups closed between two lookings through for what can go."""

LOOSE_PAGES = 2048
VACUUM_PAGES = 512
"""Beyond `LOOSE_PAGES` free pages the file shrinks, by so many at a time."""

encode = msgspec.msgpack.encode


def samples_of(group: int) -> tuple[int, int]:
    """The range of a group's sample rows."""
    return group << INDEX_BITS, (group + 1) << INDEX_BITS


class Writer:
    """Applies records to one connection. Used by one thread."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection
        self._codec = Codec()
        self._ids: dict[str, int] = {}
        self._closed = 0
        self._synchronous = ""

    def write(self, records: Iterable[Record]) -> None:
        """All of them in one transaction, or none.

        Raises:
            sqlite3.Error: the file could not be written.
        """
        listed = list(records)
        through = any(isinstance(record, MUST_SURVIVE_POWER) for record in listed)
        # In WAL mode both survive the death of the process; FULL also syncs, so that what is in survives power loss.
        self._synchronise("FULL" if through else "NORMAL")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for record in listed:
                self._apply(record)
            pruning = self._closed >= PRUNE_EVERY
            if pruning:
                self._prune()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        if pruning:
            self._closed = 0
            self._shrink()

    def _synchronise(self, how: str) -> None:
        if how != self._synchronous:
            self._db.execute(f"PRAGMA synchronous = {how}")
            self._synchronous = how

    def _apply(self, record: Record) -> None:
        match record:
            case Opened():
                self._open(record)
            case Leased(task_id, worker_id, attempt):
                self._db.execute(
                    "UPDATE groups SET attempt = ?, worker = ? WHERE id = ?",
                    (attempt, worker_id, self._group(task_id)),
                )
            case Bounded(task_id, newest_version):
                self._db.execute(
                    "UPDATE groups SET bounds = ? WHERE id = ?", (encode(newest_version), self._group(task_id))
                )
            case Settled():
                self._settle(record)
            case Closed(task_id):
                self._db.execute("UPDATE groups SET open = 0 WHERE id = ?", (self._group(task_id),))
                self._closed += 1
            case Kept():
                self._keep(record)
            case Dropped():
                self._drop(record)
            case Cut():
                self._cut(record)
            case Forgotten():
                self._forget(record)
            case Attached(model_id, version):
                self._db.execute(
                    "UPDATE sequences SET oldest = min(oldest, ?) WHERE model_id = ? AND buffered = 1",
                    (version, model_id),
                )
            case Published():
                self._publish(record)
            case Stepped(report):
                self._db.execute(
                    "UPDATE versions SET batch_id = ?, report = ? "
                    "WHERE model_id = ? AND incarnation = ? AND version = ?",
                    (report.batch_id, encode(report), report.model_id, report.incarnation, report.version),
                )
            case EvaluationBegun():
                self._begin_evaluation(record)
            case EvaluationEnded(evaluation):
                self._db.execute(
                    "UPDATE evaluations SET report = ? WHERE label = ?",
                    (self._codec.pack(evaluation), evaluation.label),
                )
            case Registered(registration):
                self._db.execute(
                    "INSERT OR REPLACE INTO workers (worker_id, registration) VALUES (?, ?)",
                    (registration.worker_id, encode(registration)),
                )
            case StateSet(key, value):
                self._db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (key, value))

    # --- groups ------------------------------------------------------------------------------------------------

    def _group(self, task_id: str) -> int:
        """The row of a task; those asked for lately are remembered."""
        group = self._ids.get(task_id)
        if group is None:
            group = int(self._db.execute("SELECT id FROM groups WHERE task_id = ?", (task_id,)).fetchone()[0])
            self._remember(task_id, group)
        return group

    def _remember(self, task_id: str, group: int) -> None:
        self._ids[task_id] = group
        if len(self._ids) > REMEMBERED_IDS:
            del self._ids[next(iter(self._ids))]

    def _open(self, record: Opened) -> None:
        task = record.task
        cursor = self._db.execute(
            "INSERT INTO groups (task_id, purpose, evaluation, prompt_id, attempt) VALUES (?, ?, ?, ?, ?)",
            (task.task_id, task.purpose, record.evaluation, task.prompt.id, task.attempt),
        )
        assert cursor.lastrowid is not None
        self._db.execute("INSERT INTO tasks VALUES (?, ?)", (cursor.lastrowid, self._codec.pack(task)))
        self._remember(task.task_id, cursor.lastrowid)

    def _settle(self, record: Settled) -> None:
        sample = self._group(record.task_id) << INDEX_BITS | record.sample_index
        status = "failed" if record.trajectory is None else "ok"
        self._db.execute("INSERT INTO samples VALUES (?, ?, ?)", (sample, status, record.error))
        if record.trajectory is not None:
            self._db.execute("INSERT INTO trajectories VALUES (?, ?)", (sample, self._codec.pack(record.trajectory)))

    # --- sequences ---------------------------------------------------------------------------------------------

    def _sample(self, sample_id: str) -> tuple[int, int]:
        """Sample row and position of a sequence."""
        task_id, index, position = place_of(sample_id)
        return self._group(task_id) << INDEX_BITS | index, position

    def _keep(self, record: Kept) -> None:
        for entry in record.entries:
            sample, position = self._sample(entry.sample.sample_id)
            trajectory = record.trajectories[sample & INDEX_MASK]
            assert trajectory is not None
            self._db.execute(
                "INSERT INTO sequences (sample, position, model_id, arrival, oldest, buffered) "
                "VALUES (?, ?, ?, ?, ?, 1)",
                (sample, position, record.model_id, entry.arrival, entry.oldest),
            )
            content = encode(bare(entry.sample, trajectory.sequences[position]))
            self._db.execute("INSERT INTO contents VALUES (?, ?, ?)", (sample, position, content))

    def _drop(self, record: Dropped) -> None:
        for sample_id in record.sample_ids:
            self._db.execute(
                "INSERT INTO sequences (sample, position, model_id, outcome) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET outcome = excluded.outcome, buffered = 0",
                (*self._sample(sample_id), record.model_id, record.reason),
            )

    # --- batches -----------------------------------------------------------------------------------------------

    def _cut(self, record: Cut) -> None:
        batch = record.batch
        cursor = self._db.execute(
            "INSERT INTO batches (batch_id, model_id, version, incarnation, samples, fresh) VALUES (?, ?, ?, ?, ?, ?)",
            (batch.batch_id, batch.model_id, batch.version, record.incarnation, len(batch.samples), record.fresh),
        )
        content = self._codec.pack([bare(sample) for sample in batch.samples])
        self._db.execute("INSERT INTO served VALUES (?, ?)", (cursor.lastrowid, content))
        for sample in batch.samples:
            self._db.execute(
                "UPDATE sequences SET outcome = ?, buffered = 0, batches = batches + 1 "
                "WHERE sample = ? AND position = ? AND model_id = ?",
                (TRAINED, *self._sample(sample.sample_id), batch.model_id),
            )

    def _forget(self, record: Forgotten) -> None:
        rows = self._db.execute(
            "SELECT id, packed FROM batches JOIN served ON id = batch WHERE kept AND model_id = ? AND version < ?",
            (record.model_id, record.version),
        ).fetchall()
        for row, content in rows:
            for sample in self._codec.unpack(content, list[Named]):
                self._db.execute(
                    "UPDATE sequences SET batches = batches - 1 WHERE sample = ? AND position = ? AND model_id = ?",
                    (*self._sample(sample.sample_id), record.model_id),
                )
            self._db.execute("UPDATE batches SET kept = 0 WHERE id = ?", (row,))
            self._db.execute("DELETE FROM served WHERE batch = ?", (row,))

    def _publish(self, record: Published) -> None:
        version = record.version
        self._db.execute(
            "INSERT OR IGNORE INTO versions (model_id, version, incarnation, weights, digest) VALUES (?, ?, ?, ?, ?)",
            (version.model_id, version.version, version.incarnation, version.weights, version.digest),
        )

    def _begin_evaluation(self, record: EvaluationBegun) -> None:
        label = record.request.label  # one that was used long ago may be used again
        for (group,) in self._db.execute("SELECT id FROM groups WHERE evaluation = ?", (label,)).fetchall():
            self._delete(group)
        self._db.execute(
            "INSERT OR REPLACE INTO evaluations (label, request, versions) VALUES (?, ?, ?)",
            (label, encode(record.request), encode(record.versions)),
        )

    # --- bounds ------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        newest = int(self._db.execute("SELECT coalesce(max(id), 0) FROM groups").fetchone()[0])
        kept = {
            group
            for query in (
                "SELECT id FROM groups WHERE open",
                f"SELECT DISTINCT sample >> {INDEX_BITS} FROM sequences WHERE buffered OR batches",
                "SELECT groups.id FROM groups JOIN evaluations ON label = evaluation "
                "WHERE evaluation != '' AND report IS NULL",
            )
            for (group,) in self._db.execute(query)
        }
        kept |= self._replayable()
        heavy = self._db.execute(
            "SELECT group_id FROM tasks WHERE group_id <= ?", (newest - READABLE_GROUPS,)
        ).fetchall()
        for group in [group for (group,) in heavy if group not in kept]:
            self._lighten(group)
        self._prune_rows(newest - REMEMBERED_GROUPS, kept)

    def _replayable(self) -> set[int]:
        """The groups of samples that a replay pool holds."""
        pools = self._db.execute("SELECT key, value FROM state WHERE key LIKE '%/replay'")
        state = {str(key): bytes(value) for key, value in pools}
        tasks = {place_of(sample_id)[0] for ids in replayable_ids(state).values() for sample_id in ids}
        rows = (self._db.execute("SELECT id FROM groups WHERE task_id = ?", (task_id,)).fetchone() for task_id in tasks)
        return {int(row[0]) for row in rows if row is not None}

    def _prune_rows(self, last: int, kept: set[int]) -> None:
        old = self._db.execute("SELECT id FROM groups WHERE id <= ?", (last,)).fetchall()
        for group in [group for (group,) in old if group not in kept]:
            self._delete(group)
        self._db.execute(
            "DELETE FROM evaluations WHERE report IS NOT NULL AND id <= (SELECT max(id) FROM evaluations) - ?",
            (REMEMBERED_EVALUATIONS,),
        )
        self._db.execute(
            "DELETE FROM batches WHERE NOT kept AND id <= (SELECT max(id) FROM batches) - ?", (REMEMBERED_VERSIONS,)
        )
        self._db.execute("DELETE FROM versions WHERE id <= (SELECT max(id) FROM versions) - ?", (REMEMBERED_VERSIONS,))
        self._db.execute("DELETE FROM workers WHERE id <= (SELECT max(id) FROM workers) - ?", (REMEMBERED_WORKERS,))

    def _lighten(self, group: int) -> None:
        """Its payloads go."""
        self._db.execute("DELETE FROM contents WHERE sample >= ? AND sample < ?", samples_of(group))
        self._db.execute("DELETE FROM trajectories WHERE sample >= ? AND sample < ?", samples_of(group))
        self._db.execute("DELETE FROM tasks WHERE group_id = ?", (group,))

    def _delete(self, group: int) -> None:
        self._lighten(group)
        self._db.execute("DELETE FROM sequences WHERE sample >= ? AND sample < ?", samples_of(group))
        self._db.execute("DELETE FROM samples WHERE id >= ? AND id < ?", samples_of(group))
        self._db.execute("DELETE FROM groups WHERE id = ?", (group,))

    def _shrink(self) -> None:
        """Give pages back to the file system when many are free: freed ones are mostly used again."""
        if int(self._db.execute("PRAGMA freelist_count").fetchone()[0]) > LOOSE_PAGES:
            self._db.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
