"""Named recipes: the paper's, later work's and our own, as data. To list them loads neither torch nor pydantic."""

from __future__ import annotations

from vitrail.errors import ConfigError, did_you_mean
from vitrail.recipes.better_plain import BETTER_PLAIN
from vitrail.recipes.finetuning import FINETUNING
from vitrail.recipes.markdown import page
from vitrail.recipes.masked_patches import MASKED_PATCHES
from vitrail.recipes.pretraining import PRETRAINING
from vitrail.recipes.recipe import DataSet, Recipe
from vitrail.recipes.small import SMALL

__all__ = ["RECIPES", "DataSet", "Recipe", "find", "page"]

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe for recipe in (*SMALL, *PRETRAINING, *MASKED_PATCHES, *FINETUNING, *BETTER_PLAIN)
}
"""By name."""


def find(name: str) -> Recipe:
    """The recipe of that name; a ConfigError that names the nearest where there is none."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{did_you_mean(name, RECIPES)}; `vitrail train --list` lists them")
    return RECIPES[name]
