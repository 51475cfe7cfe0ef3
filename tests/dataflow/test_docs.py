"""docs/data_algorithms.md: its code runs, its lines can be built, its tables name everything there is."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.dataflow import Context
from astraflow.dataflow.algorithms.catalogue import CORRECTIONS, FILTERS, ORDERS, PICKS, SELECTORS
from astraflow.dataflow.data.open import SOURCES

PAGE = (Path(__file__).parents[2] / "docs" / "data_algorithms.md").read_text("utf-8")
CONTEXT = Context(seed=1, model_id="solver", n_samples=8)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def brevity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's code as the module it says it is."""
    (tmp_path / "brevity.py").write_text("\n\n".join(blocks("python")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "brevity", raising=False)
    return "brevity"


def test_a_filter_of_fifteen_lines(kit: Any, brevity: str) -> None:
    source = blocks("python")[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 15
    shortest = FILTERS.build(f"{brevity}:Shortest(count=2)", CONTEXT)
    group = kit.group(kit.prompts(1)[0], 0.0, 1.0, 1.0)
    samples = [
        msgspec.structs.replace(sample, sequence=kit.sequence(reward=float(i % 2), length=length))
        for i, (sample, length) in enumerate(zip(group.samples, (8, 4, 6), strict=True))
    ]
    left = shortest.apply(group.keeping(samples))
    assert [sample.sequence.tokens.shape[0] for sample in left.samples] == [4, 6]
    assert {sample.group_size for sample in left.samples} == {2}


async def test_it_runs_in_a_dataflow(kit: Any, brevity: str) -> None:
    from astraflow.dataflow import Empty

    dataflow = kit.dataflow(
        filters=(f"{brevity}:Shortest(count=2)", "zero_advantage"), selectors=(f"{brevity}:Thin(share=0.9)",)
    )
    await kit.start(dataflow)
    (task,) = await kit.lease(dataflow)
    await kit.mixed(dataflow, task)
    (policy,) = (await dataflow.status(Empty())).policies
    assert policy.dropped == {"Shortest": 2}
    assert policy.data["Thin"]["prompts"] >= 1.0


def test_a_function_and_a_state(kit: Any, brevity: str) -> None:
    prompts = kit.prompts(50)
    assert SELECTORS.build(f"{brevity}:not_too_long", CONTEXT).admits(prompts[0])
    assert not SELECTORS.build(f"{brevity}:not_too_long(most=2)", CONTEXT).admits(prompts[0])
    one, other = (SELECTORS.build(f"{brevity}:Thin(share=0.3)", CONTEXT) for _ in range(2))
    for prompt in prompts:
        one.admits(prompt)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(one.state())))
    assert [one.admits(prompt) for prompt in prompts] == [other.admits(prompt) for prompt in prompts]
    assert one.stats() == other.stats() == {"prompts": 100.0}


@pytest.mark.parametrize("kind", [SELECTORS, FILTERS, CORRECTIONS, ORDERS, PICKS, SOURCES], ids=lambda k: k.name)
def test_the_page_names_every_algorithm_there_is(kind: Any) -> None:
    for name in kind.built_in:
        assert re.search(rf"`{name}[`(]", PAGE), name


@pytest.mark.parametrize(("kind", "heading"), [(SELECTORS, "Before rollout"), (FILTERS, "After rollout")])
def test_every_line_of_the_tables_can_be_built(kind: Any, heading: str) -> None:
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) == len(kind.built_in)
    for line in lines:
        kind.build(line, CONTEXT)


def test_the_greso_line_is_the_published_setting() -> None:
    (line,) = re.findall(r"`(greso\([^`]+\))`", PAGE)
    assert vars(SELECTORS.build(line, CONTEXT)).keys() == vars(SELECTORS.build("greso", CONTEXT)).keys()
    for name in ("_floor", "_target", "_step", "_p"):
        assert vars(SELECTORS.build(line, CONTEXT))[name] == vars(SELECTORS.build("greso", CONTEXT))[name]


def test_the_configuration_files_are_configurations() -> None:
    from astraflow.dataflow import PolicyFeed, Replay

    data, sources, _ = (tomllib.loads(block) for block in blocks("toml"))
    for line in data["data"]["selectors"]:
        SELECTORS.build(line, CONTEXT)
    for line in data["data"]["filters"]:
        FILTERS.build(line, CONTEXT)
    feed = PolicyFeed(
        model_id="a",
        batch_size=256,
        order=data["data"]["order"],
        staleness=data["data"]["staleness"],
        batch_by=data["data"]["batch_by"],
        replay=msgspec.convert(data["data"]["replay"], Replay),
    )
    assert feed.replayed == 76
    assert set(sources["data"]["sources"]) == {"school", "sums"}
