"""How a dataflow keeps its small states in the journal, and how it goes on from one.

Invariant: what `resume` makes of a journal is what the dataflow that wrote it was at the last transaction, except for
clocks: leases, silences and windows count from now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from .algorithms.stage import Stage
from .dispatch import Dispatch, DispatchState
from .evaluations import Evaluations
from .interface import Phase
from .journal import JournalError, NoJournal, Restored
from .policy import PolicyState, PolicyStream
from .selection import Selection
from .sources import PromptSource

decode = msgspec.msgpack.decode


def all_stages(source: PromptSource, selection: Selection, policies: Mapping[str, PolicyStream]) -> dict[str, Stage]:
    """Everything with a state of its own, by a name that is unique in the run: the prompt source, the selection and its
    selectors, every policy's filters and serving."""
    stages: dict[str, Stage] = {"source": source, "selection": selection}
    for model_id, chain in selection.chains.items():
        stages.update({f"{model_id}/selector/{name}": stage for name, stage in chain.items()})
        stages.update({f"{model_id}/{name}": stage for name, stage in policies[model_id].stages.items()})
    return stages


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
    evaluations: Evaluations,
    now: float,
) -> None:
    """Bring these, which are fresh, to where the journal was. An algorithm that is configured anew begins anew.

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
    evaluations.restore(restored.evaluations)
