"""Attributes: several columns, each with one of its own values, such as colour and shape.

An empty cell is not known: the image still teaches the other columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError, did_you_mean
from vitrail.system.intervals import estimate_share
from vitrail.tasks.cells import read_good_cells, read_name
from vitrail.tasks.draw_measures import draw_confusion_matrix
from vitrail.tasks.recalls import compute_recalls, estimate_balanced_accuracy, estimate_mean_accuracy
from vitrail.tasks.task import (
    AnswerLine,
    Array,
    Cell,
    Measure,
    Targets,
    Task,
    TaskMeasures,
    format_share,
    slice_parts,
)

ATTRIBUTES = "attributes"
"""The name of the target: (N, C) int64, the place of each column's value, −1 if it is not known."""
UNKNOWN = -1


class Attributes(Task):
    """One of several values for each of several columns. The model's outputs are those of all columns in a row."""

    kind: Literal["attributes"] = "attributes"
    names: Annotated[tuple[str, ...], Field(min_length=1)]
    """The columns."""
    values: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...]
    """The values of each column, in the order of the outputs."""

    learns_names: ClassVar[bool] = True
    worst_words: ClassVar[str] = "the images with the surest wrong value"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.names) != len(self.values):
            raise ValueError(f"there are {len(self.names)} columns and the values of {len(self.values)}")
        return self

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        values = list[tuple[str, ...]]()
        for column, cells in columns.items():
            values.append(tuple(sorted(set(read_good_cells(partial(read_name, column), cells)) - {""})))
            if not values[-1]:
                raise DataError(f"the column {column} has no value in any row")
        if all(len(each) == 1 for each in values):
            found = ", ".join(f"{name} is always {each[0]}" for name, each in zip(columns, values, strict=True))
            raise DataError(f"there is nothing to learn: {found}; give a column whose values differ")
        return cls(names=tuple(columns), values=tuple(values))

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        target = np.full(len(self.names), UNKNOWN, np.int64)
        for place, (column, allowed) in enumerate(zip(self.names, self.values, strict=True)):
            value = read_name(column, row.get(column))
            if value and value not in allowed:
                raise DataError(f"{column} is {value!r}, which is none of its values{did_you_mean(value, allowed)}")
            target[place] = allowed.index(value) if value else UNKNOWN
        return {ATTRIBUTES: target}

    def allocate(self, count: int) -> Targets:
        return {ATTRIBUTES: np.full((count, len(self.names)), UNKNOWN, np.int64)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        """Return the number of each image's rarest value, and −1 for images without any."""
        places, starts = targets[ATTRIBUTES], np.array([part.start for part in self.parts])
        outputs = np.where(places == UNKNOWN, len(self.output_names), places + starts)
        counts = np.bincount(outputs.ravel(), minlength=len(self.output_names) + 1)
        counts[-1] = places.size + 1
        rarest: NDArray[np.int64] = np.take_along_axis(outputs, counts[outputs].argmin(axis=1)[:, None], axis=1)[:, 0]
        return np.where(rarest == len(self.output_names), -1, rarest)

    @property
    def parts(self) -> tuple[slice, ...]:
        """Which outputs belong to each column."""
        return slice_parts(map(len, self.values))

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"{name}: {value}" for name, each in zip(self.names, self.values, strict=False) for value in each)

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        columns = zip(self.parts, targets[ATTRIBUTES].unbind(dim=1), strict=True)
        losses = [F.cross_entropy(outputs[:, p], t, reduction="none", ignore_index=UNKNOWN) for p, t in columns]
        return torch.stack(losses).mean(dim=0)

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        best = torch.stack([outputs[:, part].argmax(dim=1) for part in self.parts], dim=1)
        hits = torch.where(targets[ATTRIBUTES] == UNKNOWN, torch.nan, (best == targets[ATTRIBUTES]).float())
        return {"attribute-accuracy": hits.nanmean(dim=1)}

    def activate(self, outputs: Tensor) -> Tensor:
        return torch.cat([outputs[..., part].softmax(dim=-1) for part in self.parts], dim=-1)

    def decide(self, values: Array) -> NDArray[np.int64]:
        """(…, V) probabilities → (…, C): the place of the likeliest value of each column."""
        return np.stack([values[..., part].argmax(axis=-1) for part in self.parts], axis=-1)

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        chosen = zip(self.names, self.values, self.parts, self.decide(values), strict=True)
        return {
            "attributes": {
                name: {"value": allowed[place], "probability": float(values[part][place])}
                for name, allowed, part, place in chosen
            }
        }

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        """Return a line for the chosen value of each column."""
        chosen = (part.start + int(place) for part, place in zip(self.parts, self.decide(values), strict=True))
        return [AnswerLine(self.output_names[k], format_share(float(values[k])), float(values[k])) for k in chosen]

    def summarise(self) -> str:
        return f"{len(self.names):,} attribute" + ("" if len(self.names) == 1 else "s")

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        row = dict[str, str | float]()
        for name, allowed, part, place in zip(self.names, self.values, self.parts, self.decide(values), strict=True):
            probability = f"{name} probability"
            while probability in self.names:  # it is a column too
                probability = f"{probability} (of {name})"
            row |= {name: allowed[place], probability: float(values[part][place])}
        return row

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        truth, is_known = targets[ATTRIBUTES], targets[ATTRIBUTES] != UNKNOWN
        hits = self.decide(values) == truth
        measures, tables = list[Measure](), dict[str, list[list[Any]]]()
        mean = estimate_mean_accuracy(hits, is_known)
        measures.append(Measure("mean accuracy", mean, is_share=True))
        for k, (name, allowed) in enumerate(zip(self.names, self.values, strict=True)):
            here, right = truth[is_known[:, k], k], hits[is_known[:, k], k]
            balanced = estimate_balanced_accuracy(here, right, len(allowed))
            measures.append(Measure(f"accuracy of {name}", estimate_share(int(right.sum()), len(right)), is_share=True))
            measures.append(Measure(f"balanced accuracy of {name}", balanced, is_share=True))
            recalls, images = compute_recalls(here, right, len(allowed)), np.bincount(here, minlength=len(allowed))
            rows = zip(allowed, images.tolist(), recalls.tolist(), strict=True)
            tables[name] = [["value", "images", "share right"], *map(list, rows)]
        return TaskMeasures(tuple(measures), tables)

    def rank_errors(self, values: Array, targets: Targets, losses: Array) -> Array:
        """Return the probability of an image's surest wrong value; 0 if all its known values are right."""
        decided, truth = self.decide(values), targets[ATTRIBUTES]
        chances = np.take_along_axis(values, decided + np.array([part.start for part in self.parts]), axis=1)
        errors: Array = np.where((decided != truth) & (truth != UNKNOWN), chances, 0.0).max(axis=1)
        return errors

    def describe_target(self, target: Mapping[str, Any]) -> str:
        columns = zip(self.names, self.values, target[ATTRIBUTES], strict=True)
        return ", ".join(f"{name}: {each[k]}" for name, each, k in columns if k != UNKNOWN) or "not known"

    def draw(self, values: Array, targets: Targets, folder: Path) -> list[Path]:
        decided, drawn = self.decide(values), list[Path]()
        for k, (name, allowed) in enumerate(zip(self.names, self.values, strict=True)):
            is_known = targets[ATTRIBUTES][:, k] != UNKNOWN
            pair = targets[ATTRIBUTES][is_known, k], decided[is_known, k]
            title = f"{name}: what is taken for what, of {int(is_known.sum()):,} images"
            drawn += draw_confusion_matrix(folder / f"confusion-{k + 1}.png", title, allowed, *pair)
        return drawn
