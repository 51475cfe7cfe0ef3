"""Prompts from somewhere else: `--data.sources` in place of a recipe's own."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from astraflow.recipes.cli import parse_run
from astraflow.recipes.config import ConfigError, to_toml
from astraflow.recipes.math_multi_agent import RECIPE, MathConfig
from astraflow.recipes.math_workflows import Problem
from astraflow.recipes.services import make_source


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"q": f"{i} + 1?", "a": i + 1}) + "\n" for i in range(4)))
    return f"dataset(path='{path}', prompt_column='q', answer_column='a')"


def test_sources_of_the_command_line_are_used_and_mixed(lines: str) -> None:
    args = ["--preset", "tiny", "--data.sources", "one", lines, "two", lines, "--data.weights", "two", "3"]
    _, config = parse_run(RECIPE, [*args, "--data.mix", "ratio"])
    source = make_source(RECIPE, msgspec.convert(msgspec.to_builtins(config), MathConfig))
    made = [source.next() for _ in range(8)]
    assert [prompt.source for prompt in made if prompt].count("two") == 6
    problem = Problem.of(next(prompt for prompt in made if prompt))
    assert (problem.opening, problem.reversed_digits, problem.claim) == ("", False, None)
    assert f'one = "{lines}"' in to_toml(config)


def test_without_sources_the_recipes_own_are_used() -> None:
    prompt = make_source(RECIPE, RECIPE.presets["tiny"]).next()
    assert prompt is not None
    assert prompt.source == "basic_arithmetic/train"


def test_a_source_that_cannot_be_opened_is_an_error_of_the_configuration() -> None:
    _, config = parse_run(RECIPE, ["--preset", "tiny", "--data.sources", "one", "dataset(path='no/such.jsonl')"])
    with pytest.raises(ConfigError, match=r"--data\.sources: .*no/such\.jsonl cannot be loaded"):
        make_source(RECIPE, msgspec.convert(msgspec.to_builtins(config), MathConfig))
