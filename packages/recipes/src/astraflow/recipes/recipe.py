"""A recipe: what people run. Data source + workflow + scoring + presets, each part typed, under one name.

Invariant: everything a service needs to take its part in a run follows from (recipe, configuration) alone, so that the
same run can be built in one process, in several, or by hand with `recipes serve`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from astraflow.dataflow import EvalSuite, PromptSource

from .config import RunConfig

Config = TypeVar("Config", bound=RunConfig)
Consumed = TypeVar("Consumed", bound=RunConfig, contravariant=True)


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the summary: metric `metric` of suite `suite`, shown as `title`."""

    title: str
    suite: str
    metric: str


class Parts(Protocol[Consumed]):
    """What a recipe's module provides."""

    def source(self, config: Consumed, /) -> PromptSource:
        """Training prompts, in an order that the seed decides."""
        ...

    def suites(self, config: Consumed, /) -> Sequence[EvalSuite]:
        """Held-out evaluations, run before and after training."""
        ...


class Recipe(msgspec.Struct, Generic[Config], frozen=True, kw_only=True):
    """`workflows` maps the names tasks carry to "module:function"; the first preset without the needs of a GPU is
    the default where there is none."""

    name: str
    summary: str
    parts: Parts[Config]
    presets: Mapping[str, Config]
    default_preset: str
    gpu_preset: str
    workflow: str
    workflows: Mapping[str, str]
    suites: tuple[str, ...]
    headlines: tuple[Headline, ...]
    view_metrics: tuple[str, ...] = ()
    """Trajectory metrics the live view shows."""
    comparison: str = ""
    """A recipe that is several runs, compared: "module:function", called with (recipe, configuration, run directory,
    console) in place of one run."""
