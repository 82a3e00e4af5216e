"""Choosing a learning rate as the paper does: one run for each, and the best on a held-out part is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import Diverged, TrainingError
from vitrail.training.config import RunConfig
from vitrail.training.run_folder import TRIAL_PREFIX
from vitrail.training.run_training import run_training


@dataclass(frozen=True)
class Trial:
    """A run with one learning rate, and what the held-out part says about it."""

    rate: float
    folder: Path
    accuracy: float = math.nan
    loss: float = math.nan
    failure: str = ""
    """Why it led nowhere, where it did."""

    def __str__(self) -> str:
        told = self.failure or f"accuracy {self.accuracy:.1%}, loss {self.loss:.4f}"
        return f"learning rate {self.rate:.3g}: {told}"


def run_trials(config: RunConfig, rates: Sequence[float]) -> Iterator[Trial]:
    """Each learning rate, as soon as it was tried, in `sweep-RATE` inside the run's folder.

    A rate that diverges does not end the others; a full disk, which says nothing about a rate, does. What was finished
    before is not trained again. The configuration must have a part to validate on.
    """
    for rate in rates:
        trial = change_config(config, {"optimizer": {"learning_rate": rate}}, f"{TRIAL_PREFIX}{rate:.3g}")
        folder = trial.run.folder
        try:
            measured = run_training(trial).evaluation
        except Diverged as error:
            yield Trial(rate, folder, failure=str(error))
            continue
        assert measured is not None  # there is a part to measure on
        failure = "" if math.isfinite(measured["loss"]) else "its loss is no number"
        yield Trial(rate, folder, measured["accuracy"], measured["loss"], failure)


def choose_best(tried: Sequence[Trial]) -> Trial:
    """By accuracy; of equal accuracies the lower loss: with few images to choose on, many are equal."""
    led = [trial for trial in tried if not trial.failure]
    if not led:
        rates = ", ".join(f"{trial.rate:.3g}" for trial in tried)
        raise TrainingError(
            f"no learning rate led anywhere ({rates}): give a lower one as optimizer.learning_rate, which is then not "
            "chosen"
        )
    return max(led, key=lambda trial: (trial.accuracy, -trial.loss))


def change_config(config: RunConfig, update: dict[str, dict[str, Any]], name: str = "") -> RunConfig:
    """The configuration with some values changed; with a name, in a folder of its own inside the run's."""
    tree = config.model_dump()
    update = {**update, "run": {**update.get("run", {}), "folder": config.run.folder / name}}
    return RunConfig(**{section: {**values, **update.get(section, {})} for section, values in tree.items()})
