"""How fast frames are packed and applied: in seconds of one core, the best of several rounds, as `timeit` does it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import xxhash

from ..codecs import Change, patch, write
from ..interface import Bytes
from .encodings import Encoding, Payload

ROUNDS = 5
CACHED_BYTES = 1 << 19
CONTROL_PASSES = 32


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
    change = encoding.unpack(payload, live)
    assert patch(change, live, room, "BF16") == digest, encoding.name
    write(change if change.at is not None else Change(None, room), live, "BF16")


class Scaling(NamedTuple):
    """By the clock, how much faster several threads are than one; `control`: at hashing what is in their caches, which
    shares nothing, so that it is what the machine gives."""

    frames: float
    control: float


def scaling(encoding: Encoding, pair: Pair, threads: int) -> Scaling:
    """Of packing and applying the frames."""
    digests = [xxhash.xxh3_128_digest(frame.data) for frame in pair.new]
    rooms = [np.empty(frame.nbytes, np.uint8) for frame in pair.old]
    live = [frame.copy() for frame in pair.old]

    def work(number: int) -> None:
        old, new = pair.old[number], pair.new[number]
        payload = encoding.pack(old, new)
        live[number][:] = old
        verified_apply(encoding, payload, live[number], digests[number], rooms[number])

    def control(number: int) -> None:
        frame = pair.old[number][:CACHED_BYTES].data
        for _ in range(CONTROL_PASSES * len(pair.old[number]) // CACHED_BYTES):
            xxhash.xxh3_128_digest(frame)

    order = sorted(range(len(pair.old)), key=lambda number: -pair.old[number].nbytes)
    jobs = [(job, count) for job in (work, control) for count in (1, threads)]
    taken: list[list[float]] = [[] for _ in jobs]
    for _ in range(ROUNDS):
        for (job, count), seconds in zip(jobs, taken, strict=True):
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(job, order[:count]))  # threads and their arenas are there
                started = time.perf_counter()
                list(pool.map(job, order))
                seconds.append(time.perf_counter() - started)
    one, several, control_one, control_several = (min(seconds) for seconds in taken)
    return Scaling(one / several, control_one / control_several)


def _best(run: Callable[[], None], before: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        before()
        started = time.thread_time()
        run()
        seconds.append(time.thread_time() - started)
    return min(seconds)
