"""Checkpoints on disk: `version-N` directories that are there whole or not at all.

A checkpoint is written under a temporary name, every file synced, then renamed; `LATEST` follows last and is only a
hint for people. Invariant: whatever moment a process is killed at, `latest_checkpoint` finds the newest whole one; what
lies about under a temporary name is ignored, and removed when that version is saved again. Nothing is pickled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

META_FILE = "checkpoint.json"
LATEST = "LATEST"
PREFIX = "version-"
TEMPORARY = ".tmp-"


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop needs to go on: `consumed` are the ids of the batches trained so far, in order;
    `score` is what the best checkpoint is known by."""

    model_id: str
    version: int
    consumed: tuple[str, ...]
    incarnation: int
    score: float | None = None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint: the backend's files are in `directory`."""

    directory: Path
    meta: CheckpointMeta


def save_checkpoint(root: Path, meta: CheckpointMeta, write: Callable[[Path], None], *, keep: int) -> Checkpoint:
    """Let `write` fill a directory, make it durable as the newest checkpoint and remove all but the last `keep` and
    the one of the highest score.

    Checkpoints above `meta.version` belong to a history that was rolled back and are removed too.
    """
    final = root / f"{PREFIX}{meta.version:08d}"

    def fill(directory: Path) -> None:
        write(directory)
        (directory / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(meta)))

    write_directory(final, fill)
    _write_file(root / LATEST, final.name.encode())
    whole = sorted(_whole(root), key=lambda found: found.meta.version)
    older = [found for found in whole if found.meta.version <= meta.version]
    best = max((found for found in older if found.meta.score is not None), key=_score, default=None)
    for found in whole:
        if found not in older[-max(keep, 1) :] and found is not best:
            shutil.rmtree(found.directory)
    return Checkpoint(directory=final, meta=meta)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The whole checkpoint of the highest version under `root`; None if there is none."""
    return max(_whole(root), key=lambda found: found.meta.version, default=None)


def write_directory(final: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill an empty directory that then appears as `final`, all of it, replacing what was there."""
    root = final.parent
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"{TEMPORARY}{final.name}"
    for left in (temporary, root / f"{TEMPORARY}old-{final.name}"):
        shutil.rmtree(left, ignore_errors=True)
    temporary.mkdir()
    write(temporary)
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    _sync(temporary)
    if final.exists():
        final.rename(root / f"{TEMPORARY}old-{final.name}")
    temporary.rename(final)
    _sync(root)
    shutil.rmtree(root / f"{TEMPORARY}old-{final.name}", ignore_errors=True)


def _score(found: Checkpoint) -> tuple[float, int]:
    return found.meta.score or 0.0, found.meta.version


def _whole(root: Path) -> list[Checkpoint]:
    found = []
    for directory in root.glob(f"{PREFIX}*"):
        try:
            meta = msgspec.json.decode((directory / META_FILE).read_bytes(), type=CheckpointMeta)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            continue
        found.append(Checkpoint(directory=directory, meta=meta))
    return found


def _write_file(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    temporary.write_bytes(data)
    _sync(temporary)
    temporary.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
