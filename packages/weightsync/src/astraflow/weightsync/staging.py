"""A path's frames, each from store to sink, several at once."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import numpy as np

from .assemble import Assembler, Spans
from .interface import Bytes, Sink
from .layout import ITEMSIZE, group_frames
from .workers import run_all


async def stage(assembler: Assembler, sink: Sink) -> None:
    """Hand the sink every frame that changes. If that fails or is cancelled, the sink has nothing staged."""
    groups = group_frames(assembler.frames, assembler.target.frame_bytes)
    try:
        await anyio.to_thread.run_sync(sink.begin, assembler.layout)
        await run_all(partial(_stage_group, assembler, sink, _Scratch(assembler)), groups)
        await anyio.to_thread.run_sync(sink.seal)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(sink.abort)
        raise


class _Scratch:
    """Arrays of a frame's size, one for each thread at work: to touch new pages costs as much as to decode."""

    def __init__(self, assembler: Assembler) -> None:
        self._size = max((frame.length for frame in assembler.frames), default=0)
        self._idle: list[Bytes] = []

    def take(self) -> Bytes:
        try:
            return self._idle.pop()
        except IndexError:
            return np.empty(self._size, np.uint8)

    def give(self, scratch: Bytes) -> None:
        self._idle.append(scratch)


def _stage_group(assembler: Assembler, sink: Sink, scratch: _Scratch, group: range) -> None:
    spans = assembler.spans(group)
    room = scratch.take()
    for position in group:
        _stage_frame(assembler, sink, position, spans, room)
    scratch.give(room)


def _stage_frame(assembler: Assembler, sink: Sink, position: int, spans: list[Spans], room: Bytes) -> None:
    frame = assembler.frames[position]
    spec = assembler.layout[frame.tensor]
    own = sink.room(spec.name, frame.offset, frame.length)
    change = assembler.change(position, spans, sink, room[: frame.length] if own is None else own)
    if change is None:
        return
    with assembler.seconds.of("apply"):
        if change.at is None:
            sink.stage_dense(spec.name, frame.offset, change.data)
        else:
            sink.stage_sparse(spec.name, frame.offset, ITEMSIZE[spec.dtype], change.at, change.data)
