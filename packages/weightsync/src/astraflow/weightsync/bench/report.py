"""The comparison: measured, judged, written as a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from . import memory
from .bounds import Bounds, bounds
from .data import Trained, trained
from .encodings import Encoding, encodings
from .files import FileSpeed, file_apply
from .speed import Pair, Scaling, Speed, measure, scaling

SHARES = (0.004, 0.01, 0.02, 0.05)
AT = 0.01
"""The share that the bars are about."""
INDEX, XOR, L2 = "index32 + value (AstraFlow)", "XOR + zstd-1 (as slime)", "L2"
CACHE = Path("~/.cache/astraflow/weightsync-bench")

Say = Callable[[str], None]


class Row(NamedTuple):
    """One encoding at one share; `bits` a change."""

    name: str
    ratio: float
    bits: float
    speed: Speed


class Table(NamedTuple):
    """`share` of the bf16 values changed."""

    share: float
    bound: Bounds
    rows: list[Row]

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


class Bar(NamedTuple):
    what: str
    measured: str
    passed: bool


class Results(NamedTuple):
    """`rises` are the bytes by which memory rose, by what was measured in a process of its own; `model` the bytes of
    what the publisher and the sinks were given."""

    elements: int
    tables: list[Table]
    files: FileSpeed
    scaling: Scaling
    rises: dict[str, int]
    model: int


def run(seed: int, say: Say, cache: Path = CACHE) -> Results:
    """About three minutes on two cores, and one more the first time. Needs torch. Raises AssertionError where any
    encoding does not bring back every bit."""
    say(f"training the model of seed {seed}, unless it is in {cache}")
    model = trained(seed, cache.expanduser())
    old = model.before()
    tables = [_table(model, share, say) for share in SHARES]
    pair = _pair(model, AT)
    say("files and threads")
    files, threads = file_apply(pair), scaling(_named(L2), pair, 2)
    say("memory")
    with TemporaryDirectory() as directory:
        path = Path(directory) / "pair.npz"
        memory.save(path, old, model.after(AT))
        names = [*(encoding.name for encoding in encodings()), "publisher", "file", "live"]
        rises = {name: memory.in_child(path, name) for name in names}
    elements = sum(bits.size for bits in old.values())
    return Results(elements, tables, files, threads, rises, memory.COPIES * 2 * elements)


def _table(model: Trained, share: float, say: Say) -> Table:
    pair = _pair(model, share)
    old, new = (np.concatenate([frame.view(np.uint16) for frame in side]) for side in pair)
    changed, bound = np.count_nonzero(old != new), bounds(old, new)
    rows = []
    for encoding in encodings():
        say(f"{100 * share:g} % changed: {encoding.name}")
        speed = measure(encoding, pair)
        rows.append(Row(encoding.name, pair.nbytes / speed.size, 8 * speed.size / changed, speed))
    return Table(changed / len(old), bound, rows)


def _pair(model: Trained, share: float) -> Pair:
    sides = (model.before(), model.after(share))
    return Pair(*([bits.reshape(-1).view(np.uint8) for bits in side.values()] for side in sides))


def _named(name: str) -> Encoding:
    return next(encoding for encoding in encodings() if encoding.name == name)


def judge(results: Results) -> Iterator[Bar]:
    table = min(results.tables, key=lambda table: abs(table.share - AT))
    aware, model = table.row(L2), results.model
    for name, least in ((INDEX, 6.0), (XOR, 2.5)):
        factor = table.row(name).bits / aware.bits
        yield Bar(f"L2 at 1 % at least {least:g} times smaller than {name}", f"{factor:.2f}", factor >= least)
    shares = [one.row(L2).bits / one.bound.base_free for one in results.tables]
    yield Bar(
        "L2 under the base-free bound at every share",
        ", ".join(f"{share:.2f}" for share in shares) + " of it",
        max(shares) < 1,
    )
    yield Bar(
        "decode + verify + apply of L2 at 1 % at least 1.5 GB/s", _gb(aware.speed.apply), aware.speed.apply >= 1.5e9
    )
    gain = results.files.sink / results.files.rewritten
    yield Bar(
        "a verified apply to a file at least 2 times as cheap as writing it anew",
        f"{gain:.2f} ({_gb(results.files.sink)} against {_gb(results.files.rewritten)})",
        gain >= 2,
    )
    frames, control = results.scaling
    yield Bar(
        "two threads at least 1.6 times one",
        f"{frames:.2f} (what the machine gives two threads that share nothing: {control:.2f})",
        frames >= 1.6,
    )
    rise = results.rises["publisher"]
    yield Bar(
        "a publisher's memory: one copy of the model and a few frames",
        f"{rise / model:.2f} copies",
        rise < model + 16 * 16 * 2**20,
    )
    rise = results.rises["file"]
    yield Bar("a file sink's: a few frames", f"{rise / 2**20:.0f} MiB", rise < 16 * 16 * 2**20)


def page(results: Results, seed: int) -> str:
    """Markdown."""
    return "\n".join([*_heading(results, seed), *_bars(results), *_tables(results), *_rest(results), ""])


def _heading(results: Results, seed: int) -> Iterator[str]:
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "pcodec", "zstandard", "xxhash"))
    machine = f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end"
    yield "# weightsync: what a version costs"
    yield ""
    yield "Written by `uv run python benchmarks/weightsync.py` (also `weightsync bench`)."
    yield f"Python {platform.python_version()}, {packages}; {machine}."
    yield ""
    yield f"A decoder of {results.elements / 1e6:.1f}M parameters (seed {seed}) is trained on the text of Python's"
    yield "standard library; then AdamW's last steps, their learning rate scaled until the given share of the bf16"
    yield "values changes. Every row brings back every bit. A frame is a tensor here, of up to 4.7 MB."
    yield ""


def _bars(results: Results) -> Iterator[str]:
    yield "| bar | measured | |"
    yield "|---|---|---|"
    for bar in judge(results):
        yield f"| {bar.what} | {bar.measured} | {'PASS' if bar.passed else 'FAIL'} |"
    yield ""


def _tables(results: Results) -> Iterator[str]:
    for table in results.tables:
        yield f"## {100 * table.share:.2f} % of the values changed"
        yield ""
        yield "| | ratio | bits a change | of the base-free bound | encode | apply | memory, MB |"
        yield "|---|---:|---:|---:|---:|---:|---:|"
        for row in table.rows:
            yield _row(row, table, results.rises[row.name])
        bound = table.bound
        yield _bound("bound without the old values", bound.base_free, table)
        yield _bound("bound given the old exponents", bound.given_exponent, table)
        yield ""


def _row(row: Row, table: Table, rise: int) -> str:
    figures = (
        f"{row.ratio:.1f}",
        f"{row.bits:.2f}",
        f"{row.bits / table.bound.base_free:.2f}",
        f"{row.speed.pack / 1e9:.2f}" if row.speed.pack < 1e11 else "",
        f"{row.speed.apply / 1e9:.2f}",
        f"{rise / 1e6:.1f}",
    )
    return f"| {row.name} | {' | '.join(figures)} |"


def _bound(name: str, bits: float, table: Table) -> str:
    return f"| *{name}* | {16 / table.share / bits:.1f} | {bits:.2f} | {bits / table.bound.base_free:.2f} | | | |"


def _rest(results: Results) -> Iterator[str]:
    yield "`ratio`: dense bytes for each byte sent. `encode` (comparing included) and `apply`: GB/s of dense bytes for"
    yield "each second of one core, the best of five rounds. Apply is: decode, make the new frame beside the live one,"
    yield "xxh3-128 over it, then write the live one. `memory`: what packing and unpacking at 1 % takes beside the two"
    yield "frames, in a process of its own."
    yield ""
    yield "## Whole parts"
    yield ""
    yield f"Of a model of {results.model / 1e6:.0f} MB, 1 % changed; the most by which the process's memory rose."
    yield ""
    yield "| | MB |"
    yield "|---|---:|"
    told = {
        "publisher": "publisher, a first version and a delta",
        "file": "safetensors directory, a full pull and a delta",
        "live": "live tensors, a delta: what is staged, and what undoes it",
    }
    for name, what in told.items():
        yield f"| {what} | {results.rises[name] / 1e6:.0f} |"


def _gb(speed: float) -> str:
    return f"{speed / 1e9:.2f} GB/s"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
