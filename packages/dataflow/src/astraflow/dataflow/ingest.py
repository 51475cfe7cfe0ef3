"""From what workers submit to what trainers can use: validation, and a policy's part of a group.

Invariants: nothing malformed gets past here; a sample without a usable reward is masked, never scored 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from .checking import well_formed
from .group import PolicyGroup
from .interface import RolloutGroup, SampleResult, TrainSample, Trajectory
from .sequence import Sequence


def problems(results: Iterable[SampleResult]) -> dict[int, str]:
    """Why results cannot be taken, by their position; empty if all can. Each names the task and sample."""
    looked_at = list(results)
    sequences = [sequence for result in looked_at for sequence in result.trajectory.sequences]
    if well_formed(sequences) and all(finite(result.trajectory.metrics.values()) for result in looked_at):
        return {}
    found = ((position, malformed(result)) for position, result in enumerate(looked_at))
    return {position: problem for position, problem in found if problem is not None}


def finite(values: Iterable[float]) -> bool:
    return all(map(math.isfinite, values))


def malformed(result: SampleResult) -> str | None:
    """Why this result cannot be taken, or None. It names the task and sample."""
    for name, value in result.trajectory.metrics.items():
        if not math.isfinite(value):
            return f"{_where(result)}: metric {name!r} is {value}"
    for index, sequence in enumerate(result.trajectory.sequences):
        try:
            sequence.check()
        except ValueError as error:
            return f"{_where(result)}, sequence {index} of {sequence.model_id!r}: {error}"
    return None


def _where(result: SampleResult) -> str:
    return f"task {result.task_id} sample {result.sample_index} from {result.worker_id}"


def policy_group(group: RolloutGroup, model_id: str) -> PolicyGroup:
    """One policy's sequences of a group with their reward statistics (see `PolicyGroup.keeping`)."""
    usable: list[tuple[str, Sequence]] = []
    masked = 0
    for index, trajectory in enumerate(group.trajectories):
        if trajectory is None:
            continue
        scored = [part for part in _parts(trajectory, model_id) if part[1].reward is not None]
        masked += sum(sequence.model_id == model_id for sequence in trajectory.sequences) - len(scored)
        usable.extend((sample_id(group.task.task_id, index, position), sequence) for position, sequence in scored)
    return PolicyGroup(prompt=group.task.prompt, masked=masked).keeping(
        TrainSample(
            sequence=sequence,
            sample_id=name,
            group_id=group.task.task_id,
            group_mean=0.0,
            group_std=0.0,
            group_size=0,
        )
        for name, sequence in usable
    )


def sample_id(task_id: str, index: int, position: int) -> str:
    """What names a sequence in its run: its task, its sample and its position there (-1: the sample as a whole)."""
    return f"{task_id}/{index}.{position}"


def place_of(name: str) -> tuple[str, int, int]:
    """Task id, sample index and position that a `sample_id` names."""
    task_id, _, place = name.rpartition("/")
    index, _, position = place.partition(".")
    return task_id, int(index), int(position)


def missing_ids(group: RolloutGroup) -> tuple[str, ...]:
    """The samples of a group that are not there."""
    return tuple(
        sample_id(group.task.task_id, index, -1)
        for index, trajectory in enumerate(group.trajectories)
        if trajectory is None
    )


def sequence_ids(group: RolloutGroup, model_id: str) -> tuple[str, ...]:
    """A policy's sequences in a group, those that cannot be trained included."""
    return tuple(
        sample_id(group.task.task_id, index, position)
        for index, trajectory in enumerate(group.trajectories)
        for position, sequence in enumerate(trajectory.sequences if trajectory else ())
        if sequence.model_id == model_id
    )


def _parts(trajectory: Trajectory, model_id: str) -> list[tuple[int, Sequence]]:
    """The sequences of a policy that have something to train, with their position in the trajectory."""
    return [
        (position, sequence)
        for position, sequence in enumerate(trajectory.sequences)
        if sequence.model_id == model_id and sequence.version_range[1] >= 0
    ]
