"""What the command shows people: sizes, tables, sentences."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from .inspection import Inspection, VersionInfo
from .interface import PullReport
from .verification import Verification

UNITS = ("B", "kB", "MB", "GB", "TB")


def size(count: int) -> str:
    """Bytes in powers of 1000, three figures."""
    value = float(count)
    for unit in UNITS:
        if value < 999.5 or unit == UNITS[-1]:
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def ratio(dense: int, part: int) -> str:
    return f"{dense / part:.3g}x" if part else "-"


def pulled(report: PullReport) -> str:
    read = report.full_bytes + report.delta_bytes
    return (
        f"version {report.version} (incarnation {report.incarnation}): {report.kind}, {size(read)} of "
        f"{size(report.dense_bytes)} ({ratio(report.dense_bytes, read)}) in {report.stage_s + report.commit_s:.2f} s"
    )


def verified(found: Verification) -> str:
    skipped = f"; {found.unapplied} deltas start from a version no longer kept" if found.unapplied else ""
    return f"{found.versions} versions are whole: {found.frames} frames, {size(found.payload_bytes)}{skipped}"


def show_inspection(inspection: Inspection, console: Console) -> None:
    newest = inspection.versions[0]
    console.print(
        f"{inspection.url}: stream {inspection.stream!r}, version {newest.version} of incarnation "
        f"{newest.incarnation}, {newest.tensors} tensors of {size(newest.dense_bytes)}; "
        f"{len(inspection.versions)} versions in {size(inspection.total_bytes)}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False)
    for column in (
        "version",
        "incarnation",
        "delta",
        "ratio",
        "changed",
        "frames",
        "codecs",
        "anchor",
        "from an anchor",
    ):
        table.add_column(column, justify="left" if column == "codecs" else "right")
    for version in inspection.versions:
        table.add_row(*_row(version))
    console.print(table)


def _row(version: VersionInfo) -> tuple[str, ...]:
    has_delta = bool(version.delta_bytes) or not version.anchor_bytes
    return (
        str(version.version),
        str(version.incarnation),
        size(version.delta_bytes) if has_delta else "-",
        ratio(version.dense_bytes, version.delta_bytes),
        f"{version.density:.2%}" if has_delta else "-",
        f"{version.changed_frames}/{version.frames}" if has_delta else "-",
        ", ".join(f"{name} {count}" for name, count in sorted(version.codecs.items())) or "-",
        size(version.anchor_bytes) if version.anchor_bytes else "-",
        {0: "itself", 1: "1 delta", -1: "none"}.get(version.chain, f"{version.chain} deltas"),
    )
