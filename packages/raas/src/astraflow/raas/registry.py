"""Engines by name, workflows by address: where a run's configuration becomes code."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from functools import reduce
from importlib.metadata import entry_points
from typing import cast

from .interface import Engine, EngineSpec, Workflow

ENGINES = "astraflow.engines"


def load_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine that an installed distribution registers as `name` in the entry-point group `astraflow.engines`.

    Raises:
        LookupError: no distribution registers that name; the message names those there are and the nearest.
        ImportError: the engine's own requirements are not installed.
    """
    installed = {entry.name: entry for entry in entry_points(group=ENGINES)}
    if name not in installed:
        raise LookupError(f"no engine {name!r} is installed; there is {listed(installed)}{nearest(name, installed)}")
    return cast("Engine", installed[name].load()(spec))


def load_workflow(address: str) -> Workflow:
    """The workflow function at `module:function`.

    Raises:
        ValueError: the address has another form, or what it names cannot be called.
        ImportError: there is no such module, or importing it failed.
        LookupError: the module has no such function; the message names the nearest.
    """
    module_name, separator, path = address.partition(":")
    if not (module_name and separator and path):
        raise ValueError(f"workflow {address!r}: write it as module:function")
    module = importlib.import_module(module_name)
    try:
        found = reduce(getattr, path.split("."), cast("object", module))
    except AttributeError as error:
        raise LookupError(f"workflow {address!r}: {error}{nearest(path, vars(module))}") from None
    if not callable(found):
        raise ValueError(f"workflow {address!r} is a {type(found).__name__}, not a function")
    return cast("Workflow", found)


def listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for an error message; empty if nothing is near."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
