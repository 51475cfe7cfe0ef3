"""The journal's file: its tables, its version, and who may open it.

Invariants: a file is written by one process at a time; a file of another schema is refused, never guessed at; every
transaction leaves the state after some prefix of what happened, so whatever moment the process dies at, what is in the
file is consistent.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

SCHEMA = 1
APPLICATION = 0x41464C57  # "AFLW"

BUSY_S = 30.0
"""How long a statement waits for a reader that is in the way."""

PAGE_BYTES = 8192
CHECKPOINT_PAGES = 2000
WAL_LIMIT_BYTES = 64 << 20

TABLES = """
CREATE TABLE state (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY,            -- in the order of opening
    task_id TEXT NOT NULL UNIQUE,
    purpose TEXT NOT NULL,
    evaluation TEXT NOT NULL,          -- its label; empty for training
    prompt_id TEXT NOT NULL,
    open INTEGER NOT NULL DEFAULT 1,
    attempt INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',   -- the last one it was leased to
    bounds BLOB                        -- versions that its tokens count as at most, by policy
);
CREATE INDEX groups_open ON groups (id) WHERE open;
CREATE INDEX groups_evaluation ON groups (evaluation) WHERE evaluation != '';

CREATE TABLE samples (
    id INTEGER PRIMARY KEY,            -- group id * 65536 + sample index
    status TEXT NOT NULL,              -- ok | failed
    error TEXT NOT NULL
);

CREATE TABLE sequences (
    sample INTEGER NOT NULL,           -- samples.id
    position INTEGER NOT NULL,         -- in the trajectory; -1: the sample as a whole, which failed
    model_id TEXT NOT NULL,
    outcome TEXT,                      -- 'trained', or why it was dropped; NULL while it is in the buffer
    arrival INTEGER,
    oldest INTEGER,                    -- the version that counts for its staleness
    buffered INTEGER NOT NULL DEFAULT 0,
    batches INTEGER NOT NULL DEFAULT 0,   -- of those that may be served again, how many hold it
    PRIMARY KEY (sample, position, model_id)
) WITHOUT ROWID;
CREATE INDEX sequences_live ON sequences (model_id, buffered, arrival, sample) WHERE buffered OR batches;

CREATE TABLE batches (
    id INTEGER PRIMARY KEY,
    batch_id TEXT NOT NULL UNIQUE,
    model_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    fresh INTEGER NOT NULL,            -- units of it that were not replayed
    kept INTEGER NOT NULL DEFAULT 1    -- it may be served again
);
CREATE INDEX batches_kept ON batches (model_id, version) WHERE kept;

-- Payloads, in tables of their own: only rows that are deleted give their pages back.
CREATE TABLE tasks (group_id INTEGER PRIMARY KEY, packed BLOB NOT NULL);           -- RolloutTask
CREATE TABLE trajectories (sample INTEGER PRIMARY KEY, packed BLOB NOT NULL);      -- Trajectory
CREATE TABLE contents (                -- TrainSample without its arrays, as it was buffered
    sample INTEGER NOT NULL,
    position INTEGER NOT NULL,
    packed BLOB NOT NULL,
    PRIMARY KEY (sample, position)
) WITHOUT ROWID;
CREATE TABLE served (batch INTEGER PRIMARY KEY, packed BLOB NOT NULL);             -- TrainSamples without their arrays

CREATE TABLE versions (
    id INTEGER PRIMARY KEY,
    model_id TEXT NOT NULL,
    version INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    weights TEXT NOT NULL,
    digest TEXT NOT NULL,
    batch_id TEXT NOT NULL DEFAULT '',
    report BLOB,                       -- StepReport of the step that made it
    UNIQUE (model_id, incarnation, version)
);

CREATE TABLE workers (
    id INTEGER PRIMARY KEY,
    worker_id TEXT NOT NULL UNIQUE,
    registration BLOB NOT NULL
);

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    label TEXT NOT NULL UNIQUE,
    request BLOB NOT NULL,
    versions BLOB NOT NULL,
    report BLOB                        -- Evaluation, when it has ended
);
"""


class JournalError(Exception):
    """A journal that cannot be used; the message says which file, why and what to do."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The journal at `path`, made if it is not there. Used by one thread at a time.

    Raises:
        JournalError: it is not a journal, or one of another schema.
        sqlite3.Error, OSError: it cannot be made or read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        check(connection, path, fresh=True)
        if not connection.execute("PRAGMA application_id").fetchone()[0]:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(
                f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA}; COMMIT;"
            )
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        connection.execute("PRAGMA cache_size = -16384")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """The journal at `path`, also while a dataflow writes it.

    Raises:
        JournalError: there is none, it is not a journal, or one of another schema.
    """
    if not path.is_file():
        raise JournalError(f"there is no journal at {path}")
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        check(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def check(connection: sqlite3.Connection, path: Path, *, fresh: bool = False) -> None:
    """Raises JournalError unless the file is a journal of this schema, or empty and `fresh`."""
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        empty = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise JournalError(f"{path} is not a dataflow's journal: {error}") from error
    if empty and fresh:
        return
    if application != APPLICATION:
        raise JournalError(f"{path} is not a dataflow's journal; name another file, or move this one away")
    if schema != SCHEMA:
        raise JournalError(
            f"{path} has schema {schema}, this version of astraflow-dataflow reads and writes {SCHEMA}: go on with the "
            "version that wrote it, or begin a new run (its trainers' checkpoints can be its initial models)"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the journal at `path` alone: the kernel lets go of it when the process dies, however it dies.

    Raises:
        JournalError: another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise JournalError(
                f"{path} is held by another dataflow (process {_owner(file)}): one journal, one dataflow; end that one "
                "first, or name another file"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _owner(file: IO[str]) -> str:
    file.seek(0)
    return file.read(20) or "unknown"
