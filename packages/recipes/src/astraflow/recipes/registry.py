"""The recipes there are, by name, each imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any

from .recipe import Recipe

RECIPES = {
    "math-multi-agent": "astraflow.recipes.math_multi_agent",
    "math-efficient-data": "astraflow.recipes.math_efficient_data",
    "compare-losses": "astraflow.recipes.compare_losses",
}


def recipe_names() -> list[str]:
    return list(RECIPES)


def load_recipe(name: str) -> Recipe[Any]:
    recipe = importlib.import_module(RECIPES[name]).RECIPE
    assert isinstance(recipe, Recipe)
    return recipe
