"""How the ranks of a sharded publisher talk: rounds of messages, in the same order on every rank."""

from __future__ import annotations

import queue
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from .interface import WeightSyncError

Buffers = Sequence[bytes | memoryview]


class RankLost(WeightSyncError):
    """Another rank is gone, or was silent for too long: make the publisher and its channel anew, on every rank."""


class Channel(Protocol):
    """One rank's end. Ranks are 0 to `world_size` - 1."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def exchange(self, outgoing: Mapping[int, Buffers], sources: Collection[int]) -> dict[int, bytes | memoryview]:
        """Send each rank its buffers as one message, and return one message from each of `sources`; never one's own
        rank. Messages between two ranks keep their order. Blocks. Raises RankLost; the channel is then of no further
        use."""
        ...


def gather(channel: Channel, data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank, at rank 0; nothing elsewhere."""
    if channel.rank:
        channel.exchange({0: [data]}, ())
        return []
    others = channel.exchange({}, range(1, channel.world_size))
    return [data, *(bytes(others[rank]) for rank in range(1, channel.world_size))]


def broadcast(channel: Channel, data: bytes) -> bytes:
    """Rank 0's bytes, on every rank."""
    if channel.rank:
        return bytes(channel.exchange({}, (0,))[0])
    channel.exchange({rank: [data] for rank in range(1, channel.world_size)}, ())
    return data


class LocalChannel:
    """Ranks that are threads of one process; `LocalChannel.group(n)` makes their ends."""

    def __init__(self, rank: int, queues: Mapping[tuple[int, int], queue.Queue[bytes]], timeout_s: float) -> None:
        self.rank = rank
        self.world_size = max(to for _, to in queues) + 1 if queues else 1
        self._queues = queues
        self._timeout_s = timeout_s

    @classmethod
    def group(cls, world_size: int, timeout_s: float = 120.0) -> list[LocalChannel]:
        pairs = [(one, other) for one in range(world_size) for other in range(world_size) if one != other]
        queues: dict[tuple[int, int], queue.Queue[bytes]] = {pair: queue.Queue() for pair in pairs}
        return [cls(rank, queues, timeout_s) for rank in range(world_size)]

    def exchange(self, outgoing: Mapping[int, Buffers], sources: Collection[int]) -> dict[int, bytes | memoryview]:
        for rank, buffers in outgoing.items():
            self._queues[self.rank, rank].put(b"".join(buffers))
        received: dict[int, bytes | memoryview] = {}
        for rank in sources:
            try:
                received[rank] = self._queues[rank, self.rank].get(timeout=self._timeout_s)
            except queue.Empty:
                raise RankLost(f"rank {rank} sent nothing for {self._timeout_s:.0f} s") from None
        return received


class TorchChannel:
    """The ranks of `torch.distributed`, over a gloo group of its own: every rank makes one, at the same point.

    Messages go through the CPU; what is trained may be on any device.
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        import torch.distributed as dist

        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = int(dist.get_rank())
        self.world_size = int(dist.get_world_size())

    def exchange(self, outgoing: Mapping[int, Buffers], sources: Collection[int]) -> dict[int, bytes | memoryview]:
        try:
            return self._exchange(outgoing, sources)
        except RuntimeError as error:  # what gloo raises for a peer that is gone or late
            raise RankLost(f"rank {self.rank} lost another: {error}") from error

    def _exchange(self, outgoing: Mapping[int, Buffers], sources: Collection[int]) -> dict[int, bytes | memoryview]:
        import torch
        import torch.distributed as dist

        sending: list[tuple[Any, Any]] = []
        for rank, buffers in outgoing.items():
            data = _joined(buffers)
            messages = [torch.tensor([len(data)]), *([torch.from_numpy(data)] if len(data) else [])]
            sending.extend((dist.isend(message, rank, self._group), message) for message in messages)
        received: dict[int, bytes | memoryview] = {}
        for rank in sources:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, self._group)
            memory = torch.empty(int(size), dtype=torch.uint8)
            if len(memory):
                dist.recv(memory, rank, self._group)
            received[rank] = memory.numpy().data
        for work, _ in sending:
            if work is not None:
                work.wait()
        return received


def _joined(buffers: Buffers) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """In memory that torch may be given."""
    data = np.empty(sum(len(buffer) for buffer in buffers), np.uint8)
    position = 0
    for buffer in buffers:
        data[position : position + len(buffer)] = np.frombuffer(buffer, np.uint8)
        position += len(buffer)
    return data
