"""Predict many images at once: files, folders, standard input, or images that a program has at hand."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np

from vitrail.data.sources.image_files import make_printable
from vitrail.errors import ConfigError
from vitrail.inference.answers import Answer, list_cell_names
from vitrail.inference.embedding_files import AddEmbedding, check_embedding_path, read_embeddings, write_embeddings
from vitrail.inference.engine import FloatArray, Model
from vitrail.inference.find_images import FoundImage, require_images
from vitrail.inference.predictor import TOP, Prediction, Predictor, check_top
from vitrail.inference.prepare import OneImage
from vitrail.reliability.record import require_unknown
from vitrail.reliability.unknown import Familiarity, describe_familiarity
from vitrail.system.events import OnEvent, open_listener, send_messages, send_progress
from vitrail.system.results import Result, Rows
from vitrail.weights.source import PANE

MOST_SHOWN = 20
"""Largest number of images in a notebook's table; `PredictionResult.predictions` has all."""


@dataclass(frozen=True)
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
    """The predictions for all images, in order. It can be used as a sequence of them."""

    predictions: tuple[FilePrediction, ...]
    labels: tuple[str, ...]
    """The names of the model's classes in words, or of the values of another task; () for a model without classes."""
    seconds: float
    """From the first image to the last, without loading the model."""
    embedding_file: Path | None = None
    """The file of embeddings, if one was written."""
    rows: FloatArray | None = field(default=None, compare=False)
    """The embeddings, if they were kept in memory."""

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
        """The images that were used, by time."""
        return (len(self.predictions) - len(self.left_out)) / max(self.seconds, 1e-9)

    @property
    def embeddings(self) -> FloatArray | None:
        """(N, D) representations of the images that were used, in order; None if none were asked for."""
        return self.rows if self.embedding_file is None else read_embeddings(self.embedding_file)

    def summary(self) -> Rows:
        """Return the counts and the speed; for a few images also the best label of each, or the answer."""
        rows = [("images", f"{len(self) - len(self.left_out):,}"), ("images/s", f"{self.images_per_second:,.1f}")]
        if self.left_out:
            rows.append(("left out", f"{len(self.left_out):,}"))
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
        """Return the predictions, the speed and the place of the embeddings as plain data."""
        return {
            "predictions": [each.to_dict() for each in self.predictions],
            "seconds": self.seconds,
            "images_per_second": self.images_per_second,
            "embedding_file": None if self.embedding_file is None else str(self.embedding_file),
        }


def predict(
    images: OneImage | Iterable[OneImage | FoundImage],
    model: Model = PANE,
    *,
    top: int = TOP,
    embed: bool | str | Path | None = None,
    coverage: float | None = None,
    unknown: bool = False,
    batch_size: int = 32,
    device: str = "auto",
    precision: str = "fp32",
    on_event: OnEvent | None = None,
) -> PredictionResult:
    """Say what is in images. An image that cannot be used does not end the call: the result has its error.

    Events:

        message      text, while a faster precision is prepared
        images       files, labels: the names of all images that were found, and those of the model's classes or
                     other values; for another task than labels also task, its kind, and columns, the names of the
                     cells of an answer
        prediction   file, labels, error: of one image, in order; labels are lists of a label and its probability;
                     for another task also task, answer, lines and cells; with `unknown` also unknown and known_share
        progress     of the task "predicting"

    Args:
        images: one or more: files, folders with images at any depth, "-" for standard input, which holds an image or a
            list of file names; the bytes of a file, Pillow images, uint8 arrays and tensors.
        model: a loaded model, anything that `vitrail.load` takes, or an exported .onnx or .xml file.
        top: the number of labels for each image, or of other lines that a task has many of, at least 1.
        embed: True keeps the representation of each image in the result; the name of a .parquet or .npz file writes
            them there.
        coverage: give the set of labels that holds the right one with this probability, such as 0.95, in place of
            the best labels; `vitrail calibrate` must have fitted the model for it.
        unknown: say of each image whether it looks like nothing that the model knows; likewise.
        batch_size: images that run at a time.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: fp32, or faster and less exact: bf16, fp16 and fp8 (GPU), int8 (CPU); auto takes the fastest here.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an option is not valid, or nothing is requested that the model can give.
        DataError: there are no images: folders hold none, or none of the files exists.
        WeightsError: the model cannot be read.
    """
    check_top(top)
    path = None if embed is None or isinstance(embed, bool) else Path(embed)
    check_embedding_path(path)
    found = require_images(images)
    with open_listener(on_event) as listener:
        predictor = Predictor(
            model,
            device=device,
            batch_size=min(batch_size, len(found)),  # the fastest precision may depend on it
            precision=precision,
            on_message=send_messages(listener),
        )
        if not predictor.labels and not embed and not unknown:
            raise ConfigError(
                "the model has no classes, and therefore no labels: give embed=True, or write --embed out.parquet"
            )
        if coverage is not None:
            predictor.check_coverage(coverage)
        if unknown:
            require_unknown(predictor.engine.reliability)
        images_found: dict[str, Any] = {"files": [image.name for image in found], "labels": list(predictor.labels)}
        if predictor.labels and not predictor.engine.has_labels:
            images_found |= {"task": predictor.task.kind, "columns": list(list_cell_names(predictor.task))}
        if unknown:
            images_found |= {"tells_unknown": True}
        listener("images", images_found)
        return _predict_all(predictor, found, _PredictOptions(top, coverage, unknown, bool(embed)), path, listener)


class _PredictOptions(NamedTuple):
    """What is asked of each image."""

    top: int
    coverage: float | None
    unknown: bool
    embeds: bool


def _predict_all(
    predictor: Predictor, found: Sequence[FoundImage], wanted: _PredictOptions, path: Path | None, listener: OnEvent
) -> PredictionResult:
    """Predict the images that were found; tell of each, and add its embedding to the file or to the result."""
    started, predictions, kept = time.perf_counter(), list[FilePrediction](), list[FloatArray]()
    progress = send_progress(listener, "predicting")
    stream = predictor.stream(
        (image.content for image in found),
        probabilities=bool(predictor.labels),
        embeddings=wanted.embeds,
        familiarity=wanted.unknown,
    )
    progress(0, len(found))
    with _open_table(path, kept) as add, closing(stream) as coming:
        for prediction in coming:
            row = _answer_image(predictor, prediction, found[prediction.index].name, wanted)
            predictions.append(row)
            if prediction.embedding is not None:
                add(row.file, prediction.embedding)
            progress(len(predictions), len(found))
            listener("prediction", row.to_dict())
    seconds, rows = time.perf_counter() - started, None
    if wanted.embeds and path is None:
        rows = np.stack(kept) if kept else np.empty((0, predictor.engine.embedding_size or 0), np.float32)
    is_written = path is not None and any(each.error is None for each in predictions)
    return PredictionResult(tuple(predictions), predictor.labels, seconds, path if is_written else None, rows)


def _open_table(path: Path | None, kept: list[FloatArray]) -> AbstractContextManager[AddEmbedding]:
    """Return a context with a function that takes embeddings: into a file, or into a list if there is no file."""
    return nullcontext(lambda name, embedding: kept.append(embedding)) if path is None else write_embeddings(path)


def _answer_image(predictor: Predictor, prediction: Prediction, name: str, wanted: _PredictOptions) -> FilePrediction:
    if prediction.error is not None:
        return FilePrediction(name, error=str(prediction.error))
    values, familiarity = prediction.values, prediction.familiarity
    if values is None:
        return FilePrediction(name, familiarity=familiarity)
    if not predictor.engine.has_labels:
        return FilePrediction(name, answer=predictor.make_answer(values, wanted.top), familiarity=familiarity)
    if wanted.coverage is None:
        labels = predictor.rank_labels(values, wanted.top)
    else:
        labels = predictor.form_set(values, wanted.coverage)
    return FilePrediction(name, tuple(labels), familiarity=familiarity)


def _describe(prediction: FilePrediction) -> str:
    """Return the best label or the answer in words; nothing if only the embedding was computed."""
    if prediction.error is not None:
        return f"left out: {prediction.error}"
    words = "{} {:.1%}".format(*prediction.labels[0]) if prediction.labels else ""
    if prediction.answer is not None:
        words = prediction.answer.to_words()
    is_unknown = prediction.familiarity is not None and prediction.familiarity.is_unknown
    return ", ".join(each for each in (words, "unknown" if is_unknown else "") if each)
