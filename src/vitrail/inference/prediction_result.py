"""What comes of predicting many images: one prediction for each image, and the result that has them all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from vitrail.data.sources.image_files import make_printable
from vitrail.inference.answers import Answer
from vitrail.inference.embedding_files import read_embeddings
from vitrail.inference.engine import FloatArray
from vitrail.reliability.unknown import Familiarity, describe_familiarity
from vitrail.system.results import Result, Rows

MOST_SHOWN = 20
"""Largest number of images in a notebook's table; `PredictionResult.predictions` has all."""


@dataclass(frozen=True, slots=True)
class FilePrediction:
    """The result for one image: labels or the answer of another task, or the reason why the image was left out."""

    file: str
    """The name as given or found; "-" for standard input, "images[3]" for an image that is no file. Bytes that are not
    valid text appear as \\xff."""
    labels: tuple[tuple[str, float], ...] = ()
    """The best labels with their probabilities, or the set at the coverage that was asked for; () for a model without
    classes, or of another task."""
    error: str | None = None
    answer: Answer | None = None
    """The answer of another task than labels: `content` is plain data, `lines` are for people."""
    familiarity: Familiarity | None = None
    """Whether the image looks like the known ones, if that was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as plain data."""
        values: dict[str, Any] = {"file": self.file, "labels": [list(label) for label in self.labels]}
        values["error"] = self.error
        if self.answer is not None:
            values |= {**self.answer.to_dict(), "cells": self.answer.cells}
        return values if self.familiarity is None else {**values, **describe_familiarity(self.familiarity)}


@dataclass(frozen=True, repr=False)
class PredictionResult(Result):
    """The predictions for all images, in order. It can be used as a sequence of them.

    Under torchrun the first rank has the predictions, and the others have none.
    """

    predictions: tuple[FilePrediction, ...]
    labels: tuple[str, ...]
    """The names of the model's classes in words, or of the values of another task; () for a model without classes."""
    seconds: float
    """From the first image to the last, without loading the model."""
    embedding_file: Path | None = None
    """The file of embeddings, if one was written."""
    rows: FloatArray | None = field(default=None, compare=False)
    """The embeddings, if they were kept in memory."""
    out: Path | None = None
    """The file of predictions, if one was written."""
    done_before: int = 0
    """Images in it that were used, and that an earlier call had computed."""

    def __len__(self) -> int:
        return len(self.predictions)

    def __iter__(self) -> Iterator[FilePrediction]:
        return iter(self.predictions)

    @overload
    def __getitem__(self, index: int) -> FilePrediction: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[FilePrediction, ...]: ...

    def __getitem__(self, index: int | slice) -> FilePrediction | tuple[FilePrediction, ...]:
        return self.predictions[index]

    @property
    def left_out(self) -> tuple[FilePrediction, ...]:
        """The images that could not be used, each with its error."""
        return tuple(each for each in self.predictions if each.error is not None)

    @property
    def images_per_second(self) -> float:
        """The images that were used, without those of an earlier call, by time."""
        return (len(self.predictions) - len(self.left_out) - self.done_before) / max(self.seconds, 1e-9)

    @property
    def embeddings(self) -> FloatArray | None:
        """(N, D) representations of the images that were used, in order; None if none were asked for."""
        return self.rows if self.embedding_file is None else read_embeddings(self.embedding_file)

    def summary(self) -> Rows:
        """Return the counts and the speed; for a few images also the best label of each, or the answer."""
        rows = [("images", f"{len(self) - len(self.left_out):,}"), ("images/s", f"{self.images_per_second:,.1f}")]
        if self.left_out:
            rows.append(("left out", f"{len(self.left_out):,}"))
        if self.out is not None:
            rows.append(("predictions", str(self.out)))
        if self.embedding_file is not None:
            rows.append(("embeddings", str(self.embedding_file)))
        shown = self.predictions[: MOST_SHOWN if len(self) <= MOST_SHOWN else 0]
        return [*rows, *((make_printable(each.file), words) for each in shown if (words := _describe(each)))]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the first predictions: all labels that were asked for, or the parts of the answers."""
        shown = self.predictions[:MOST_SHOWN]
        rows = [
            (make_printable(each.file), label, f"{probability:.2%}")
            for each in shown
            for label, probability in each.labels
        ]
        answers = [
            (make_printable(each.file), line.name, line.text)
            for each in shown
            if each.answer is not None
            for line in each.answer.lines
            if line.is_chosen
        ]
        if answers:
            return {"Predictions": [("file", "answer", "value"), *answers]}
        return {"Predictions": [("file", "label", "probability"), *rows]} if rows else {}

    def to_dict(self) -> dict[str, Any]:
        """Return the predictions, the speed and the places of the files as plain data."""
        return {
            "predictions": [each.to_dict() for each in self.predictions],
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "out": None if self.out is None else str(self.out),
            "embedding_file": None if self.embedding_file is None else str(self.embedding_file),
        }


def _describe(prediction: FilePrediction) -> str:
    """Return the best label or the answer in words; nothing if only the embedding was computed."""
    if prediction.error is not None:
        return f"left out: {prediction.error}"
    words = "{} {:.1%}".format(*prediction.labels[0]) if prediction.labels else ""
    if prediction.answer is not None:
        words = prediction.answer.to_words()
    is_unknown = prediction.familiarity is not None and prediction.familiarity.is_unknown
    return ", ".join(each for each in (words, "unknown" if is_unknown else "") if each)
