"""What a suite is about to do: its plan, the data sets to transfer to, and the configuration of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError
from vitrail.recipes import Recipe
from vitrail.system.files import short_name
from vitrail.training.build import count_steps
from vitrail.training.config import RunConfig
from vitrail.training.resolve import Settings, flatten_settings, name_settings, resolve
from vitrail.training.run_folder import find_differences

RUNS = 3
"""Runs on all training images; the paper reports their mean and deviation."""
DECIDED = {
    "weights": "model",
    "name": "model",
    "source": "data",
    "validate_on": "what it chooses by",
    "holdout": "what it chooses by",
    "seed": "runs",
}
"""Keys that a suite sets itself, and the option that decides them."""
RATE, FOLDER = "learning_rate", "folder"

Extra = Callable[[Source, Indices], dict[str, int]]
"""Computes more counts, by name, from the test images and the predictions."""


@dataclass(frozen=True)
class SuitePlan:
    """The settings of all data sets of a suite."""

    model: str
    folder: Path
    runs: int
    rates: tuple[float, ...] | None
    """Learning rates to try on every data set; None means those of the recipe."""
    settings: Settings

    @property
    def changed_keys(self) -> set[str]:
        """The keys of the settings, without their sections."""
        return {_shorten_key(name) for name in name_settings(self.settings)}


def make_plan(
    suite: str,
    model: str | Path,
    folder: str | Path | None,
    runs: int,
    settings: Settings,
    rates: Sequence[float] | None,
) -> SuitePlan:
    """Check the arguments and return a plan; its folder is `folder`, else run.folder=…, else runs/suite-NAME-MODEL."""
    if runs < 1:
        raise ConfigError(f"runs = {runs}: give 1 or more; the paper has {RUNS}")
    if rates is not None and (not rates or not all(0 < rate < math.inf for rate in rates)):
        raise ConfigError(f"rates = {', '.join(map(str, rates)) or 'none'}: give learning rates above 0")
    if isinstance(settings, Mapping):
        settings = dict(flatten_settings(settings))
    for name in name_settings(settings):
        key = _shorten_key(name)
        if key in DECIDED:
            raise ConfigError(f"{name}: a suite decides {key} itself, by {DECIDED[key]}: leave it out")
        if key == RATE and rates is not None:
            raise ConfigError(f"{name} and rates are one too many: give one of them")
    settings, setting = _take_folder(settings)
    chosen = folder or setting or Path("runs") / f"suite-{suite}-{short_name(str(model))}"
    return SuitePlan(str(model), Path(chosen), runs, None if rates is None else tuple(dict.fromkeys(rates)), settings)


def _shorten_key(name: str) -> str:
    return name.rpartition(".")[2]


def _take_folder(settings: Settings) -> tuple[Settings, str]:
    """Return the settings without run.folder, and its value, empty if there is none."""
    if isinstance(settings, Mapping):
        folders = {name: str(value) for name, value in settings.items() if _shorten_key(name) == FOLDER}
        return {name: value for name, value in settings.items() if name not in folders}, "".join(folders.values())
    remaining, folder = [], ""
    for setting in settings:
        name, _, value = setting.partition("=")
        if _shorten_key(name.strip()) == FOLDER and value.strip():
            folder = folder or value.strip()
        else:
            remaining.append(setting)
    return tuple(remaining), folder


def _add_setting(settings: Settings, name: str, value: int) -> Settings:
    return {**settings, name: value} if isinstance(settings, Mapping) else [*settings, f"{name}={value}"]


@dataclass(frozen=True)
class TransferTarget:
    """A data set that a model can be transferred to."""

    name: str
    recipe: Recipe
    changes: dict[str, dict[str, Any]]
    """Changes of the recipe for this data set, by section."""
    choosing: dict[str, Any]
    """Values of the section `data` in the runs that choose the learning rate."""
    chosen_on: str
    """The images that choose the learning rate, in words."""
    training: dict[str, Any]
    """Values of the section `data` in the runs on all training images."""
    images: tuple[int, int]
    """Number of training images while choosing, and in the final runs."""
    test: Source
    notes: tuple[str, ...] = ()
    """Sentences about data that is not what the name of the data set promises."""
    extra: Extra | None = None
    prepare: Callable[[RunConfig, bool], None] | None = None
    """Called before the first run with the configuration and whether a learning rate is to be chosen."""


def make_config(plan: SuitePlan, target: TransferTarget) -> RunConfig:
    """Return the configuration of a run that chooses the learning rate.

    If the settings change the length of the training, the warm-up keeps its share of it.
    """
    tree = _build_tree(plan, target)
    settings = plan.settings
    if plan.changed_keys & {"steps", "epochs"} and "warmup_steps" not in plan.changed_keys:
        warmup = int(tree["schedule"]["warmup_steps"])
        steps = count_steps(resolve(tree, _add_setting(settings, "schedule.warmup_steps", 0)), target.images[1])
        settings = _add_setting(settings, "schedule.warmup_steps", warmup * steps // target.recipe.steps)
    config = resolve(tree, settings)
    least = min(target.images) if len(list_rates(plan, target, config)) > 1 else target.images[1]
    if config.data.batch_size > least:
        raise ConfigError(
            f"{target.name}: data.batch_size = {config.data.batch_size} is more than the {least} images to train on: "
            f"give data.batch_size={least} or fewer"
        )
    return config


def _build_tree(plan: SuitePlan, target: TransferTarget) -> dict[str, Any]:
    tree = target.recipe.config
    for section, values in target.changes.items():
        tree[section] |= values
    tree["model"]["weights"] = plan.model
    tree["data"] |= target.choosing
    # There are many runs, and the newest checkpoint is enough to resume from.
    tree["run"] |= {"folder": str(plan.folder / target.name), "keep": 1}
    return tree


def list_rates(plan: SuitePlan, target: TransferTarget, config: RunConfig) -> tuple[float, ...]:
    """Return the learning rates to try: those of the settings or the plan, else those of the paper."""
    if RATE in plan.changed_keys:
        return (config.optimizer.learning_rate,)
    return plan.rates or target.recipe.learning_rates


def find_deviations(plan: SuitePlan, target: TransferTarget, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from the recipe, apart from the chosen learning rate."""
    deviations = {key: (then, now) for key, then, now in find_differences(resolve(_build_tree(plan, target)), config)}
    deviations.pop(f"optimizer.{RATE}", None)
    tried = list_rates(plan, target, config)
    if tried != target.recipe.learning_rates:
        deviations["learning rates"] = (list(target.recipe.learning_rates), list(tried))
    if plan.runs != RUNS:
        deviations["runs"] = (RUNS, plan.runs)
    return deviations
