"""Read a run folder: its configuration, what was measured, its checkpoints, and its last and best weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.errors import ConfigError, TrainingError
from vitrail.model.base import ImageModel
from vitrail.model.create import check_dtype
from vitrail.system.device import parse_device
from vitrail.system.results import Result, Rows, to_plain
from vitrail.training.best import BestEvaluation, find_best
from vitrail.training.checkpoint_folder import find_damage, list_checkpoints, read_state, read_weights
from vitrail.training.config import RunConfig
from vitrail.training.records import Record, read_records
from vitrail.training.resolve import build_config, read_toml
from vitrail.training.run_folder import CONFIG_FILE, DATA_FILE
from vitrail.training.trained_model import build_trained_model
from vitrail.weights.load import build_from_config, load
from vitrail.weights.source import BEST_FILE, LAST_FOLDER, Which, choose_weights

Columns = dict[str, list[Any]]
"""Lists of the same length, by name."""


class SavedCheckpoint(NamedTuple):
    """A checkpoint of a run."""

    step: int
    path: Path


class Run(Result):
    """A training run, finished or not, read from its folder.

        run = vitrail.Run("runs/cifar10-stem")
        run.metrics["train"]["loss"]        # a list beside run.metrics["train"]["step"]
        model = run.load("best")

    Everything is read when it is first asked for, and only once: make a new `Run` to see how a run has gone on.

    Args:
        folder: the run folder, as `vitrail train` and `vitrail finetune` write it.

    Raises:
        ConfigError: the folder holds no run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not (self.folder / CONFIG_FILE).is_file():
            problem = f"holds no {CONFIG_FILE}" if self.folder.is_dir() else "is no folder"
            above = self.folder.parent
            hint = f", did you mean {str(above)!r}?" if (above / CONFIG_FILE).is_file() else ":"
            raise ConfigError(
                f"{self.folder} {problem}, so it is no run{hint} give the folder that `vitrail train` or `vitrail "
                "finetune` wrote, such as runs/NAME"
            )

    @cached_property
    def config(self) -> RunConfig:
        """The configuration that the run was begun with."""
        return build_config(read_toml(self.folder / CONFIG_FILE))

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached its last step and written its model."""
        return (self.folder / LAST_FOLDER / "config.json").is_file()

    @cached_property
    def checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        """The checkpoints, the oldest first."""
        steps = list_checkpoints(self.folder / "checkpoints")
        return tuple(SavedCheckpoint(step, path) for step, path in steps.items())

    @cached_property
    def metrics(self) -> Mapping[str, Columns]:
        """What was measured while it trained, as columns: under "train", "evaluation" and "fewshot".

        Each has the column `step` and one for every value: `loss`, `accuracy`, `learning_rate`, `seconds`,
        `images_per_second` … A value that a record does not have is NaN. `pandas.DataFrame` takes the columns as they
        are.
        """
        return {kind: _make_columns(self._records, kind) for kind in ("train", "evaluation", "fewshot")}

    @cached_property
    def best(self) -> BestEvaluation | None:
        """The best evaluation; None if there was none.

        Of a run that is not finished, evaluations after its newest checkpoint do not count: they will be repeated.
        """
        newest = max((checkpoint.step for checkpoint in self.checkpoints), default=0)
        counting = [record for record in self._records if self.is_finished or record["step"] <= newest]
        return find_best(self.config, counting)

    def load(
        self, which: Which = "last", *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> ImageModel:
        """Load a model of this run, ready to evaluate.

        Args:
            which: "last": the model of a finished run, or the weights in the newest whole checkpoint of an unfinished
                one. "best": the weights with the best evaluation. Averaged weights, if the run averages.
            device: where the parameters live; the CPU if None.
            dtype: type of the parameters; float32 if None.

        Raises:
            ConfigError: another word, or "best" for a run that has no evaluation.
            TrainingError: there is no whole checkpoint to read.
            WeightsError: the weights cannot be read.
        """
        if self.is_finished and (which == "last" or (self.folder / BEST_FILE).is_file()):
            return load(self.folder, which=which, device=device, dtype=dtype)
        target = None if device is None else parse_device(device)
        check_dtype(dtype)
        checkpoint = self._find_last() if which == "last" else self._find_best(which)
        model = build_trained_model(build_from_config(self._describe_model(checkpoint)), read_weights(checkpoint.path))
        if (self.folder / DATA_FILE).is_file():
            model.learned_from = (self.folder / DATA_FILE).read_text(encoding="utf-8")
        return model.to(device=target, dtype=dtype)

    def _find_last(self) -> SavedCheckpoint:
        for checkpoint in reversed(self.checkpoints):
            if find_damage(checkpoint.path) is None:
                return checkpoint
        raise TrainingError(f"{self.folder} has no whole checkpoint yet: wait for one, or give its command again")

    def _find_best(self, which: str) -> SavedCheckpoint:
        if which != "best":
            choose_weights(str(self.folder), which)  # explains which words there are
        if self.best is None:
            raise ConfigError(f'nothing was evaluated in {self.folder}, so nothing is the best: load "last"')
        for checkpoint in self.checkpoints:
            if checkpoint.step == self.best.step and find_damage(checkpoint.path) is None:
                return checkpoint
        raise TrainingError(
            f'the checkpoint of step {self.best.step}, the best, is not whole or not there: load "last"'
        )

    def _describe_model(self, checkpoint: SavedCheckpoint) -> dict[str, Any]:
        """Return the content of config.json for the model in a checkpoint."""
        described: dict[str, Any] | None = read_state(checkpoint.path).get("model")
        if described is None and self.is_finished:
            described = json.loads((self.folder / LAST_FOLDER / "config.json").read_text(encoding="utf-8"))
        if described is None:
            raise TrainingError(
                f"an earlier vitrail wrote {checkpoint.path}, which does not say what its model is: give the command "
                "of the run again to go on with it"
            )
        return described

    @cached_property
    def _records(self) -> list[Record]:
        path = self.folder / "metrics.jsonl"
        return read_records(path) if path.is_file() else []

    def summary(self) -> Rows:
        """Return the run's model, data, state and best evaluation."""
        last = self.checkpoints[-1].step if self.checkpoints else 0
        best = "none" if self.best is None else f"{self.best.metric} {self.best.value:.4g} at step {self.best.step:,}"
        return [
            ("folder", str(self.folder)),
            ("model", self.config.model.name or str(self.config.model.weights)),
            ("data", self.config.data.source),
            ("state", f"finished after step {last:,}" if self.is_finished else f"not finished, saved at step {last:,}"),
            ("best evaluation", best),
            ("checkpoints", ", ".join(f"{checkpoint.step:,}" for checkpoint in self.checkpoints) or "none"),
        ]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the evaluations and few-shot accuracies, for a notebook."""
        kinds = {"Evaluations": self.metrics["evaluation"], "Few-shot accuracy": self.metrics["fewshot"]}
        return {title: _make_table(columns) for title, columns in kinds.items() if columns["step"]}

    def figures(self) -> Sequence[Path]:
        """Return the learning curves, which a finished run has."""
        return (self.folder / "curves.png",)

    def to_dict(self) -> dict[str, Any]:
        """Return configuration, metrics, checkpoints and the best evaluation as plain data that JSON can hold."""
        names = ("folder", "config", "is_finished", "checkpoints", "best", "metrics")
        return {name: to_plain(getattr(self, name)) for name in names}


def _make_columns(records: list[Record], kind: str) -> Columns:
    """Return the values of all records of a kind as columns, the clock's among them."""
    rows = [{**record, **record.get("clock", {})} for record in records if record["kind"] == kind]
    names = dict.fromkeys(["step", *(name for row in rows for name in row if name not in ("kind", "clock", "halves"))])
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def _make_table(columns: Columns) -> list[list[str]]:
    rows = zip(*columns.values(), strict=True)
    return [list(columns), *([_format_cell(value) for value in row] for row in rows)]


def _format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
