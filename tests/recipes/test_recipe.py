from __future__ import annotations

import msgspec
import pytest

from astraflow.raas import load_workflow
from astraflow.recipes.math_multi_agent import RECIPE, TINY
from astraflow.recipes.registry import load_recipe, recipe_names
from astraflow.recipes.services import build_dataflow


@pytest.mark.parametrize("name", recipe_names())
async def test_a_recipe_is_whole(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert {recipe.default_preset, recipe.gpu_preset} <= set(recipe.presets)
    assert recipe.workflow in recipe.workflows
    for address in recipe.workflows.values():
        load_workflow(address)


async def test_the_suites_are_the_named_ones_and_hold_out_what_is_trained() -> None:
    config = msgspec.structs.replace(TINY, eval=msgspec.structs.replace(TINY.eval, problems=20))
    suites = RECIPE.parts.suites(config)
    assert tuple(suite.name for suite in suites) == RECIPE.suites
    assert {line.suite for line in RECIPE.headlines} <= set(RECIPE.suites)
    source = RECIPE.parts.source(config)
    trained = {prompt.metadata["expression"] for prompt in (source.next() for _ in range(300)) if prompt}
    held_out = {prompt.metadata["expression"] for suite in suites for prompt in suite.prompts}
    assert trained
    assert not trained & held_out
    assert all(suite.workflow in RECIPE.workflows for suite in suites)


async def test_the_dataflow_can_be_built_without_evaluation() -> None:
    config = msgspec.structs.replace(TINY, eval=msgspec.structs.replace(TINY.eval, problems=0))
    assert RECIPE.parts.suites(config) == []
    await build_dataflow(RECIPE, config, None)
