"""One sample of a task: run its workflow against the policies and say how it ended.

Invariant: whatever a workflow does, its sample ends in exactly one `SampleResult`: ok, failed with the error, or timed
out. An error is never a reward of 0: a failed sample carries no sequences.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping

import anyio
import structlog

from astraflow.dataflow import RolloutTask, SampleResult, Trajectory, TrajectoryStatus

from .handles import Handle, Policy, Transcript
from .interface import EngineGone, Outcome, Workflow
from .meter import Meter
from .registry import listed, nearest

log = structlog.get_logger(__name__)


def result_of(
    task: RolloutTask,
    index: int,
    trajectory: Trajectory,
    *,
    worker_id: str,
    leased_at: float,
    tokens: int,
    incarnations: dict[str, int],
) -> SampleResult:
    """`leased_at` is on anyio's clock; `tokens` were sampled; `incarnations` are those of the weights it began with."""
    return SampleResult(
        task_id=task.task_id,
        sample_index=index,
        attempt=task.attempt,
        worker_id=worker_id,
        trajectory=trajectory,
        seconds=anyio.current_time() - leased_at,
        tokens=tokens,
        incarnations=incarnations,
    )


async def run_sample(
    task: RolloutTask,
    index: int,
    workflows: Mapping[str, Workflow],
    policies: Mapping[str, Policy],
    *,
    meter: Meter | None = None,
    reraise: bool = False,
) -> Trajectory:
    """Run sample `index` of `task`; whoever cancels the meter's scope times it out.

    An exception of the workflow (its rewards and metrics included: NaN is one) gives the status "failed" with type,
    message and place in `error`; its traceback is logged. With `reraise` it is raised instead, with notes that name the
    task, the sample and the policy. Cancelling the caller cancels the rollout and its generations.

    Raises:
        EngineGone: an engine died; that is not this sample's failure.
    """
    transcript = Transcript()
    meter = meter or Meter()
    handles = {
        name: Handle(name, policy, task.sampling[name], task, index, transcript, meter)
        for name, policy in policies.items()
        if name in task.sampling
    }
    with meter.scope as scope:
        try:
            workflow = find_workflow(workflows, task.workflow)
            outcome = await outcome_of(workflow, task, handles)
            return completed(outcome, handles, transcript)
        except EngineGone:
            raise
        except Exception as error:
            error.add_note(f"task {task.task_id!r}, sample {index}, attempt {task.attempt}, workflow {task.workflow!r}")
            if reraise:
                raise
            failed = unfinished("failed", described(error, task, index), transcript)
            # Plain text: a rendered traceback with local variables takes long enough to stall the event loop.
            log.warning("sample_failed", error=failed.error, traceback="".join(traceback.format_exception(error)))
            return failed
    assert scope.cancelled_caught
    return unfinished("timed_out", f"task {task.task_id!r} sample {index}: not done in time", transcript)


async def outcome_of(workflow: Workflow, task: RolloutTask, handles: Mapping[str, Handle]) -> Outcome:
    """What the workflow says.

    Raises:
        RuntimeError: it waited for something that was cancelled, while nobody cancelled the rollout.
    """
    try:
        return await workflow(task, handles)
    except anyio.get_cancelled_exc_class() as error:
        if anyio.current_effective_deadline() == -math.inf:
            raise
        raise RuntimeError("the workflow waited for something that was cancelled") from error


def find_workflow(workflows: Mapping[str, Workflow], name: str) -> Workflow:
    """Raises LookupError if this worker has no such workflow."""
    if name not in workflows:
        raise LookupError(f"this worker has no workflow {name!r}; it has {listed(workflows)}{nearest(name, workflows)}")
    return workflows[name]


def completed(outcome: Outcome, handles: Mapping[str, Handle], transcript: Transcript) -> Trajectory:
    """The trajectory of a workflow that came to its end.

    Raises:
        ValueError: a metric is not finite, or a sequence does not hold its invariants.
    """
    for name, value in outcome.metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name!r} is {value}; leave out what could not be measured")
    sequences = tuple(sequence for handle in handles.values() for sequence in handle.sequences())
    for sequence in sequences:
        sequence.check()
    return Trajectory(
        sequences=sequences,
        messages=outcome.messages or tuple(transcript.messages),
        metrics={name: float(value) for name, value in outcome.metrics.items()},
    )


def unfinished(status: TrajectoryStatus, error: str, transcript: Transcript | None = None) -> Trajectory:
    """The trajectory of a sample that came to nothing: what was said, for people, and why."""
    return Trajectory(status=status, error=error, messages=tuple(transcript.messages) if transcript else ())


def described(error: Exception, task: RolloutTask, index: int) -> str:
    """One line: what was raised, where, for which sample."""
    place = ""
    frame = error.__traceback__
    while frame is not None:
        place = f"{frame.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.tb_lineno}"
        frame = frame.tb_next
    return f"task {task.task_id!r} sample {index}: {type(error).__name__}: {error} ({place})"
