"""Whoever wants to hear what happens in the dataflow, such as the writer of a run's files."""

from __future__ import annotations

from typing import Protocol

from .interface import Evaluation, RolloutGroup, StepReport


class Observer(Protocol):
    """Hears what happens, on the event loop: it must only note it down."""

    def on_group(self, group: RolloutGroup, /) -> None:
        """A task is complete or was given up, for training or evaluation."""
        ...

    def on_step(self, report: StepReport, /) -> None:
        """A trainer made a step."""
        ...

    def on_evaluation(self, evaluation: Evaluation, /) -> None:
        """An evaluation has ended."""
        ...
