"""Train from a recipe, a TOML file or a configuration."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

from vitrail.data.open import Data, name_data, open_data
from vitrail.errors import ConfigError
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.recipes import RECIPES, find_recipe
from vitrail.system.events import OnEvent, open_listener
from vitrail.training import resolve as resolving
from vitrail.training.config import RunConfig
from vitrail.training.copy_thread import copy_results
from vitrail.training.resolve import Settings, Tree, check_keys, merge_settings, name_settings, read_toml, to_toml
from vitrail.training.result import TrainingResult
from vitrail.training.run_training import run_training
from vitrail.workflows.run_report import write_run_report

SOURCE_KEYS = ("data.source", "source")
AUTO = "auto"
"""The value of `data.batch_size` that keeps the recipe's batch, computed in as few parts as fit into the memory."""


def train(
    recipe: str | Path | RunConfig,
    settings: Settings | None = None,
    *,
    data: Data | None = None,
    on_event: OnEvent | None = None,
) -> TrainingResult:
    """Train a model, from the beginning or from the newest checkpoint in its folder, and write its report.

        result = vitrail.train("cifar10-stem", {"data.source": "cifar10/", "run.seed": 1})
        result.model, result.accuracy, result.folder

    Args:
        recipe: A recipe's name (`vitrail train --list` shows them), the path of a .toml file, or a configuration.
        settings: What is to be different: a dictionary such as {"schedule.steps": 300}, or `key=value` texts.
            "data.batch_size": "auto" keeps the recipe's batch, and finds in how many parts it fits into the memory.
        data: DATA, a Source or a list of (image, label) pairs; the same as the setting `data.source`.
        on_event: Called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        training, step, train, evaluation, fewshot, checkpoint, trained: see vitrail/system/events.py.
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: the passes over images for the report.

    Returns:
        The trained model, its accuracy, where its files are, and the whole configuration.

    Raises:
        ConfigError: The recipe is unknown, or a setting is wrong or does not fit the data, the machine or the run in
            the folder.
        DataError: The data cannot be trained on.
        TrainingError: The machine failed. `Stopped` is a special case: a KeyboardInterrupt, a stop signal, or a
            KeyboardInterrupt from `on_event`. A checkpoint is saved then, and the same call goes on from there.
    """
    data, settings = _take_data(data, settings if settings is not None else ())
    if isinstance(data, list):
        data = open_data(data)  # once: it remembers what it has computed about the images
    config, fits_batch = read_config(recipe, settings, None if data is None else name_data(data))
    with open_listener(on_event) as listener:
        result = run_training(
            config, source=data, fewshot=open_training_fewshot, fits_batch=fits_batch, on_event=listener
        )
        result = write_run_report(result, source=data, on_event=listener)
        copy_results(config)
        return result


def _take_data(data: Data | None, settings: Settings) -> tuple[Data | None, Settings]:
    """Return the data and the settings without data that is no text, for which a configuration has no place."""
    if data is not None and name_settings(settings) & set(SOURCE_KEYS):
        raise ConfigError("the data was given twice: leave out data.source, or the argument data")
    if isinstance(settings, Mapping):
        for key in SOURCE_KEYS:
            if key in settings and not isinstance(settings[key], str):
                return settings[key], {name: value for name, value in settings.items() if name != key}
    return data, settings


def build_config(recipe: str | Path | RunConfig, settings: Settings = (), source: str | None = None) -> RunConfig:
    """Return the configuration of a run.

    Args:
        recipe: A recipe's name, the path of a .toml file, or a configuration.
        settings: What is to be different.
        source: The data set, in place of the recipe's.

    Raises:
        ConfigError: The recipe is unknown, a setting is wrong, or one that the recipe needs is missing.
    """
    return read_config(recipe, settings, source)[0]


def read_config(
    recipe: str | Path | RunConfig, settings: Settings = (), source: str | None = None
) -> tuple[RunConfig, bool]:
    """Return the configuration of a run as `build_config` does, and whether `data.batch_size` is to be "auto".

    The batch size in the configuration is then the recipe's.
    """
    tree = _read_recipe(recipe, name_settings(settings) | ({"data.source"} if source is not None else set()))
    if source is not None:
        tree.setdefault("data", {})["source"] = source
    merged = merge_settings(tree, settings)
    if not _asks_for_auto(merged):
        return resolving.build_config(merged), False
    del merged["data"]["batch_size"]
    if "batch_size" in tree.get("data", {}) and not _asks_for_auto(tree):
        merged["data"]["batch_size"] = tree["data"]["batch_size"]
    return resolving.build_config(merged), True


def _asks_for_auto(tree: Tree) -> bool:
    data = tree.get("data")
    return isinstance(data, dict) and data.get("batch_size") == AUTO


def _read_recipe(recipe: str | Path | RunConfig, given_keys: set[str]) -> Tree:
    """Return the values of a recipe, by section."""
    if isinstance(recipe, RunConfig):
        return tomllib.loads(to_toml(recipe))
    name = str(recipe)
    if name not in RECIPES and name.endswith(".toml"):
        tree = read_toml(Path(name))
        tree.setdefault("run", {}).setdefault("folder", f"runs/{Path(name).stem}")
        return tree
    named = find_recipe(name)
    missing = [key for key in named.needs if not given_keys & {key, key.rpartition(".")[2]}]
    if missing:
        check_keys(given_keys)  # perhaps it is there, and misspelt
        raise ConfigError(f"{named.name} needs {' and '.join(missing)}: {named.command}")
    return named.config
