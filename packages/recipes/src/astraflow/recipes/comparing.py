"""What comparisons have in common: their runs' steps read back, and the files and the table they leave."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import msgspec
from rich.console import Console
from rich.table import Table

from .rundir import RunDirectory, write_atomic


def steps_of(directory: RunDirectory) -> list[dict[str, Any]]:
    """The figures of the run's steps, from the file its writer has closed."""
    lines = directory.metrics_file.read_bytes().splitlines()
    return [record for record in map(msgspec.json.decode, lines) if record["kind"] == "step"]


async def leave(
    comparison: msgspec.Struct, table: Table, plot: Callable[[], bytes], run: RunDirectory, console: Console
) -> None:
    """Write comparison.json and comparison.png (drawn in a thread), and print the table."""
    raw, picture = run.path / "comparison.json", run.path / "comparison.png"
    write_atomic(raw, msgspec.json.format(msgspec.json.encode(comparison), indent=2))
    write_atomic(picture, await anyio.to_thread.run_sync(plot))
    console.print(table)
    console.print(f"raw figures in {raw}, drawn in {picture}", highlight=False, soft_wrap=True)


def png(figure: Any) -> bytes:
    """A matplotlib figure as a PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
