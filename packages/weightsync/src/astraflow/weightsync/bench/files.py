"""What a changed version costs in a file that a server loads: this package's sink beside writing the file anew.

Both are handed decoded changes. The sink reads each frame of the served file, changes it, verifies it and writes it
over the older of its two files; the other sorts the changes, scatters them into a private copy of the model and writes
all of it to a new file that it renames, which is what AstraFlow's receiver does, verifying nothing.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from ..codecs import Change, changed_elements, patch
from ..files import write_atomically
from ..interface import Bytes, SinkState, TensorSpec
from ..layout import elements, safetensors_header
from ..safetensors_sink import SafetensorsSink
from .speed import ROUNDS, Pair


class FileSpeed(NamedTuple):
    """Dense bytes a second of one core's time."""

    sink: float
    rewritten: float


class _Step(NamedTuple):
    """From one version to the other: what each frame becomes, and its digest."""

    frames: list[Bytes]
    changes: list[Change]
    digests: list[bytes]


def file_apply(pair: Pair) -> FileSpeed:
    """On tmpfs where there is one, so that it is not a disk that is measured."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        steps = [_step(pair.old, pair.new), _step(pair.new, pair.old)]
        sink = _through_sink(Path(directory) / "sink", pair, steps)
        rewritten = _rewritten(Path(directory) / "model.safetensors", pair, steps)
    return FileSpeed(pair.nbytes / sink, pair.nbytes / rewritten)


def _step(old: list[Bytes], new: list[Bytes]) -> _Step:
    changes = []
    for before, after in zip(old, new, strict=True):
        at = changed_elements(before, after, 2)
        changes.append(Change(at, elements(after, 2)[at].view(np.uint8)))
    return _Step(new, changes, [xxhash.xxh3_128_digest(frame.data) for frame in new])


def _layout(frames: list[Bytes]) -> list[TensorSpec]:
    return [
        TensorSpec(name=f"t{number:04}", dtype="BF16", shape=(frame.nbytes // 2,), nbytes=frame.nbytes)
        for number, frame in enumerate(frames)
    ]


def _through_sink(directory: Path, pair: Pair, steps: list[_Step]) -> float:
    sink, layout = SafetensorsSink(directory), _layout(pair.old)
    room = np.empty(max(frame.nbytes for frame in pair.old), np.uint8)
    for version, frames in enumerate((pair.new, pair.old)):  # both files are there
        sink.begin(layout)
        for spec, frame in zip(layout, frames, strict=True):
            sink.stage_dense(spec.name, 0, frame)
        sink.commit(SinkState(digest=str(version), version=version))
    seconds = []
    for turn in range(2 * ROUNDS):
        step = steps[turn % 2]
        started = time.thread_time()
        sink.begin(layout)
        for spec, change, digest in zip(layout, step.changes, step.digests, strict=True):
            own = sink.room(spec.name, 0, spec.nbytes)
            frame = room[: spec.nbytes] if own is None else own
            served = sink.read(spec.name, 0, frame)
            assert patch(change, served, frame, "BF16") == digest
            sink.stage_dense(spec.name, 0, frame)
        sink.commit(SinkState(digest=f"t{turn}", version=turn + 2))
        seconds.append(time.thread_time() - started)
        assert _body(directory / "current" / "model.safetensors", layout) == b"".join(map(bytes, step.frames))
    return min(seconds)


def _rewritten(path: Path, pair: Pair, steps: list[_Step]) -> float:
    layout, private = _layout(pair.old), [frame.copy() for frame in pair.old]
    header = safetensors_header(layout)
    seconds = []
    for turn in range(2 * ROUNDS):
        step = steps[turn % 2]
        started = time.thread_time()
        for frame, change in zip(private, step.changes, strict=True):
            assert change.at is not None
            order = np.argsort(change.at)
            elements(frame, 2)[change.at[order]] = elements(change.data, 2)[order]
        write_atomically(path, [header, *(frame.data for frame in private)])
        seconds.append(time.thread_time() - started)
        assert _body(path, layout) == b"".join(map(bytes, step.frames))
    return min(seconds)


def _body(path: Path, layout: list[TensorSpec]) -> bytes:
    return path.read_bytes()[len(safetensors_header(layout)) :]
