"""What must be true of a chaos run when it is over, whatever happened in it."""

from __future__ import annotations

import sqlite3
from collections import Counter

import msgspec

from .plan import POLICIES, Plan
from .programs import Checkpoint, Served

INDEX_BITS = 16


class Verdict(msgspec.Struct, kw_only=True):
    """By policy: `trained` samples, `dropped` by reason; `faults` are sentences, none if all is well."""

    trained: dict[str, int] = {}
    dropped: dict[str, dict[str, int]] = {}
    versions: dict[str, int] = {}
    served: dict[str, int] = {}
    again: dict[str, int] = {}
    faults: list[str] = []


def judge(plan: Plan) -> Verdict:
    verdict = Verdict()
    for policy in POLICIES:
        lineage = final(plan, policy)
        if lineage is None:
            verdict.faults.append(f"{policy}: there is no final checkpoint")
            continue
        _judge_lineage(plan, policy, lineage, verdict)
        _judge_served(plan, policy, lineage, verdict)
        _judge_outcomes(plan, policy, lineage, verdict)
    return verdict


def final(plan: Plan, policy: str) -> Checkpoint | None:
    found = sorted(plan.checkpoints(policy).glob("version-*.json"))
    checkpoint = msgspec.json.decode(found[-1].read_bytes(), type=Checkpoint) if found else None
    return checkpoint if checkpoint is not None and checkpoint.finished else None


def _judge_lineage(plan: Plan, policy: str, lineage: Checkpoint, verdict: Verdict) -> None:
    """Nothing doubled, all in order, everything what it says it is; without drops nothing lost."""
    trained = Counter(sample for batch in lineage.samples for sample in batch)
    verdict.trained[policy], verdict.versions[policy] = trained.total(), lineage.version
    doubled = [sample for sample, count in trained.items() if count > 1]
    if doubled:
        verdict.faults.append(f"{policy}: {len(doubled)} samples trained more than once, as {doubled[:3]}")
    if len(lineage.consumed) != lineage.version or len(set(lineage.consumed)) != lineage.version:
        verdict.faults.append(f"{policy}: version {lineage.version} of {len(set(lineage.consumed))} batches")
    out_of_order = [name for at, name in enumerate(lineage.consumed) if int(name.rsplit("/", 1)[1]) != at]
    if out_of_order:
        verdict.faults.append(f"{policy}: batches out of order: {out_of_order[:3]}")
    made = Counter(
        (_drawn(sample) // plan.prompts, prompt, index)
        for samples, prompts in zip(lineage.samples, lineage.prompts, strict=True)
        for sample, (prompt, index) in zip(samples, prompts, strict=True)
    )
    wanted = {(e, p, i) for e in range(plan.epochs) for p in range(plan.prompts) for i in range(plan.n_samples)}
    if plan.drops:
        if made.keys() - wanted or max(made.values()) > 1:
            verdict.faults.append(f"{policy}: a prompt's sample was trained twice in an epoch")
    elif made != Counter(wanted):
        lost, more = len(wanted - made.keys()), made.total() - len(made)
        verdict.faults.append(f"{policy}: {lost} prompt samples lost, {more} doubled")


def _drawn(sample_id: str) -> int:
    """The how manieth prompt it is of."""
    return int(sample_id.split("/")[1])


def _judge_served(plan: Plan, policy: str, lineage: Checkpoint, verdict: Verdict) -> None:
    """A batch served again is the same, byte for byte; one that was committed is not."""
    served = [msgspec.json.decode(line, type=Served) for line in _lines(plan, policy)]
    digests: dict[str, str] = {}
    for batch in served:
        if digests.setdefault(batch.batch_id, batch.digest) != batch.digest:
            verdict.faults.append(f"{policy}: {batch.batch_id} was served with other contents")
    verdict.served[policy], verdict.again[policy] = len(served), len(served) - len(digests)
    if digests.keys() != set(lineage.consumed):
        verdict.faults.append(f"{policy}: {len(digests.keys() ^ set(lineage.consumed))} batches outside the lineage")


def _lines(plan: Plan, policy: str) -> list[bytes]:
    data = plan.served(policy).read_bytes()
    return data.splitlines()


def _judge_outcomes(plan: Plan, policy: str, lineage: Checkpoint, verdict: Verdict) -> None:
    """In the journal every sample of every task ended once: trained, as the lineage says, or dropped for a reason."""
    with sqlite3.connect(f"file:{plan.journal}?mode=ro", uri=True) as db:
        rows = db.execute(
            f"SELECT task_id, sample & {(1 << INDEX_BITS) - 1}, position, outcome FROM sequences "
            f"JOIN groups ON id = sample >> {INDEX_BITS} WHERE model_id = ?",
            (policy,),
        ).fetchall()
        (unfinished,) = db.execute("SELECT count(*) FROM groups WHERE open").fetchone()
    trained = {f"{task}/{index}.{position}" for task, index, position, outcome in rows if outcome == "trained"}
    if trained != {sample for batch in lineage.samples for sample in batch}:
        verdict.faults.append(f"{policy}: the journal's trained samples are not those of the checkpoint")
    ended = Counter((task, index) for task, index, _, _ in rows)
    wanted = plan.prompts * plan.epochs * plan.n_samples
    if len(ended) != wanted or max(ended.values()) > 1 or unfinished:
        verdict.faults.append(f"{policy}: {len(ended)} of {wanted} samples have ended, {unfinished} tasks are open")
    reasons = Counter(outcome or "nothing" for _, _, _, outcome in rows)
    verdict.dropped[policy] = {reason: count for reason, count in reasons.items() if reason != "trained"}
    if reasons["nothing"] or (verdict.dropped[policy] and not plan.drops):
        verdict.faults.append(f"{policy}: dropped {verdict.dropped[policy]}")
