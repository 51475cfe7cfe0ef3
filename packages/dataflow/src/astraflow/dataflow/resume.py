"""How a dataflow keeps its small states in the journal, and how it goes on from one.

Invariant: what `resume` makes of a journal is what the dataflow that wrote it was at the last transaction, except for
clocks: leases, silences and windows count from now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from .algorithms.stage import Stage
from .dispatch import Dispatch, DispatchState
from .evaluation import EndedEvaluation, EvaluationRun
from .interface import Phase
from .journal import JournalError, NoJournal, OldEvaluation, Restored
from .policy import PolicyState, PolicyStream
from .sources import EvalSuite

decode = msgspec.msgpack.decode


def follow(
    journal: NoJournal,
    phase: Callable[[], Phase],
    dispatch: Dispatch,
    policies: Mapping[str, PolicyStream],
    stages: Mapping[str, Stage],
) -> None:
    """Have the journal keep what `resume` needs beside the records. The source's cursor is exact; what the other
    algorithms know may be behind by a moment."""
    for name, stage in stages.items():
        journal.follow(f"stage/{name}", stage.state, exact=name == "source")
    journal.follow("phase", phase)
    journal.follow("dispatch", dispatch.state)
    for name, policy in policies.items():
        journal.follow(f"policy/{name}", policy.state)


def resume(
    restored: Restored,
    dispatch: Dispatch,
    policies: Mapping[str, PolicyStream],
    stages: Mapping[str, Stage],
    suites: Mapping[str, EvalSuite],
    now: float,
) -> tuple[Phase, dict[str, EvaluationRun | EndedEvaluation]]:
    """Bring the fresh `dispatch`, `policies` and `stages` to where the journal was; returns the phase and the
    evaluations. An algorithm that is configured anew begins anew.

    Raises:
        JournalError: the journal is of a run that trains other policies or evaluates other suites.
        ValueError: it is of a run with another prompt source, or an algorithm with other options.
    """
    state = restored.state
    trained = {key.removeprefix("policy/") for key in state if key.startswith("policy/")}
    if trained != policies.keys():
        raise JournalError(
            f"the journal is of a run that trains {sorted(trained)}, this one trains {sorted(policies)}: "
            "name another journal"
        )
    for registration in restored.workers:
        dispatch.workers.register(registration, now)
    for name, stage in stages.items():
        kept = state.get(f"stage/{name}")
        if kept is not None:
            stage.restore(decode(kept))
    dispatch.restore(decode(state["dispatch"], type=DispatchState), restored.tasks, now)
    for name, policy in policies.items():
        policy.restore(
            decode(state[f"policy/{name}"], type=PolicyState),
            restored.buffers.get(name, ()),
            restored.batches.get(name, ()),
            restored.replayable.get(name, ()),
        )
    evaluations = {old.request.label: _evaluation(old, suites) for old in restored.evaluations}
    return decode(state["phase"], type=Phase), evaluations


def _evaluation(old: OldEvaluation, suites: Mapping[str, EvalSuite]) -> EvaluationRun | EndedEvaluation:
    if old.report is not None:
        return EndedEvaluation(old.report)
    unknown = set(old.request.suites) - suites.keys()
    if unknown:
        raise JournalError(
            f"the evaluation {old.request.label!r} of {sorted(unknown)} goes on in the journal, but this run has the "
            f"suites {sorted(suites)}: configure them, or name another journal"
        )
    run = EvaluationRun(old.request, [suites[name] for name in old.request.suites], old.versions)
    for group in old.groups:
        run.add(group)
    return run
