"""What a person sees while a run goes on: a live table on a terminal, a line now and then elsewhere.

Pure rendering of `Status`; the loops at the end only ask for one and show it.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from astraflow.dataflow import DataflowService, Empty, PolicyStatus, Status, Trajectory, WorkerStatus

REFRESH_S = 0.5
LINE_S = 10.0


def policy_table(status: Status, steps: int) -> Table:
    table = Table(expand=True, title_justify="left")
    for name in (
        "policy",
        "version",
        "reward",
        "wait",
        "staleness",
        "buffered",
        "running",
        "train tok/s",
        "loss",
        "kl",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for p in status.policies:
        metrics = p.metrics
        table.add_row(
            p.model_id,
            f"{p.version}/{steps}",
            f"{p.reward_mean:.2f}",
            f"{p.wait_fraction:.0%}",
            f"{p.staleness_mean:.1f} (max {p.staleness_max})",
            str(p.buffered),
            str(p.running),
            f"{metrics.get('tokens_per_s', 0.0):.0f}",
            f"{metrics.get('loss', 0.0):+.3f}",
            f"{metrics.get('kl', 0.0):.4f}",
        )
    return table


def worker_table(status: Status) -> Table:
    table = Table(expand=True)
    for name in ("pool / worker", "running", "sample tok/s", "weights at", "full MB", "delta MB", "pause ms"):
        table.add_column(name, justify="left" if name == "pool / worker" else "right")
    for w in status.workers:
        table.add_row(
            f"{w.pool} / {w.worker_id}" + state(w),
            f"{w.running}/{w.capacity}",
            f"{w.tokens_per_s:.0f}",
            ", ".join(f"{name} {version}" for name, version in sorted(w.versions.items())),
            f"{w.pulled_full_bytes / 1e6:.0f}",
            f"{w.pulled_delta_bytes / 1e6:.1f}",
            f"{w.swap_pause_s * 1e3:.0f}",
            style="" if w.alive and not w.quarantine else "red",
        )
    return table


def state(worker: WorkerStatus) -> str:
    """What is wrong with a worker, if anything."""
    if not worker.alive:
        return f" (silent {worker.silent_s:.0f} s)"
    return f" (set aside: {worker.quarantine})" if worker.quarantine else ""


def exchange(trajectory: Trajectory) -> Text:
    """A sample exchange, one line a message."""
    text = Text()
    for message in trajectory.messages:
        text.append(f"{message.name or message.role}: ", style="bold")
        text.append(message.content.strip().replace("\n", " ⏎ ") + "\n")
    text.rstrip()
    return text


def screen(status: Status, stage: str, steps: int, view_metrics: tuple[str, ...]) -> RenderableType:
    """The whole live view."""
    head = Text(f"{stage}", style="bold green")
    shown = [f"{name} {status.metrics[name]:.2f}" for name in view_metrics if name in status.metrics]
    if shown:
        head.append("   " + " · ".join(shown), style="default")
    if status.pending_eval:
        head.append(f"   evaluation samples to come: {status.pending_eval}", style="default")
    parts: list[RenderableType] = [head, policy_table(status, steps), worker_table(status)]
    if status.example is not None:
        parts.append(Panel(exchange(status.example), title="newest exchange", title_align="left"))
    if status.error or status.warning:
        parts.append(Text(status.error or status.warning, style="bold red" if status.error else "yellow"))
    return Group(*parts)


def plain_policy(p: PolicyStatus, steps: int) -> str:
    return (
        f"{p.model_id} v{p.version}/{steps} reward {p.reward_mean:.2f} wait {p.wait_fraction:.0%}"
        f" stale {p.staleness_mean:.1f} buffered {p.buffered}"
    )


def plain(status: Status, stage: str, steps: int, view_metrics: tuple[str, ...]) -> str:
    """The view as one line."""
    alive = [w for w in status.workers if w.alive]
    parts = [plain_policy(p, steps) for p in status.policies] if stage == "training" else []
    if status.pending_eval:
        parts.append(f"{status.pending_eval} samples to come")
    parts += [f"{name} {status.metrics[name]:.2f}" for name in view_metrics if name in status.metrics]
    if status.warning:
        parts.append(status.warning)
    if alive:
        parts.append(f"{sum(w.tokens_per_s for w in alive):.0f} tok/s sampled")
    return f"[{stage}] {' | '.join(parts)}".rstrip()


async def watch(
    dataflow: DataflowService,
    stage: Callable[[], str],
    steps: int,
    view_metrics: tuple[str, ...],
    console: Console,
    *,
    debug: bool = False,
) -> None:
    """Show the run until cancelled: live on a terminal, else a line every `LINE_S` seconds.

    With `debug` a line whenever a stage or version changed and nothing else, so that a debugger has the terminal.
    """
    if console.is_terminal and not debug:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                status = await dataflow.status(Empty())
                live.update(screen(status, stage(), steps, view_metrics), refresh=True)
                await anyio.sleep(REFRESH_S)
    seen: object = None
    while True:
        status = await dataflow.status(Empty())
        progress = (stage(), [p.version for p in status.policies])
        if not debug or progress != seen:
            console.print(plain(status, stage(), steps, view_metrics), highlight=False, soft_wrap=True, markup=False)
        seen = progress
        await anyio.sleep(REFRESH_S if debug else LINE_S)
