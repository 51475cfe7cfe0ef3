"""Lines of configuration that name data algorithms: built-in, a user's own, and every way to get one wrong."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow import Context, Filter, PolicyGroup, Prompt
from astraflow.dataflow.algorithms import spec
from astraflow.dataflow.algorithms.catalogue import CORRECTIONS, FILTERS, ORDERS, PICKS, SELECTORS
from astraflow.dataflow.algorithms.spec import Kind, labels, parse

CONTEXT = Context(seed=3, model_id="a", n_samples=8)

MINE = """
from astraflow.dataflow import Filter

class Half(Filter):
    def __init__(self, share: float = 0.5) -> None:
        self.share = share
    def apply(self, group):
        return group.keeping(group.samples[: int(len(group.samples) * self.share)])

class Nothing:
    pass

def rich(group, least: float = 0.5) -> bool:
    return group.mean >= least

def short(prompt, most: int = 8) -> bool:
    return len(prompt.messages[0].content) <= most

constant = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_algorithms.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_algorithms", raising=False)
    return "my_algorithms"


def test_a_line_is_a_name_with_options_that_are_literals() -> None:
    assert parse("greso") == ("greso", {})
    assert parse(" a.b:C ( x = 1, y=[1, 'z'] ) ") == ("a.b:C", {"x": 1, "y": [1, "z"]})
    assert labels(["greso", "a.b:C(x=1)", "a.b:C(x=2)"]) == ["greso", "C", "C#2"]


@pytest.mark.parametrize("kind", [SELECTORS, FILTERS, CORRECTIONS, ORDERS, PICKS], ids=lambda kind: kind.name)
def test_every_built_in_algorithm_is_of_its_kind(kind: Kind[Any]) -> None:
    needed = {"stages": "(levels=[1, 2])", "overlong_penalty": "(longest=8, cushion=2)"}
    for name in kind.built_in:
        assert isinstance(kind.build(name + needed.get(name, ""), CONTEXT), kind.protocol)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("zero advantage", "cannot be read: write name"),
        ("greso(0.5)", "options are given by name"),
        ("greso(p=)", "the options cannot be read"),
        ("greso(p=half)", "the options cannot be read"),
        ("greso(**{'p': 1})", "options are given by name"),
        ("gresso", "there is no Selector 'gresso'; did you mean 'greso'"),
        ("qqq", "there is no Selector 'qqq'; known: accept_all, cool_down"),
        ("greso(floor_esy=0.1)", "unknown option 'floor_esy'; did you mean 'floor_easy'"),
        ("greso(context=1)", "unknown option 'context'"),
        ("accept_all(x=1)", "unknown option 'x'; it takes none"),
        ("greso(p='high')", "option 'p': Expected `float`, got `str`"),
        ("greso(p=1.5)", "p is 1.5"),
        ("stages", "the option 'levels' is missing"),
        ("no_such_module:Thing", "the module 'no_such_module' cannot be imported"),
        ("my_algorithms:Hal", "my_algorithms has no 'Hal'; did you mean 'Half'"),
        ("my_algorithms:Half", "is no Selector: it lacks admits, advance, chosen, outcome"),
        ("my_algorithms:constant", "is of type int: it must be a class or a function"),
    ],
)
def test_a_wrong_line_says_what_is_wrong_and_what_is_near(line: str, says: str, mine: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        SELECTORS.build(line, CONTEXT)
    assert repr(line) in str(caught.value)


def test_a_kind_that_functions_cannot_be_says_so(mine: str) -> None:
    with pytest.raises(ValueError, match="is a function; a Pick must be a class"):
        PICKS.build("my_algorithms:rich", CONTEXT)


def test_a_users_own_by_path_as_class_or_function(kit: Any, mine: str) -> None:
    group = PolicyGroup(prompt=kit.prompts(1)[0]).keeping(kit.samples(0.0, 0.0, 1.0, 1.0))
    half = FILTERS.build("my_algorithms:Half(share=0.75)", CONTEXT)
    assert [s.sequence.reward for s in half.apply(group).samples] == [0.0, 0.0, 1.0]
    assert FILTERS.build("my_algorithms:rich", CONTEXT).apply(group) == group
    assert FILTERS.build("my_algorithms:rich(least=0.6)", CONTEXT).apply(group).samples == ()
    prompt: Prompt = kit.prompts(1)[0]
    assert SELECTORS.build("my_algorithms:short", CONTEXT).admits(prompt)
    assert not SELECTORS.build("my_algorithms:short(most=2)", CONTEXT).admits(prompt)


def test_a_users_own_by_entry_point(kit: Any, mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (EntryPoint(name="half", value="my_algorithms:Half", group=spec.GROUP),)
    monkeypatch.setattr(spec, "entry_points", lambda group: found if group == spec.GROUP else ())
    made = FILTERS.build("half(share=1)", CONTEXT)
    assert isinstance(made, Filter)
    assert type(made).__name__ == "Half"
    with pytest.raises(ValueError, match="did you mean 'half'"):
        FILTERS.build("halve", CONTEXT)
