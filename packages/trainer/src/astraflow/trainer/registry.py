"""Trainer backends by name: entry points of the group `astraflow.trainers`, ours and third parties' alike."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import cast

from .interface import TrainerBackend

GROUP = "astraflow.trainers"


class UnknownBackend(LookupError):
    """No installed distribution registers a trainer backend of this name."""


def load_backend(name: str) -> type[TrainerBackend]:
    """The class registered under `name`, constructed from (`PolicySpec`, `TrainerConfig`).

    Raises:
        UnknownBackend: naming the installed ones and the nearest.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        near = difflib.get_close_matches(name, installed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownBackend(f"no trainer backend {name!r}; installed: {', '.join(sorted(installed)) or 'none'}{hint}")
    return cast("type[TrainerBackend]", installed[name].load())
