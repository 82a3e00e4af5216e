"""vitrail train: a recipe or a file, and what is to be different."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vitrail.cli.printing import print_lines, print_table


def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name (see --list), or a .toml file.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value …", help="Such as data.source=photos/ run.seed=1.")
    ] = None,
    list_them: Annotated[
        bool, typer.Option("--list", help="List the recipes, what they cost and give, and stop.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the whole configuration as TOML, and stop.")] = False,
) -> None:
    """Train a model: supervised, by masked patches, or from other weights.

    The same command resumes a run that was stopped. Ctrl-C and SIGTERM save first (exit code 3).
    """
    from vitrail.errors import ConfigError
    from vitrail.recipes import RECIPES, find_recipe

    if list_them:
        rows = [(r.name, r.summary, r.cost, r.expected, r.command) for r in RECIPES.values()]
        columns = ("name", "what", "cost", "expected", "command")
        width = 5 if not sys.stdout.isatty() else 2  # a terminal has no room for the others; docs/recipes.md has them
        print_table("Recipes", columns[:width], [row[:width] for row in rows], left=width)
        return
    if recipe is None:
        raise ConfigError("name a recipe (`vitrail train --list` shows them) or a .toml file")
    if not recipe.endswith(".toml"):
        find_recipe(recipe)  # fails with the nearest name before torch is imported
    from vitrail.workflows.train import build_config
    from vitrail.workflows.train import train as run

    config = build_config(recipe, overrides or [])
    if show:
        from vitrail.training.resolve import to_toml

        print(to_toml(config), end="")
        return
    print_lines(run(config))
