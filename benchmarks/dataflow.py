"""What the dataflow costs: a rollout in process and over rpc, beside HTTP with pickles; a thousand workers; memory.

    uv run --group bench python benchmarks/dataflow.py

Servers and their clients are processes of their own. Contenders take turns in short rounds and a figure is the median
of its rounds, so that a machine that is busy meanwhile slows all of them alike. What runs is in `dataflow_parts.py`
and, for the other side, in `flask_reference.py`.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

ROUNDS = 5
ROUND_S = 2.0
CLIENTS = 2
SAMPLES = 8

HERE = Path(__file__).parent
PARTS = str(HERE / "dataflow_parts.py")
FLASK = str(HERE / "flask_reference.py")
REPORT = HERE.parent / "docs" / "benchmarks" / "dataflow.md"

Round = dict[str, Any]
"""submits and batches: seconds each; cpu: processor seconds of the clients; server: those of the server."""


class Contender:
    """A server and its clients."""

    def __init__(self, stack: ExitStack, server: list[str], client: list[str]) -> None:
        self._server = stack.enter_context(process(*server))
        address = line_of(self._server)
        client = [address if part == "ADDRESS" else part for part in client]
        self._clients = [stack.enter_context(process(*client, str(index))) for index in range(CLIENTS)]
        for one in self._clients:
            assert line_of(one) == "ready"

    def round(self, seconds: float) -> Round:
        spent = cpu_time(self._server.pid)
        for one in self._clients:
            assert one.stdin is not None
            one.stdin.write(f"{seconds}\n".encode())
            one.stdin.flush()
        rows: list[Round] = [msgspec.json.decode(line_of(one)) for one in self._clients]
        return {
            "submits": [taken for row in rows for taken in row["submits"]],
            "batches": [taken for row in rows for taken in row["batches"]],
            "cpu": sum(row["cpu"] for row in rows),
            "server": cpu_time(self._server.pid) - spent,
        }


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.terminate()


def line_of(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline().decode().strip().strip('"')
    assert line, f"{child.args!r} ended"
    return line


def cpu_time(child: int) -> float:
    """Seconds of processor time of a child."""
    seconds: float = time.clock_gettime((~child << 3) | 2)  # clock_getcpuclockid(3), which Python lacks
    return seconds


def compare(directory: str) -> dict[str, list[Round]]:
    with ExitStack() as stack:
        contenders = {
            "rpc": Contender(stack, [PARTS, "serve", f"{directory}/a", ""], [PARTS, "load", f"{directory}/a"]),
            "rpc, journal": Contender(
                stack, [PARTS, "serve", f"{directory}/b", f"{directory}/journal"], [PARTS, "load", f"{directory}/b"]
            ),
            "Flask": Contender(stack, [FLASK, "serve", "tensors"], [FLASK, "load", "ADDRESS", "tensors"]),
            "Flask, best": Contender(stack, [FLASK, "serve", "arrays"], [FLASK, "load", "ADDRESS", "arrays"]),
        }
        rows: dict[str, list[Round]] = {name: [] for name in contenders}
        for number in range(-1, ROUNDS):  # the first one warms up and does not count
            for name, contender in contenders.items():
                row = contender.round(ROUND_S)
                if number >= 0:
                    rows[name].append(row)
    return rows


# --- the report ------------------------------------------------------------------------------------------------------


def rate(row: Round) -> float:
    """Rollouts per second."""
    return len(row["submits"]) * SAMPLES / ROUND_S


def ratios(rows: dict[str, list[Round]], one: str, other: str) -> list[float]:
    return sorted(rate(a) / rate(b) for a, b in zip(rows[one], rows[other], strict=True))


def cpu_of(row: Round, which: tuple[str, ...]) -> float:
    """Processor microseconds per rollout."""
    spent: float = sum(row[name] for name in which)
    return 1e6 * spent / (len(row["submits"]) * SAMPLES)


def contender_row(name: str, rows: list[Round]) -> str:
    submits = [taken * 1e3 for row in rows for taken in row["submits"]]
    batches = [taken * 1e3 for row in rows for taken in row["batches"]]
    median = statistics.median
    cells = (
        f"{median(map(rate, rows)):,.0f}",
        f"{percentile(submits, 50):.1f} / {percentile(submits, 99):.1f}",
        f"{percentile(batches, 50):.1f} / {percentile(batches, 99):.1f}",
        f"{median(cpu_of(row, ('server',)) for row in rows):,.0f}",
        f"{median(cpu_of(row, ('server', 'cpu')) for row in rows):,.0f}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


def verdict(held: bool) -> str:
    return "holds" if held else "**missed**"


def ratio_row(rows: dict[str, list[Round]], one: str, other: str, bar: float | None) -> str:
    found = ratios(rows, one, other)
    middle = statistics.median(found)
    spent = statistics.median(cpu_of(row, ("server", "cpu")) for row in rows[other]) / statistics.median(
        cpu_of(row, ("server", "cpu")) for row in rows[one]
    )
    judged = f"≥ {bar:g}: {verdict(middle >= bar)}" if bar else ""
    return f"| {one} / {other} | {middle:.1f} ({found[0]:.1f} to {found[-1]:.1f}) | {spent:.1f} | {judged} |"


def report(
    here: dict[str, dict[str, float]], rows: dict[str, list[Round]], crowd: dict[str, float], levels: list[float]
) -> str:
    settled = levels[1:]
    growth = (settled[-1] - settled[0]) / settled[0]
    lines = [
        "# dataflow: what a rollout costs",
        "",
        "Written by `uv run --group bench python benchmarks/dataflow.py`; the script says what is measured.",
        f"Medians of {ROUNDS} rounds in which the contenders take turns; ratios are taken within a round, lowest and",
        "highest in brackets. A rollout is one sample of 1,000 tokens; a submit brings a group of 8, a batch has 256.",
        f"Python {platform.python_version()}, uvloop {version('uvloop')}, Flask {version('flask')}, "
        f"torch {version('torch')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
        "",
        "## In process",
        "Processor time per rollout; with the journal, its thread compresses and writes.",
        "",
        "| µs per rollout | submit (with its lease) | submit, all threads | served in a batch | served, all threads |",
        "|---|---:|---:|---:|---:|",
        *(f"| {name} | {' | '.join(f'{value:.1f}' for value in figures.values())} |" for name, figures in here.items()),
        "",
        "## From other processes",
        "Two client processes submit and take batches: over a Unix socket, or over HTTP to Flask. `Flask` is what",
        "AstraFlow does: pickled dictionaries of torch tensors and a connection for every call; `Flask, best` is numpy",
        "arrays and kept connections. Neither validates, computes statistics or is durable.",
        "",
        "| | rollouts/s | submit p50 / p99, ms | batch p50 / p99, ms | processor µs per rollout, server | both sides |",
        "|---|---:|---:|---:|---:|---:|",
        *(contender_row(name, found) for name, found in rows.items()),
        "",
        "| ratio | of rollouts/s | of processor time | bar |",
        "|---|---:|---:|---|",
        ratio_row(rows, "rpc", "Flask", 20),
        ratio_row(rows, "rpc, journal", "Flask", 5),
        ratio_row(rows, "rpc", "Flask, best", None),
        ratio_row(rows, "rpc, journal", "Flask, best", None),
        "",
        f"## {crowd['workers']:,} workers",
        f"Each holds {crowd['held']} leases over a connection of its own, finishes one every {crowd['think']:g} s on",
        f"average and leases another, and sends heartbeats. {crowd['in flight']:,.0f} leases are in flight, "
        f"{crowd['leases per second']:.0f}",
        f"are taken a second; the server's processor is {crowd['busy']:.0%} busy.",
        "",
        "| ms | p50 | p99 | bar |",
        "|---|---:|---:|---|",
        f"| lease, as the worker sees it | {crowd['lease p50']:.1f} | {crowd['lease p99']:.1f} | "
        f"p99 < 50: {verdict(crowd['lease p99'] < 50)} |",
        f"| lag of the server's event loop (most: {crowd['lag most']:.0f}) | {crowd['lag p50']:.1f} | "
        f"{crowd['lag p99']:.1f} | p99 < 50: {verdict(crowd['lag p99'] < 50)} |",
        f"| processor time of the server between two looks, 5 ms apart | {crowd['busy p50']:.1f} | "
        f"{crowd['busy p99']:.1f} | |",
        "",
        "## Memory",
        f"Resident memory over 100,000 groups, MiB after every tenth: {', '.join(f'{level:.1f}' for level in levels)}.",
        f"From a fifth to the end it changes by {growth:+.1%} (bar: flat, below 5 %: {verdict(growth < 0.05)}).",
        "",
    ]
    return "\n".join(lines)


def ask(*command: str) -> Any:
    """The figures of a process that says them and ends."""
    with process(PARTS, *command) as child:
        return msgspec.json.decode(line_of(child))


def main() -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        here = {"without journal": ask("local", ""), "with journal": ask("local", f"{directory}/local-journal")}
        rows = compare(directory)
        with process(PARTS, "fleet", f"{directory}/fleet") as server:
            assert line_of(server) == "ready"
            crowd = ask("crowd", f"{directory}/fleet")
        text = report(here, rows, crowd, ask("memory"))
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(text)
    print(text)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
