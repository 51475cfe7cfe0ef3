"""How fast frames are packed and applied: in seconds of one core, the best of several rounds, as `timeit` does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from ..codecs import Change, write
from ..interface import Bytes
from .encodings import Encoding, Payload

ROUNDS = 5


class Pair(NamedTuple):
    """The frames of two versions, each uint8."""

    old: list[Bytes]
    new: list[Bytes]

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.old)


class Speed(NamedTuple):
    """`size` of all payloads in bytes; dense bytes a second of one core's time."""

    size: int
    pack: float
    apply: float


def measure(encoding: Encoding, pair: Pair) -> Speed:
    """Raises AssertionError if a frame does not come back bit for bit."""
    payloads: list[Payload] = []

    def pack() -> None:
        payloads[:] = [encoding.pack(old, new) for old, new in zip(pair.old, pair.new, strict=True)]

    packing = _best(pack, lambda: None)
    digests = [xxhash.xxh3_128_digest(frame.data) for frame in pair.new]
    live = [frame.copy() for frame in pair.old]
    room = np.empty(max(frame.nbytes for frame in pair.old), np.uint8)

    def apply() -> None:
        for payload, frame, digest in zip(payloads, live, digests, strict=True):
            verified_apply(encoding, payload, frame, digest, room[: frame.nbytes])

    def reset() -> None:
        for frame, old in zip(live, pair.old, strict=True):
            frame[:] = old

    applying = _best(apply, reset)
    assert all(np.array_equal(frame, new) for frame, new in zip(live, pair.new, strict=True)), encoding.name
    return Speed(sum(len(payload) for payload in payloads), pair.nbytes / packing, pair.nbytes / applying)


def verified_apply(encoding: Encoding, payload: Payload, live: Bytes, digest: bytes, room: Bytes) -> None:
    """Decode, make the frame beside the live one, verify it there, only then write the live one."""
    change = encoding.unpack(payload, live, room)
    write(change, room, "BF16")
    assert xxhash.xxh3_128_digest(room.data) == digest, encoding.name
    write(change if change.at is not None else Change(None, room), live, "BF16")


def scaling(encoding: Encoding, pair: Pair, threads: int) -> float:
    """By the clock, how much faster `threads` pack and apply the frames than one does."""
    digests = [xxhash.xxh3_128_digest(frame.data) for frame in pair.new]
    rooms = [np.empty(frame.nbytes, np.uint8) for frame in pair.old]
    live = [frame.copy() for frame in pair.old]

    def work(number: int) -> None:
        old, new = pair.old[number], pair.new[number]
        payload = encoding.pack(old, new)
        live[number][:] = old
        verified_apply(encoding, payload, live[number], digests[number], rooms[number])

    order = sorted(range(len(pair.old)), key=lambda number: -pair.old[number].nbytes)
    taken: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(ROUNDS):
        for count, seconds in taken.items():
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(work, order[:count]))  # threads and their arenas are there
                started = time.perf_counter()
                list(pool.map(work, order))
                seconds.append(time.perf_counter() - started)
    return min(taken[1]) / min(taken[threads])


def _best(run: Callable[[], None], before: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        before()
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)
