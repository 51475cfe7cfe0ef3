"""An evaluation: suites of prompts as tasks, and the figures of what came back.

Invariant: a sample that failed or never came back counts as 0 in every metric and as missing; nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .figures import MetricSummary
from .interface import (
    EvaluateRequest,
    Evaluation,
    RolloutGroup,
    RolloutTask,
    SuiteReport,
    Trajectory,
)
from .signals import Signal
from .sources import EvalSuite

Z95 = 1.959963984540054
EXAMPLES = 8


class Tally:
    """Mean and interval of one metric, from its sums."""

    def __init__(self) -> None:
        self._n = 0
        self._total = 0.0
        self._squares = 0.0
        self._binary = True

    def add(self, value: float) -> None:
        self._n += 1
        self._total += value
        self._squares += value * value
        self._binary = self._binary and value in (0.0, 1.0)

    def summary(self, missing: int) -> MetricSummary:
        """With `missing` zeros added: Wilson's 95 % interval for values in {0, 1}, else the normal one."""
        n = self._n + missing
        mean = self._total / n
        if self._binary:
            low, high = wilson(mean, n)
        else:
            variance = max(0.0, self._squares - n * mean * mean) / (n - 1) if n > 1 else 0.0
            half = Z95 * math.sqrt(variance / n)
            low, high = mean - half, mean + half
        return MetricSummary(mean=mean, low=low, high=high, n=n)


def wilson(mean: float, n: int) -> tuple[float, float]:
    """Wilson's score interval (1927) at 95 % for a proportion `mean` of `n`."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))


class SuiteRun:
    """One suite's progress."""

    def __init__(self, suite: EvalSuite, versions: dict[str, int]) -> None:
        self._suite = suite
        self._at = versions
        self._seen: dict[str, int] = {}
        self._done = 0
        self._missing = 0
        self._tallies: dict[str, Tally] = {}
        self._examples: list[Trajectory] = []

    @property
    def total(self) -> int:
        return len(self._suite.prompts) * self._suite.n_samples

    @property
    def finished(self) -> bool:
        return self._done == self.total

    def add(self, group: RolloutGroup) -> None:
        for trajectory in group.trajectories:
            self._done += 1
            if trajectory is None:
                self._missing += 1
            else:
                self._count(trajectory)

    def _count(self, trajectory: Trajectory) -> None:
        for name, value in trajectory.metrics.items():
            self._tallies.setdefault(name, Tally()).add(value)
        for sequence in trajectory.sequences:
            oldest = sequence.oldest_version
            if oldest >= 0:
                self._seen[sequence.model_id] = min(oldest, self._seen.get(sequence.model_id, oldest))
        if len(self._examples) < EXAMPLES:
            self._examples.append(trajectory)

    def report(self) -> SuiteReport:
        return SuiteReport(
            suite=self._suite.name,
            done=self._done,
            total=self.total,
            missing=self._missing,
            metrics={name: tally.summary(self._missing) for name, tally in sorted(self._tallies.items())},
            versions={**self._at, **self._seen},
            examples=tuple(self._examples),
        )


class EndedEvaluation:
    """An evaluation of which only its figures are left."""

    finished = True

    def __init__(self, figures: Evaluation) -> None:
        self.changed = Signal()
        self._figures = figures

    def add(self, group: RolloutGroup) -> None:
        """It has ended: what still comes is late."""

    def report(self) -> Evaluation:
        return self._figures


class EvaluationRun:
    """One labelled evaluation of several suites, at `versions` of the policies or newer."""

    def __init__(self, request: EvaluateRequest, suites: Sequence[EvalSuite], versions: dict[str, int]) -> None:
        self.changed = Signal()
        self._label = request.label
        self._min_versions = request.min_versions
        self._suites = tuple(suites)
        self._runs = {suite.name: SuiteRun(suite, {**versions, **request.min_versions}) for suite in suites}

    def tasks(self, seed: int, deadline_s: float) -> Iterator[RolloutTask]:
        """Every prompt of every suite as a task; the same label and seed give the same ones."""
        for suite in self._suites:
            for index, prompt in enumerate(suite.prompts):
                yield RolloutTask(
                    task_id=f"eval/{self._label}/{suite.name}/{index}",
                    prompt=prompt,
                    workflow=suite.workflow,
                    n_samples=suite.n_samples,
                    sampling=suite.sampling,
                    seed=seed + index * suite.n_samples,
                    deadline_s=deadline_s,
                    purpose="eval",
                    suite=suite.name,
                    min_versions={
                        model_id: version
                        for model_id, version in self._min_versions.items()
                        if model_id in suite.sampling
                    },
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
