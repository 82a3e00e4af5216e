"""Tags: any number of an image's tags are right at once.

In a table, tags stand in one column as `indoor|cat` or as a list in JSON, or in a column of 0 and 1 for each tag.

Each tag is a question of its own, with a sigmoid. If every image to train on has exactly one of some tags, such as day
and night, these are one question, with a softmax: a group. Outputs of groups stand first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import DataError, did_you_mean
from vitrail.tasks.cells import SEPARATOR, read_good_cells, read_yes_or_no, split_tags
from vitrail.tasks.draw_measures import draw_share_bars
from vitrail.tasks.tag_groups import find_tag_groups
from vitrail.tasks.tag_metrics import AveragePrecision, average_known, choose_thresholds, compute_f1
from vitrail.tasks.task import (
    AnswerLine,
    Array,
    Cell,
    Measure,
    Targets,
    Task,
    TaskMeasures,
    choose_draws,
    estimate_by_resampling,
    format_share,
    shorten_names,
    slice_parts,
)

TAGS = "tags"
"""The name of the target: (N, K) float32, 1 for a tag that the image has."""


class Tags(Task):
    """Yes or no for each of several tags."""

    kind: Literal["tags"] = "tags"
    names: tuple[str, ...]
    """The tags, in the order of the outputs."""
    column: str | None = None
    """The column that lists an image's tags; None if each tag has a column of 0 and 1 with its name."""
    thresholds: tuple[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)], ...] = ()
    """From which probability on an image has each tag; 0.5 for all if empty. Of a group it has the likeliest tag."""
    groups: tuple[Annotated[tuple[str, ...], Field(min_length=2)], ...] = ()
    """Tags of which every image has exactly one: their probabilities sum to 1. They stand first in `names`."""
    learns_names: ClassVar[bool] = True
    worst_words: ClassVar[str] = "the images with the surest wrong tag"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.thresholds and len(self.thresholds) != len(self.names):
            raise ValueError(f"there are {len(self.names)} tags and {len(self.thresholds)} thresholds")
        grouped = tuple(chain(*self.groups))
        if self.names[: len(grouped)] != grouped:
            raise ValueError(f"the groups hold {', '.join(grouped)}: they stand first in names, in this order")
        return self

    @classmethod
    def learn(cls, columns: Mapping[str, Sequence[Cell]]) -> Self:
        if len(columns) > 1:
            return cls(names=tuple(columns))
        ((column, cells),) = columns.items()
        names = {name for tags in read_good_cells(split_tags, cells) for name in tags}
        if not names:
            raise DataError(f"the column {column} has no tag in any row")
        return cls(names=tuple(sorted(names)), column=column)

    def learn_values(self, columns: Mapping[str, Sequence[Cell]]) -> Self:
        """Find the groups, and put them first. Rows that cannot be read do not count."""
        if self.column is None:
            rows = list(zip(*(columns[name] for name in self.names), strict=True))
            images = read_good_cells(self._list_tags, rows)
        else:
            images = read_good_cells(split_tags, columns[self.column])
        grouped = tuple(chain(*(groups := find_tag_groups(images))))
        rest = (name for name in self.names if name not in grouped)
        return self.model_copy(update={"groups": groups, "names": (*grouped, *rest)})

    def _list_tags(self, cells: Cell) -> list[str]:
        """Return the tags of a row with a cell of yes or no for each."""
        assert isinstance(cells, Sequence)
        return [name for name, cell in zip(self.names, cells, strict=True) if read_yes_or_no(name, cell)]

    def encode(self, row: Mapping[str, Cell]) -> dict[str, Any]:
        target = np.zeros(len(self.names), np.float32)
        if self.column is None:
            for number, name in enumerate(self.names):
                target[number] = read_yes_or_no(name, row.get(name))
            return {TAGS: target}
        for name in split_tags(row.get(self.column)):
            if name not in self.names:
                raise DataError(f"{name!r} is no tag{did_you_mean(name, self.names) or ''}")
            target[self.names.index(name)] = 1
        return {TAGS: target}

    def allocate(self, count: int) -> Targets:
        return {TAGS: np.zeros((count, len(self.names)), np.float32)}

    def stratify(self, targets: Targets) -> NDArray[np.int64]:
        """Return the number of each image's rarest tag, and −1 for images without tags: so every part has rare tags."""
        tags = targets[TAGS] > 0
        counts = np.where(tags, tags.sum(axis=0), len(tags) + 1)
        return np.where(tags.any(axis=1), counts.argmin(axis=1), -1).astype(np.int64)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names if self.column is None else (self.column,)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.names

    @property
    def grouped(self) -> int:
        """How many tags are in groups."""
        return sum(map(len, self.groups))

    @property
    def parts(self) -> tuple[slice, ...]:
        """Which outputs belong to each group. The others, behind them, are tags without a group."""
        return slice_parts(map(len, self.groups))

    def compute_losses(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over the questions: cross-entropy of a group, binary cross-entropy of another tag."""
        tags, alone = targets[TAGS].to(outputs.dtype), slice(self.grouped, None)
        losses = F.binary_cross_entropy_with_logits(outputs[:, alone], tags[:, alone], reduction="none")
        of_groups = [-(tags[:, part] * outputs[:, part].log_softmax(dim=1)).sum(dim=1) for part in self.parts]
        return torch.stack([*losses.unbind(dim=1), *of_groups], dim=1).mean(dim=1) if of_groups else losses.mean(dim=1)

    def count(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        likeliest = [outputs[:, part] == outputs[:, part].amax(dim=1, keepdim=True) for part in self.parts]
        decided = torch.cat([*likeliest, outputs[:, self.grouped :] > 0], dim=1)
        return {"tag-accuracy": (decided == (targets[TAGS] > 0)).float().mean(dim=1)}

    def activate(self, outputs: Tensor) -> Tensor:
        alone = outputs[..., self.grouped :].sigmoid()
        return torch.cat([*(outputs[..., part].softmax(dim=-1) for part in self.parts), alone], dim=-1)

    def answer(self, values: NDArray[np.float32], top: int = 5) -> dict[str, Any]:
        """Return the tags that the image has, and the probabilities of these and of the `top` likeliest."""
        lines = self.describe(values, top)
        chosen = {line.name for line in lines if line.is_chosen}
        probabilities = {line.name: line.share for line in lines}
        return {"tags": [name for name in self.names if name in chosen], "probabilities": probabilities}

    def describe(self, values: NDArray[np.float32], top: int = 5) -> list[AnswerLine]:
        decided, best = self.decide(values), np.argsort(-values, kind="stable")
        shown = [k for place, k in enumerate(best) if place < top or decided[k]]
        return [
            AnswerLine(self.names[k], format_share(float(values[k])), float(values[k]), bool(decided[k])) for k in shown
        ]

    def flatten(self, values: NDArray[np.float32]) -> dict[str, str | float]:
        """Return the tags that the image has in the column `tags`, and the probability of every tag in its own."""
        chosen = (name for name, has in zip(self.names, self.decide(values), strict=True) if has)
        columns = (f"{name} (tag)" if name == "tags" else name for name in self.names)
        return {"tags": SEPARATOR.join(chosen), **dict(zip(columns, map(float, values), strict=True))}

    def decide(self, values: Array) -> NDArray[np.bool_]:
        """(…, K) probabilities → (…, K): which tags the images have. Of each group it is the likeliest."""
        values = np.asarray(values, np.float32)
        decided: NDArray[np.bool_] = values >= np.asarray(self.thresholds or 0.5, np.float32)
        for part in self.parts:
            decided[..., part] = np.arange(part.stop - part.start) == values[..., part].argmax(axis=-1, keepdims=True)
        return decided

    def describe_values(self) -> str:
        if not self.groups:
            return ""
        listed = "; of ".join(shorten_names(group) for group in self.groups)
        return f"every training image has exactly one of {listed}: their probabilities sum to 1"

    def measure(self, values: Array, targets: Targets) -> TaskMeasures:
        truth, decided = targets[TAGS] > 0, self.decide(values)
        precisions, f1 = AveragePrecision(truth, values), compute_f1(truth, decided)
        count = len(values) if truth.any() else 0
        draws = choose_draws(values.size)
        metrics = {
            "mAP": precisions.compute_mean,
            "macro F1": lambda rows: average_known(compute_f1(truth[rows], decided[rows])),
            "micro F1": lambda rows: float(compute_f1(truth[rows].reshape(-1, 1), decided[rows].reshape(-1, 1))[0]),
        }
        measures = [
            Measure(name, estimate_by_resampling(metric, count, draws), is_share=True)
            for name, metric in metrics.items()
        ]
        each = precisions.compute(np.arange(len(values)))
        table: list[list[Any]] = [["tag", "images", "average precision", "F1", "threshold"]]
        for k in np.argsort(np.nan_to_num(each, nan=2.0), kind="stable"):
            threshold = "the likeliest" if k < self.grouped else self.thresholds[k] if self.thresholds else 0.5
            table.append([self.names[k], int(truth[:, k].sum()), float(each[k]), float(f1[k]), threshold])
        return TaskMeasures(tuple(measures), {"tags, the hardest first": table})

    def rank_errors(self, values: Array, targets: Targets, losses: Array) -> Array:
        """Return for each image how far its surest wrong tag is from the truth; 0 if all its tags are right."""
        truth = targets[TAGS] > 0
        wrong = self.decide(values) != truth
        errors: Array = np.where(wrong, np.abs(values - truth), 0).max(axis=1, initial=0)
        return errors

    def describe_target(self, target: Mapping[str, Any]) -> str:
        return ", ".join(name for name, has in zip(self.names, target[TAGS], strict=True) if has) or "no tag"

    def draw(self, values: Array, targets: Targets, folder: Path) -> list[Path]:
        truth = targets[TAGS] > 0
        precisions = AveragePrecision(truth, values).compute(np.arange(len(values)))
        title = f"Average precision of each tag on {len(values):,} images"
        return draw_share_bars(folder / "tags.png", title, self.names, precisions, truth.sum(axis=0))

    def tune(self, values: Array, targets: Targets) -> Self:
        """Choose for each tag the threshold with the best F1, and one for all that only few images have.

        Tags of groups need none: of each group the likeliest is the answer.
        """
        chosen = choose_thresholds(targets[TAGS][:, self.grouped :] > 0, values[:, self.grouped :])
        return self.model_copy(update={"thresholds": (*[0.5] * self.grouped, *chosen) if chosen else ()})

    def compare(self, expected: Array, found: Array) -> float:
        """Return how many of the tags that either chooses for an image both choose, on average; 1 where none is."""
        ours, theirs = self.decide(expected), self.decide(found)
        either = (ours | theirs).sum(axis=1)
        return float(np.mean(np.where(either > 0, (ours & theirs).sum(axis=1) / np.maximum(either, 1), 1.0)))
