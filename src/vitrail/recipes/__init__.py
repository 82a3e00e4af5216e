"""Named training runs, as data: the paper's, later work's and our own. Listing them loads no torch or pydantic."""

from __future__ import annotations

from vitrail.errors import ConfigError, did_you_mean
from vitrail.recipes.better_plain import BETTER_PLAIN
from vitrail.recipes.bit import BIT_FINETUNING
from vitrail.recipes.finetuning import FINETUNING
from vitrail.recipes.joint_embedding import JOINT_EMBEDDING
from vitrail.recipes.masked_patches import MASKED_PATCHES
from vitrail.recipes.pretraining import PRETRAINING
from vitrail.recipes.recipe import DataSet, Recipe
from vitrail.recipes.small import SMALL

__all__ = ["RECIPES", "DataSet", "Recipe", "find_recipe"]

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        *(*SMALL, *PRETRAINING, *MASKED_PATCHES, *JOINT_EMBEDDING),
        *(*FINETUNING, *BIT_FINETUNING, *BETTER_PLAIN),
    )
}
"""Every recipe, by name."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name, or raise a ConfigError that suggests the nearest name."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}{did_you_mean(name, RECIPES)}; `vitrail train --list` lists them")
    return RECIPES[name]
