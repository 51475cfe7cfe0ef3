"""The `dataflow` command: what a journal holds, for people; also while a dataflow writes it.

Invariant: it only reads, and in one transaction, so that its figures belong together.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from .arrays import Array
from .interface import Evaluation, RolloutTask, StepReport, Trajectory
from .journal import JournalError, open_for_reading
from .journal.apply import INDEX_BITS, samples_of
from .journal.codec import Codec
from .policy import PolicyState
from .sequence import Sequence as TokenSequence

decode = msgspec.msgpack.decode
Lines = Iterator[str]


def main() -> None:
    """Entry point of the `dataflow` command."""
    inspect_journal(sys.argv[1:], prog="dataflow")


def inspect_journal(arguments: Sequence[str], *, prog: str, place: Callable[[Path], Path] = lambda path: path) -> None:
    """Parse and print. `place` finds the journal by what was named on the command line."""
    parser = argparse.ArgumentParser(prog=prog, description="What a dataflow's journal holds.")
    if prog == "dataflow":
        parser.add_argument("command", choices=["inspect"])
    parser.add_argument("path", type=Path, help="the journal")
    parser.add_argument("--groups", type=int, metavar="N", help="the newest N groups")
    parser.add_argument("--batches", type=int, metavar="N", help="the newest N batches")
    parser.add_argument("--versions", type=int, metavar="N", help="the newest N versions")
    parser.add_argument("--trajectory", metavar="TASK/SAMPLE", help="one trajectory to read, as sums/17/3")
    chosen = parser.parse_args(list(arguments))
    try:
        with closing(open_for_reading(place(chosen.path))) as db:
            db.execute("BEGIN")
            for line in pages(Journaled(db), chosen):
                print(line)
    except JournalError as error:
        parser.exit(2, f"{prog}: {error}\n")
    except BrokenPipeError:
        sys.stderr.close()  # `| head`: nobody reads on


def pages(journal: Journaled, chosen: argparse.Namespace) -> Lines:
    asked = (chosen.groups, chosen.batches, chosen.versions, chosen.trajectory)
    if all(what is None for what in asked):
        yield from journal.overview()
    if chosen.versions is not None:
        yield from journal.versions(chosen.versions)
    if chosen.groups is not None:
        yield from journal.groups(chosen.groups)
    if chosen.batches is not None:
        yield from journal.batches(chosen.batches)
    if chosen.trajectory is not None:
        yield from journal.trajectory(chosen.trajectory)


class Journaled:
    """The pages about one journal."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._codec = Codec()

    # --- everything at a glance --------------------------------------------------------------------------------

    def overview(self) -> Lines:
        state = {str(key): bytes(value) for key, value in self._db.execute("SELECT key, value FROM state")}
        yield f"phase      {decode(state['phase']) if 'phase' in state else 'nothing was written yet'}"
        if "stage/source" in state:
            yield f"source     {_told(decode(state['stage/source']))}"
        counts = self._db.execute(
            "SELECT purpose, count(*), sum(open), count(group_id) FROM groups LEFT JOIN tasks ON id = group_id "
            "GROUP BY purpose ORDER BY purpose DESC"
        )
        for purpose, total, opened, readable in counts:
            yield f"groups     {purpose}: {total} remembered, {opened} of them open, {readable} readable"
        for key, value in sorted(state.items()):
            if key.startswith("policy/"):
                yield ""
                yield from self._policy(key.removeprefix("policy/"), decode(value, type=PolicyState))
        evaluations = list(self._evaluations())
        if evaluations:
            yield ""
            yield from table(("evaluation", "suite", "done", "missing", "versions", "figures"), evaluations)

    def _policy(self, model_id: str, state: PolicyState) -> Lines:
        lineage = state.lineage
        buffered, kept = self._count("sequences", "buffered", model_id), self._count("batches", "kept", model_id)
        yield f"policy {model_id}"
        yield f"  version      {state.version}, incarnation {lineage.incarnation}, checkpoints {lineage.checkpoints}"
        if state.published is not None:
            yield f"  weights      {state.published.weights} {state.published.digest}"
        yield f"  sequences    {state.produced} taken, {state.consumed} trained, {buffered} buffered"
        yield f"  dropped      {_told(state.dropped) or 'none'}"
        yield f"  batches      {self._count('batches', '1', model_id)} remembered, {kept} may be served again"

    def _count(self, table_name: str, condition: str, model_id: str) -> int:
        query = f"SELECT count(*) FROM {table_name} WHERE {condition} AND model_id = ?"
        return int(self._db.execute(query, (model_id,)).fetchone()[0])

    def _evaluations(self) -> Iterator[tuple[str, ...]]:
        for label, report in self._db.execute("SELECT label, report FROM evaluations ORDER BY id").fetchall():
            if report is None:
                done, total = self._db.execute(
                    "SELECT sum(NOT open), count(*) FROM groups WHERE evaluation = ?", (label,)
                ).fetchone()
                yield label, "goes on", f"{done or 0}/{total} groups", "", "", ""
                continue
            for suite in self._codec.unpack(report, Evaluation).suites:
                figures = ", ".join(
                    f"{name} {metric.mean:.3f} [{metric.low:.3f}, {metric.high:.3f}]"
                    for name, metric in suite.metrics.items()
                )
                yield (
                    label,
                    suite.suite,
                    f"{suite.done}/{suite.total}",
                    str(suite.missing),
                    _told(suite.versions),
                    figures,
                )

    # --- lists -------------------------------------------------------------------------------------------------

    def versions(self, newest: int) -> Lines:
        rows = self._db.execute(
            "SELECT model_id, version, incarnation, batch_id, digest, report FROM versions ORDER BY id DESC LIMIT ?",
            (newest,),
        )
        shown = []
        for model_id, version, incarnation, batch_id, digest, report in rows:
            metrics = decode(report, type=StepReport).metrics if report else {}
            shown.append((model_id, str(version), str(incarnation), batch_id, digest, _told(metrics)))
        yield from table(("policy", "version", "incarnation", "of batch", "digest", "metrics"), shown)

    def batches(self, newest: int) -> Lines:
        rows = self._db.execute(
            "SELECT batch_id, model_id, version, incarnation, samples, kept FROM batches ORDER BY id DESC LIMIT ?",
            (newest,),
        )
        shown = [
            (batch_id, model_id, f"{version} -> {version + 1}", str(incarnation), str(samples), "yes" if kept else "no")
            for batch_id, model_id, version, incarnation, samples, kept in rows
        ]
        yield from table(("batch", "policy", "makes", "cut under", "samples", "may be served again"), shown)

    def groups(self, newest: int) -> Lines:
        rows = self._db.execute(
            "SELECT id, task_id, prompt_id, open, attempt, worker FROM groups ORDER BY id DESC LIMIT ?", (newest,)
        ).fetchall()
        shown = []
        for group, task_id, prompt_id, opened, attempt, worker in rows:
            status = "open" if opened else "closed"
            shown.append((task_id, prompt_id, status, str(attempt + 1), worker, self._outcomes(group)))
        yield from table(("task", "prompt", "status", "leases", "worker", "what became of its samples"), shown)

    def _outcomes(self, group: int) -> str:
        counts: Counter[str] = Counter()
        query = "SELECT model_id, coalesce(outcome, 'buffered') FROM sequences WHERE sample >= ? AND sample < ?"
        for model_id, outcome in self._db.execute(query, samples_of(group)):
            counts[f"{model_id} {outcome}"] += 1
        (inside,) = self._db.execute(
            "SELECT count(*) FROM samples WHERE id >= ? AND id < ?", samples_of(group)
        ).fetchone()
        return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items())) or f"{inside} are in"

    # --- one trajectory ----------------------------------------------------------------------------------------

    def trajectory(self, name: str) -> Lines:
        """Raises JournalError if it is not here."""
        task_id, _, index = name.rpartition("/")
        row = self._db.execute(
            "SELECT id, packed, attempt, worker FROM groups LEFT JOIN tasks ON id = group_id WHERE task_id = ?",
            (task_id,),
        ).fetchone()
        if row is None or not index.isdigit():
            raise JournalError(f"no task {task_id!r} with a sample {index!r} is remembered; --groups 20 lists some")
        group, packed, attempt, worker = row
        sample = self._db.execute(
            "SELECT status, error, packed FROM samples LEFT JOIN trajectories ON id = sample WHERE id = ?",
            (group << INDEX_BITS | int(index),),
        ).fetchone()
        if sample is None:
            raise JournalError(
                f"sample {index} of {task_id} is not in yet; leased {attempt + 1} times, last to {worker}"
            )
        if packed is None or (sample[0] == "ok" and sample[2] is None):
            raise JournalError(f"{name} has ended and is not readable any more; --groups 20 lists the newest")
        yield f"{name}, by {worker}, lease {attempt + 1}: {sample[0]} {sample[1]}".rstrip()
        yield from self._prompt(self._codec.unpack(packed, RolloutTask))
        if sample[2] is not None:
            yield from self._told(group << INDEX_BITS | int(index), self._codec.trajectory(sample[2]))

    def _prompt(self, task: RolloutTask) -> Lines:
        prompt = task.prompt
        yield f"prompt {prompt.id} of {prompt.source}, workflow {task.workflow}, reference: {prompt.reference}"

    def _told(self, sample: int, trajectory: Trajectory) -> Lines:
        if trajectory.metrics:
            yield f"metrics: {_told(trajectory.metrics)}"
        for message in trajectory.messages:
            yield f"--- {message.role} {message.name}".rstrip()
            yield message.content
        query = "SELECT position, outcome FROM sequences WHERE sample = ?"
        outcomes = dict(self._db.execute(query, (sample,)).fetchall())
        for position, sequence in enumerate(trajectory.sequences):
            yield f"=== sequence {position}: {outcomes.get(position) or 'not trained yet'}"
            yield from _sequence(sequence)


def _sequence(sequence: TokenSequence) -> Lines:
    mask, logprobs = sequence.loss_mask.numpy(), sequence.logprobs.numpy()
    mean = float(logprobs[mask].mean()) if mask.any() else 0.0
    yield (
        f"{sequence.model_id} {sequence.role}: reward {sequence.reward}, {sequence.finish_reason}, temperature "
        f"{sequence.temperature:g}, {mask.size} tokens, {int(mask.sum())} of them trained, mean log p {mean:.3f}"
    )
    yield f"versions: {_runs(sequence.versions)}"
    yield f"tokens: {' '.join(str(token) for token in sequence.tokens.numpy().tolist())}"


def _runs(versions: Array) -> str:
    """Equal values one after the other together; what was not sampled is a prompt's, a tool's or a template's."""
    runs: list[list[int]] = []
    for version in versions.numpy().tolist():
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return ", ".join(f"{count} of version {version}" if version >= 0 else f"{count} given" for version, count in runs)


def _told(values: Any) -> str:
    """A mapping in one line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """Rows under their columns, each as wide as it must be."""
    lines = [columns, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
