"""What `vitrail train` does: a recipe or a file becomes a run."""

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
    """The configuration of a recipe by name, or of a TOML file, with `key=value` laid over it."""
    if recipe in RECIPES or not recipe.endswith(".toml"):
        found = find_recipe(recipe)
        given = {override.partition("=")[0].strip() for override in overrides}
        missing = [key for key in found.needs if not given & {key, key.rpartition(".")[2]}]
        if missing:
            raise ConfigError(f"{found.name} needs {' and '.join(missing)}: {found.command}")
        return resolve(found.config, overrides)
    tree = read_toml(Path(recipe))
    tree.setdefault("run", {}).setdefault("folder", f"runs/{Path(recipe).stem}")
    return resolve(tree, overrides)


def train(config: RunConfig) -> Iterator[str]:
    """Train, then lines on what came of it."""
    yield from describe_result(config, run_training(config))


def describe_result(config: RunConfig, result: TrainingResult) -> Iterator[str]:
    """Where everything is, a look inside the model among it, and what to type next."""
    if result.evaluation is not None:
        describe_result = ", ".join(format_measurement(name, value) for name, value in result.evaluation.items())
        yield f"validation, on {result.evaluated:,} images: {describe_result}"
    yield f"curves: {result.folder / 'curves.png'}"
    yield from write_run_report(config, result)
    yield f"model: {result.model}"
    predicts = f"vitrail predict PHOTO --model {result.folder}; " if config.objective.kind == "classification" else ""
    yield (
        f"next: {predicts}vitrail evaluate --model {result.folder} --data DATA measures it; in Python, "
        f'model = vitrail.load("{result.folder}")'
    )


def format_measurement(name: str, value: float) -> str:
    """A measurement for a person."""
    return f"{name} {value:.1%}" if name in ("accuracy", "top5") else f"{name} {value:.4f}"
