"""Train from a recipe or a TOML file: what `vitrail train` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.errors import ConfigError
from vitrail.recipes import RECIPES, find_recipe
from vitrail.training.config import RunConfig
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.result import TrainingResult
from vitrail.training.run_training import run_training
from vitrail.workflows.run_report import write_run_report


def build_config(recipe: str, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run.

    Args:
        recipe: a recipe's name, or the path of a .toml file.
        overrides: `key=value` settings that replace the recipe's.

    Raises:
        ConfigError: if the recipe is unknown, a setting is wrong, or one that the recipe needs is missing.
    """
    if recipe in RECIPES or not recipe.endswith(".toml"):
        named_recipe = find_recipe(recipe)
        given_keys = {override.partition("=")[0].strip() for override in overrides}
        missing = [key for key in named_recipe.needs if not given_keys & {key, key.rpartition(".")[2]}]
        if missing:
            raise ConfigError(f"{named_recipe.name} needs {' and '.join(missing)}: {named_recipe.command}")
        return resolve(named_recipe.config, overrides)
    tree = read_toml(Path(recipe))
    tree.setdefault("run", {}).setdefault("folder", f"runs/{Path(recipe).stem}")
    return resolve(tree, overrides)


def train(config: RunConfig) -> Iterator[str]:
    """Train, and yield lines that describe the result."""
    yield from describe_result(config, run_training(config))


def describe_result(config: RunConfig, result: TrainingResult) -> Iterator[str]:
    """Yield lines on the accuracy, the files, the report, and the next commands to type."""
    if result.evaluation is not None:
        measurements = ", ".join(format_measurement(name, value) for name, value in result.evaluation.items())
        yield f"validation, on {result.evaluated:,} images: {measurements}"
    yield f"curves: {result.folder / 'curves.png'}"
    yield from write_run_report(config, result)
    yield f"model: {result.model}"
    predicts = f"vitrail predict PHOTO --model {result.folder}; " if config.objective.kind == "classification" else ""
    yield (
        f"next: {predicts}vitrail evaluate --model {result.folder} --data DATA measures it; in Python, "
        f'model = vitrail.load("{result.folder}")'
    )


def format_measurement(name: str, value: float) -> str:
    return f"{name} {value:.1%}" if name in ("accuracy", "top5") else f"{name} {value:.4f}"
