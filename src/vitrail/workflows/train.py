"""What `vitrail train` does: a recipe or a file becomes a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from vitrail.errors import ConfigError
from vitrail.inspection.inspect import after
from vitrail.recipes import RECIPES, find_recipe
from vitrail.training.config import RunConfig
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_training import TrainingResult, run_training


def configured(recipe: str, overrides: Sequence[str]) -> RunConfig:
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


def run(config: RunConfig) -> Iterator[str]:
    """Train, then lines on what came of it."""
    yield from told(config, run_training(config))


def told(config: RunConfig, result: TrainingResult) -> Iterator[str]:
    """Where everything is, a look inside the model among it, and what to type next."""
    if result.evaluation is not None:
        told = ", ".join(shown(name, value) for name, value in result.evaluation.items())
        yield f"validation, on {result.evaluated:,} images: {told}"
    yield f"curves: {result.folder / 'curves.png'}"
    yield from after(config, result)
    yield f"model: {result.model}"
    predicts = f"vitrail predict PHOTO --model {result.folder}; " if config.objective.kind == "classification" else ""
    yield (
        f"next: {predicts}vitrail evaluate --model {result.folder} --data DATA measures it; in Python, "
        f'model = vitrail.load("{result.folder}")'
    )


def shown(name: str, value: float) -> str:
    """A measurement for a person."""
    return f"{name} {value:.1%}" if name in ("accuracy", "top5") else f"{name} {value:.4f}"
