"""Choose a learning rate as the paper does: train once with each, and take the best on a held-out part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.open import Data
from vitrail.errors import ConfigError, Diverged, TrainingError
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.events import OnEvent
from vitrail.training.config import RunConfig
from vitrail.training.fewshot import OpenFewshot
from vitrail.training.run_folder import TRIAL_PREFIX
from vitrail.training.run_training import run_training


@dataclass(frozen=True)
class Trial:
    """A run with one learning rate, and its accuracy, if it has one, and its loss on the held-out part."""

    rate: float
    folder: Path
    accuracy: float = math.nan
    loss: float = math.nan
    failure: str = ""
    """Why the run has no usable result; empty if it has one."""


def run_trials(
    config: RunConfig,
    rates: Sequence[float],
    *,
    source: Data | None = None,
    start: ImageModel | None = None,
    fewshot: OpenFewshot | None = None,
    on_event: OnEvent | None = None,
) -> Iterator[Trial]:
    """Train with each learning rate, in `sweep-RATE` inside the run's folder, and yield each trial when it is done.

    A rate that diverges does not end the sweep; an error that says nothing about the rate, such as a full disk, does.
    Finished trials are not trained again. The configuration must have a part to validate on.

    Args:
        config: The configuration.
        rates: The learning rates.
        source: Images in place of those of `data.source`.
        start: The model of `model.weights`, if it is loaded already. It stays as it is: each trial trains a copy.
        fewshot: As for `run_training`. It is measured, but does not choose.
        on_event: Called with what happens in each training.

    Raises:
        ConfigError: The weights of a training are to be chosen by few-shot accuracy.
    """
    if config.schedule.choose_by == "fewshot":
        raise ConfigError("a sweep compares accuracies on validation images: leave out schedule.choose_by, or --sweep")
    for rate in rates:
        trial = change_config(config, {"optimizer": {"learning_rate": rate}}, f"{TRIAL_PREFIX}{rate:.3g}")
        folder = trial.run.folder
        try:
            copied = None if start is None else copy_model(start)
            measured = run_training(trial, source=source, start=copied, fewshot=fewshot, on_event=on_event).choosing
        except Diverged as error:
            yield Trial(rate, folder, failure=str(error))
            continue
        assert measured is not None  # there is a part to measure on
        failure = "" if math.isfinite(measured["loss"]) else "its loss is no number"
        yield Trial(rate, folder, measured.get("accuracy", math.nan), measured["loss"], failure)


def choose_best(tried: Sequence[Trial]) -> Trial:
    """Return the trial with the highest accuracy, and among equals the lowest loss: with few images, ties are common.

    Without accuracies, the lowest loss decides.

    Raises:
        TrainingError: All trials failed.
    """
    usable = [trial for trial in tried if not trial.failure]
    if not usable:
        rates = ", ".join(f"{trial.rate:.3g}" for trial in tried)
        raise TrainingError(
            f"no learning rate led anywhere ({rates}): give a lower one as optimizer.learning_rate, which is then not "
            "chosen"
        )
    return max(usable, key=lambda trial: (0.0 if math.isnan(trial.accuracy) else trial.accuracy, -trial.loss))


def change_config(config: RunConfig, update: dict[str, dict[str, Any]], name: str = "") -> RunConfig:
    """Return the configuration with some values changed and, if `name` is given, a folder inside the run's folder."""
    tree = config.model_dump()
    update = {**update, "run": {**update.get("run", {}), "folder": config.run.folder / name}}
    if name:
        update["run"]["copy_to"] = None  # two runs must not have one copy
    return RunConfig(**{section: {**values, **update.get(section, {})} for section, values in tree.items()})
