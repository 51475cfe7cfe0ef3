"""From lines of configuration to a source of prompts: one, or a mixture of several."""

from __future__ import annotations

from collections.abc import Mapping

from ..algorithms.spec import Kind
from ..algorithms.stage import Context
from ..sources import PromptSource
from .files import DatasetSource
from .gym import GymSource
from .mixture import MixBy, MixtureSource

SOURCES: Kind[PromptSource] = Kind(
    PromptSource,  # type: ignore[type-abstract]
    {"dataset": DatasetSource, "gym": GymSource},
)


def open_sources(
    lines: Mapping[str, str], *, seed: int, weights: Mapping[str, float] | None = None, by: MixBy = "weight"
) -> PromptSource:
    """The source that `lines` name (name -> line, see docs/data_algorithms.md), mixed by `weights` if there are
    several. A source's name is the `source` of its prompts. Reads files and may download: call it in a thread.

    Raises:
        ValueError: a line is wrong, a data set cannot be read, or a weight is for no source.
    """
    context = Context(seed=seed)
    sources = {
        name: SOURCES.build(line, Context(seed=context.within("source", name).seed, source=name))
        for name, line in lines.items()
    }
    if len(sources) == 1 and not weights:
        return next(iter(sources.values()))
    return MixtureSource(context.within("mixture"), sources, weights or {}, by)
