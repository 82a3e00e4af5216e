"""What a user asks `finetune` for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitrail.data.open import Data
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.training.resolve import Settings, name_settings

LENGTH_KEYS = {"steps", "epochs"}
"""Settings that say how long a training is, so that no time is planned."""


@dataclass(frozen=True)
class FinetuneRequest:
    """What a user asks for: the arguments of `finetune`."""

    data: Data
    start: str | ImageModel | None
    """The model to start from; None for fresh weights."""
    sweep: bool
    minutes: float | None
    folder: str | Path | None
    settings: Settings

    @property
    def given_keys(self) -> set[str]:
        """The keys of the settings, without their sections."""
        return {name.rpartition(".")[2] for name in name_settings(self.settings)}

    def check(self) -> None:
        """Raise a ConfigError if two arguments contradict each other."""
        given = self.given_keys
        if self.sweep and "learning_rate" in given:
            raise ConfigError("a sweep chooses the learning rate: leave optimizer.learning_rate out, or --sweep")
        if self.folder is not None and "folder" in given:
            raise ConfigError("the folder was given twice: leave out run.folder, or the argument folder")
        if "source" in given:
            raise ConfigError("the data was given twice: leave out data.source")
        for key in ("task", "labels"):
            if key in given:
                raise ConfigError(f"data.{key} goes with the data: give it as --{key} ({key}=…)")
        if "labels_from" in given:
            raise ConfigError("labels_from goes with the data: give it as --labels-from (labels_from=…)")
        if self.minutes is not None and given & LENGTH_KEYS:
            raise ConfigError("minutes decide the number of steps: leave out --minutes, or schedule.steps and epochs")
        if self.minutes is not None and self.sweep:
            raise ConfigError("a sweep trains several times and fits into no time: leave out --minutes, or --sweep")
        if self.sweep and "divide_validation" in given:
            raise ConfigError("a sweep chooses on one half and reports on the other: leave out data.divide_validation")
