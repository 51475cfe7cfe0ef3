"""How large a journal gets: a run of 50,000 groups of 8 samples of 1,000 tokens, in process.

    uv run --group bench python benchmarks/journal.py [GROUPS]

Prints the sizes of the file and of its write-ahead log, the rows that are left and the resident memory after every
tenth of the groups, then how long a restart takes to read it all back, and writes docs/benchmarks/journal.md.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from astraflow.dataflow import open_journal

if TYPE_CHECKING:
    from benchmarks import dataflow_parts as parts
else:
    import dataflow_parts as parts

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "journal.md"
TABLES = ("groups", "samples", "sequences", "batches")
MIB = 1 << 20


def row(path: Path, groups: int) -> str:
    file, log = path.stat().st_size / MIB, Path(f"{path}-wal").stat().st_size / MIB
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES]
    cells = [f"{groups:,}", f"{file:.1f}", f"{log:.1f}", *(f"{count:,}" for count in counts), f"{parts.resident():.0f}"]
    return f"| {' | '.join(cells)} |"


async def fill(path: Path, total: int) -> list[str]:
    rows: list[str] = []
    async with open_journal(path) as journal:
        flow = parts.dataflow(parts.BATCH, parts.SAMPLES, journal=journal)
        worker, trainer = parts.Worker(flow, "w0", parts.trajectories(parts.SAMPLES)), parts.Trainer(flow)
        await worker.start()
        await trainer.start()
        done = 0
        while done < total:
            done += len(await worker.groups(parts.LEASED))
            await trainer.step(0.0)
            if done // (total // 10) > len(rows):
                rows.append(row(path, done))
                print(rows[-1], flush=True)
    return rows


async def reopen(path: Path) -> str:
    began = time.perf_counter()
    async with open_journal(path) as journal:
        read = time.perf_counter()
        parts.dataflow(parts.BATCH, parts.SAMPLES, journal=journal)
        seconds = (read - began, time.perf_counter() - read)
        assert journal.restored is not None
        kept = sum(len(batches) for batches in journal.restored.batches.values())
        waiting = sum(len(entries) for entries in journal.restored.buffers.values())
    return (
        f"Opened again, it is read in {seconds[0]:.2f} s (in a thread) and taken up in {seconds[1]:.3f} s: "
        f"{kept} batches of {parts.BATCH} and {waiting} buffered sequences."
    )


def main() -> None:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        rows = asyncio.run(fill(path, total))
        again = asyncio.run(reopen(path))
    print(again)
    text = [
        "# The journal's size",
        "",
        "Written by `uv run --group bench python benchmarks/journal.py`: groups of 8 samples of 1,000 tokens, a",
        "trainer that commits every batch of 256. Without bounds the payloads alone would be 13 KB a sample.",
        "",
        "| groups so far | file, MiB | log, MiB | groups | samples | sequences | batches | resident, MiB |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        again,
    ]
    PAGE.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
