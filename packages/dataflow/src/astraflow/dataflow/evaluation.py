"""An evaluation: suites of prompts as tasks, and the figures of what came back.

Invariant: a sample that failed, never came back or was sampled by other versions counts as 0 in every metric and as
missing; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .estimates import Cluster, average, passes
from .figures import MetricSummary
from .interface import (
    EvaluateRequest,
    Evaluation,
    PolicyVersion,
    RolloutGroup,
    RolloutTask,
    SuiteReport,
    Trajectory,
)
from .signals import Signal
from .sources import EvalSuite

EXAMPLES = 8


class SuiteRun:
    """One suite's progress at `versions`."""

    def __init__(self, suite: EvalSuite, versions: dict[str, int]) -> None:
        self._suite = suite
        self._versions = versions
        self._prompts: list[dict[str, list[float]]] = []
        self._absent: list[int] = []
        self._elsewhere = 0
        self._examples: list[Trajectory] = []

    @property
    def total(self) -> int:
        return len(self._suite.prompts) * self._suite.n_samples

    @property
    def done(self) -> int:
        return len(self._prompts) * self._suite.n_samples

    @property
    def finished(self) -> bool:
        return self.done == self.total

    def add(self, group: RolloutGroup) -> None:
        values: dict[str, list[float]] = {}
        absent = 0
        for trajectory in group.trajectories:
            if trajectory is not None and self._sampled_elsewhere(trajectory):
                self._elsewhere += 1
                trajectory = None
            if trajectory is None:
                absent += 1
                continue
            for name, value in trajectory.metrics.items():
                values.setdefault(name, []).append(value)
            if len(self._examples) < EXAMPLES:
                self._examples.append(trajectory)
        self._prompts.append(values)
        self._absent.append(absent)

    def _sampled_elsewhere(self, trajectory: Trajectory) -> bool:
        """Is any of it sampled by another version than was asked for?"""
        for sequence in trajectory.sequences:
            version = self._versions.get(sequence.model_id)
            if version is not None and sequence.version_range not in ((version, version), (-1, -1)):
                return True
        return False

    def report(self) -> SuiteReport:
        names = sorted({name for values in self._prompts for name in values})
        binary = [name for name in names if all(v in (0.0, 1.0) for row in self._prompts for v in row.get(name, ()))]
        return SuiteReport(
            suite=self._suite.name,
            done=self.done,
            total=self.total,
            missing=sum(self._absent),
            elsewhere=self._elsewhere,
            metrics={name: average(self._clusters(name), binary=name in binary) for name in names},
            passes={name: self._passes(name) for name in binary} if self._suite.n_samples > 1 else {},
            versions=self._versions,
            examples=tuple(self._examples),
        )

    def _clusters(self, name: str) -> list[Cluster]:
        """By prompt: what is missing counts as 0, a trajectory without this metric does not count."""
        rows = [row.get(name, ()) for row in self._prompts]
        clusters = [(sum(row), len(row) + absent) for row, absent in zip(rows, self._absent, strict=True)]
        return [cluster for cluster in clusters if cluster[1]]

    def _passes(self, name: str) -> dict[int, MetricSummary]:
        """pass@k for k of 2, 4, 8 … and all samples."""
        n = self._suite.n_samples
        correct = [int(sum(row.get(name, ()))) for row in self._prompts]
        powers = (2**exponent for exponent in range(1, n.bit_length()))
        return {k: passes(k, n, correct) for k in sorted({*powers, n}) if k <= n}


class EndedEvaluation:
    """An evaluation of which only its figures are left."""

    finished = True

    def __init__(self, figures: Evaluation, changed: Signal | None = None) -> None:
        self.changed = changed or Signal()
        self._figures = figures

    def report(self) -> Evaluation:
        return self._figures


class EvaluationRun:
    """One labelled evaluation of several suites, at exactly these `versions` of the policies."""

    def __init__(self, request: EvaluateRequest, suites: Sequence[EvalSuite], versions: dict[str, int]) -> None:
        self.changed = Signal()
        self._label = request.label
        self._suites = tuple(suites)
        self._runs = {suite.name: SuiteRun(suite, versions) for suite in suites}

    def tasks(
        self, seed: int, deadline_s: float, limit_s: float, pinned: Sequence[PolicyVersion]
    ) -> Iterator[RolloutTask]:
        """Every prompt of every suite as a task; the same label and seed give the same ones."""
        for suite in self._suites:
            needed = tuple(version for version in pinned if version.model_id in suite.sampling)
            for index, prompt in enumerate(suite.prompts):
                yield RolloutTask(
                    task_id=f"eval/{self._label}/{suite.name}/{index}",
                    prompt=prompt,
                    workflow=suite.workflow,
                    n_samples=suite.n_samples,
                    sampling=suite.sampling,
                    seed=seed + index * suite.n_samples,
                    deadline_s=deadline_s,
                    limit_s=limit_s,
                    purpose="eval",
                    suite=suite.name,
                    pinned=needed,
                )

    def add(self, group: RolloutGroup) -> None:
        self._runs[group.task.suite].add(group)
        self.changed.notify()

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self._runs.values())

    def report(self) -> Evaluation:
        return Evaluation(
            label=self._label,
            finished=self.finished,
            suites=tuple(run.report() for run in self._runs.values()),
        )
