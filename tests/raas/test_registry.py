"""Engines by name, workflows by address, numbers out of text."""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from astraflow.raas import EngineSpec, load_engine, load_workflow, parse_last_number, registry

SPEC = EngineSpec(model_id="m", model="/models/m")


def test_an_engine_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("other", "types:SimpleNamespace", "astraflow.engines"), EntryPoint("made", "builtins:id", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)
    assert load_engine("made", SPEC) == id(SPEC)  # type: ignore[comparison-overlap]


def test_an_unknown_engine_names_those_there_are_and_the_nearest() -> None:
    with pytest.raises(LookupError, match=r"no engine 'transformer' .*transformers.*did you mean 'transformers'"):
        load_engine("transformer", SPEC)


def test_a_workflow_is_found_by_its_address() -> None:
    assert load_workflow("asyncio:Event.wait") is __import__("asyncio").Event.wait


@pytest.mark.parametrize(
    ("address", "error", "says"),
    [
        ("asyncio", ValueError, "module:function"),
        ("asyncio:", ValueError, "module:function"),
        ("asyncio:sleeep", LookupError, "did you mean 'sleep'"),
        ("asyncio:__name__", ValueError, "not a function"),
        ("no_such_module_here:f", ImportError, "no_such_module_here"),
    ],
)
def test_a_wrong_address_says_what_is_wrong(address: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        load_workflow(address)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("34 + 5 = 39.", 39),
        ("it is -1,234.50!", Decimal("-1234.5")),
        ("12-5", 5),
        ("(3)-4", 4),
        ("x = −7", -7),
        ("10,000 and 2,", 2),
        ("1,2345", 2345),
        ("3.0", 3),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, number: Any) -> None:
    assert parse_last_number(text) == number


def test_the_package_imports_without_torch_and_transformers() -> None:
    code = "import sys, astraflow.raas; sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
