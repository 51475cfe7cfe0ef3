"""The evaluations of a run, by label: those that go on, and the figures of those that have ended.

Invariant: an evaluation is begun once for a label; the newest `KEPT_EVALUATIONS` that have ended can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from .config import DataflowConfig
from .evaluation import EndedEvaluation, EvaluationRun
from .interface import EvaluateRequest, Evaluation, PolicyVersion, RolloutGroup
from .journal import EvaluationBegun, EvaluationEnded, JournalError, OldEvaluation, Record
from .sources import EvalSuite
from .tasks import OpenTask

KEPT_EVALUATIONS = 256

log = structlog.get_logger(__name__)


class Evaluations:
    """`record` takes down what becomes of them."""

    def __init__(self, config: DataflowConfig, suites: Iterable[EvalSuite], record: Callable[[Record], None]) -> None:
        self._config = config
        self._suites = {suite.name: suite for suite in suites}
        self._record = record
        self._runs: dict[str, EvaluationRun | EndedEvaluation] = {}
        self._last = ""

    def due(self, versions: Iterable[PolicyVersion]) -> EvaluateRequest | None:
        """The evaluation of all suites that falls due now that the policies are at these versions, if one does: the
        first time that the slowest of them has made another `evaluate_every` versions. One is left out while the last
        one still goes on."""
        every, numbers = self._config.evaluate_every, [version.version for version in versions]
        if not every or not self._suites or len(numbers) < len(self._config.policies):
            return None
        reached = min(numbers) // every * every
        label = f"version {reached}"
        if not reached or label == self._last or label in self._runs:
            return None
        before, self._last = self._runs.get(self._last), label
        if before is not None and not before.finished:
            log.warning("evaluation_left_out", label=label, still_going=before.report().label)
            return None
        return EvaluateRequest(label=label, suites=tuple(self._suites))

    def begin(self, request: EvaluateRequest, pinned: Sequence[PolicyVersion]) -> list[OpenTask]:
        """The tasks of a new evaluation at these versions of the policies; none if the label is known.

        Raises:
            ValueError: a suite is not configured, or none is named.
        """
        if request.label in self._runs:
            return []
        unknown = [name for name in request.suites if name not in self._suites]
        if unknown or not request.suites:
            raise ValueError(f"no suite {unknown}: the run has {sorted(self._suites)}")
        versions = {version.model_id: version.version for version in pinned}
        self._record(EvaluationBegun(request, versions))
        run = self._runs[request.label] = self._run(request, versions)
        ended = [label for label, old in self._runs.items() if old.finished]
        for label in ended[:-KEPT_EVALUATIONS]:
            del self._runs[label]
        tasks = run.tasks(self._config.seed, self._config.task_deadline_s, self._config.limit_s, pinned)
        return [OpenTask(task, evaluation=request.label) for task in tasks]

    def get(self, label: str) -> EvaluationRun | EndedEvaluation:
        """Raises ValueError for an unknown label."""
        run = self._runs.get(label)
        if run is None:
            raise ValueError(f"no evaluation {label!r}: there are {sorted(self._runs)}")
        return run

    def add(self, label: str, group: RolloutGroup) -> Evaluation | None:
        """A group of an evaluation is complete, or was given up. Returns the figures if it was the last one."""
        run = self._runs.get(label)
        if not isinstance(run, EvaluationRun):
            return None
        run.add(group)
        if not run.finished:
            return None
        report = run.report()
        self._runs[label] = EndedEvaluation(report, run.changed)
        self._record(EvaluationEnded(report))
        return report

    def wake(self) -> None:
        """Let everybody who waits look again."""
        for run in self._runs.values():
            run.changed.notify()

    def restore(self, evaluations: Iterable[OldEvaluation]) -> None:
        """Go on with these.

        Raises:
            JournalError: one that goes on has a suite that is not configured.
        """
        for old in evaluations:
            label = old.request.label
            if old.report is not None:
                self._runs[label] = EndedEvaluation(old.report)
                continue
            unknown = set(old.request.suites) - self._suites.keys()
            if unknown:
                raise JournalError(
                    f"the evaluation {label!r} of {sorted(unknown)} goes on in the journal, but this run has the "
                    f"suites {sorted(self._suites)}: configure them, or name another journal"
                )
            run = self._runs[label] = self._run(old.request, old.versions)
            for group in old.groups:
                run.add(group)

    def _run(self, request: EvaluateRequest, versions: Mapping[str, int]) -> EvaluationRun:
        return EvaluationRun(request, [self._suites[name] for name in request.suites], dict(versions))
