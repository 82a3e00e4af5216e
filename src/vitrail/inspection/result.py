"""What an inspection returns: the files that it wrote, and the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.evaluation.report import format_estimate
from vitrail.evaluation.task_report import join_chosen
from vitrail.inspection.findings import Absent, Distance, Findings, Layers, Scores
from vitrail.system.intervals import Estimate
from vitrail.system.results import Result, Rows, to_plain


class ImageGuesses(NamedTuple):
    """What a model says about one image."""

    image: str
    """The name of the image in the report."""
    labels: list[tuple[str, float]]
    """Labels and their probabilities, best first; none for a model without classes."""


@dataclass(frozen=True, repr=False)
class InspectionResult(Result):
    """What was found inside one model or several, and the files that show it."""

    report: Path
    figure_files: tuple[Path, ...]
    """The figures as .png; an .svg lies beside each."""
    data_files: tuple[Path, ...]
    """The numbers behind the figures, as .npz and .csv."""
    notes: tuple[str, ...]
    """Lines for the user, about files that could not be read."""
    findings: tuple[Findings, ...]
    """Everything that was measured, as arrays, for each model."""
    between: Layers | Absent | None
    """How alike the layers of two models are, or why it is not known; None unless there are two models."""

    @property
    def guesses(self) -> dict[str, list[ImageGuesses]]:
        """For each model, by its name in the report, what it says about every shown image."""
        return {
            each.name: [ImageGuesses(image.name, list(image.guesses)) for image in each.images]
            for each in self.findings
        }

    @property
    def accuracy(self) -> dict[str, Estimate]:
        """For each model that was scored on images with labels, how often its first guess is right."""
        return {each.name: each.scores.report.top1 for each in self.findings if isinstance(each.scores, Scores)}

    @property
    def measures(self) -> dict[str, dict[str, Estimate]]:
        """For each model that was scored on images with targets, the measures of its task by name."""
        return {
            each.name: {name: estimate for name, estimate, _ in each.scores.report.measures()}
            for each in self.findings
            if each.scores is not None
        }

    @property
    def attention_distance(self) -> dict[str, dict[str, list[float]]]:
        """For each model with attention, by layer, the mean attention distance of every head in pixels.

        A head that never attends to patches has NaN.
        """
        return {
            each.name: dict(zip(each.distance.layers, each.distance.pixels.tolist(), strict=True))
            for each in self.findings
            if isinstance(each.distance, Distance)
        }

    def summary(self) -> Rows:
        first = self.findings[0]
        return [
            ("models", ", ".join(each.name for each in self.findings)),
            *self.describe_accuracy(),
            ("images shown", first.images_from),
            ("measured on", first.measured_on),
            ("figures", f"{len(self.figure_files)} in {self.report.with_name(f'{self.report.stem}_files')}"),
            ("report", str(self.report)),
            *(("note", note) for note in self.notes),
        ]

    def describe_accuracy(self) -> Rows:
        """Return the accuracy or the first measure of each model that was scored, and what it was measured on."""
        rows = []
        for each in self.findings:
            if (scores := each.scores) is not None:
                if isinstance(scores, Scores):
                    name, cells = "accuracy", [f"{share:.1%}" for share in scores.report.top1]
                else:
                    first = scores.report.first
                    name, cells = first.name, format_estimate(first.estimate, first.is_share)
                value, low, high = cells
                words = f"{value} (95% interval {low} to {high}) on {scores.remark}"
                warning = "; the model has learned from these very images" if scores.report.was_trained_on else ""
                rows.append((f"{name} of {each.name}", words + warning))
        return rows

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        found: dict[str, Sequence[Sequence[str]]] = {}
        for name, images in self.guesses.items():
            rows = [(each.image, label, f"{value:.1%}") for each in images for label, value in each.labels[:1]]
            if rows:
                found[f"first guesses of {name}"] = [("image", "label", "probability"), *rows]
        for each in self.findings:
            if answered := [image for image in each.images if image.answer]:
                answers = [(image.name, join_chosen(image.answer)) for image in answered]
                found[f"answers of {each.name}"] = [("image", "answer"), *answers]
        for name, layers in self.attention_distance.items():
            spans = [(layer, *_show_span(heads)) for layer, heads in layers.items()]
            found[f"attention distance of {name}, in pixels"] = [("layer", "least", "mean", "most"), *spans]
        return found

    def figures(self) -> Sequence[Path]:
        return self.figure_files

    def to_dict(self) -> dict[str, Any]:
        """Return files, notes and the numbers above as plain data; other numbers are in the data files."""
        names = (
            "report",
            "figure_files",
            "data_files",
            "notes",
            "accuracy",
            "guesses",
            "attention_distance",
            "measures",
        )
        answers = {
            each.name: [{"image": image.name, "lines": image.answer} for image in each.images if image.answer]
            for each in self.findings
        }
        return {**{name: to_plain(getattr(self, name)) for name in names}, "answers": to_plain(answers)}


def _show_span(heads: Sequence[float]) -> tuple[str, str, str]:
    known = [value for value in heads if np.isfinite(value)]
    if not known:
        return "", "", ""
    return f"{min(known):.1f}", f"{np.mean(known):.1f}", f"{max(known):.1f}"
