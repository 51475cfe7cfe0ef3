"""What a chaos run is: its sizes, its places, and the counters that outlive the processes which count."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec

from astraflow.dataflow import DataflowConfig, Message, PolicyFeed, Prompt, Sampling

POLICIES = ("alpha", "beta")
WORKERS = ("worker-0", "worker-1")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`drops`: with staleness, filters, failing samples; else nothing may be dropped. `cut`: sockets are cut instead of
    processes killed."""

    directory: Path
    seed: int = 0
    strikes: int = 100
    prompts: int = 500
    epochs: int = 3
    n_samples: int = 2
    batch_size: int = 10
    checkpoint_every: int = 5
    drops: bool = False
    cut: bool = False

    @property
    def journal(self) -> Path:
        return self.directory / "journal.sqlite"

    @property
    def served_at(self) -> str:
        """Where the dataflow listens."""
        return f"unix:{self.directory}/d"

    @property
    def joined_at(self) -> str:
        """Where everybody else finds it: through the proxy, if there is one."""
        return f"unix:{self.directory}/p" if self.cut else self.served_at

    def checkpoints(self, policy: str) -> Path:
        return self.directory / f"checkpoints-{policy}"

    def served(self, policy: str) -> Path:
        """Every batch that the policy's trainers were given, and what was in it."""
        return self.directory / f"served-{policy}.jsonl"

    def config(self) -> DataflowConfig:
        return DataflowConfig(
            policies=tuple(
                PolicyFeed(
                    model_id=name,
                    batch_size=self.batch_size,
                    max_staleness=2 if self.drops else 10**6,
                    steps=10**6,
                    order="edf" if self.drops else "fifo",
                )
                for name in POLICIES
            ),
            workflow="chaos",
            n_samples=self.n_samples,
            sampling={name: Sampling() for name in POLICIES},
            seed=self.seed,
            task_deadline_s=20.0,
            worker_silence_s=2.0,
            worker_grace_s=1e4,
            max_attempts=10**6,
            filters=("zero_advantage",) if self.drops else (),
            max_dropped_batches=10**6,
        )

    def source(self) -> list[Prompt]:
        return [Prompt(id=str(i), source="chaos", messages=(Message("user", str(i)),)) for i in range(self.prompts)]


class Counters:
    """Numbers in memory that forked processes share, by name."""

    NAMES = ("steps", "leases", "submitted", "failed", "cuts")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * len(self.NAMES) * 16)

    def add(self, name: str, process: int, count: int = 1) -> None:
        """Only `process` (a small number of its own) counts in this place."""
        place = 8 * (self.NAMES.index(name) * 16 + process)
        (value,) = struct.unpack_from("<q", self._memory, place)
        struct.pack_into("<q", self._memory, place, value + count)

    def total(self, name: str) -> int:
        values = struct.unpack_from("<16q", self._memory, 8 * self.NAMES.index(name) * 16)
        return sum(values)
