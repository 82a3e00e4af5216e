"""Predict many images at once: files, folders, standard input, or images that a program has at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.errors import ConfigError
from vitrail.inference.answer_images import AnswerOptions, answer_images
from vitrail.inference.answers import list_cell_names
from vitrail.inference.embedding_files import AddEmbedding, check_embedding_path, write_embeddings
from vitrail.inference.engine import FloatArray, Model
from vitrail.inference.find_images import FoundImage, require_images
from vitrail.inference.predict_into_file import TIMEOUT, predict_into_file, require_files
from vitrail.inference.prediction_parts import check_prediction_path
from vitrail.inference.prediction_result import FilePrediction, PredictionResult
from vitrail.inference.predictor import TOP, Predictor, check_top
from vitrail.inference.prepare import OneImage
from vitrail.reliability.record import require_unknown
from vitrail.system.events import OnEvent, ignore_event, open_listener, send_messages, send_progress
from vitrail.system.ranks import join_ranks
from vitrail.weights.source import PANE


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
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> PredictionResult:
    """Say what is in images. An image that cannot be used does not end the call: the result has its error.

    With `out` the predictions are also written to a file, and the same call goes on with what is not done after it was
    stopped in any way. Started by torchrun, the ranks then share the images, and the first rank has the result.

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
        out: a .jsonl or .csv file that does not exist yet, for images in files. It has the rows that `vitrail predict`
            prints with --json or --csv, and appears when all are there; until then a folder beside it, such as
            answers.jsonl.parts, has what is done.
        on_event: called with what happens, on the first rank; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an option is not valid, or nothing is requested that the model can give.
        DataError: there are no images: folders hold none, or none of the files exists.
        TrainingError: another rank was lost.
        WeightsError: the model cannot be read.
    """
    check_top(top)
    embedding_path = None if embed is None or isinstance(embed, bool) else Path(embed)
    out = None if out is None else Path(out)
    check_embedding_path(embedding_path)
    check_prediction_path(out)
    found = require_images(images)
    options = AnswerOptions(top, coverage, unknown, bool(embed))
    batch_size = min(batch_size, len(found))  # the fastest precision may depend on it
    is_listening = out is None or os.environ.get("RANK", "0") == "0"
    with open_listener(on_event if is_listening else ignore_event) as listener:
        if out is None:
            predictor = _open_predictor(model, options, batch_size, device, precision, listener)
            _tell_images(predictor, found, options, listener)
            return _predict_all(predictor, found, options, embedding_path, listener)
        require_files(found)
        with join_ranks(device, TIMEOUT) as ranks:
            predictor = _open_predictor(model, options, batch_size, str(ranks.device), precision, listener)
            _tell_images(predictor, found, options, listener)
            return predict_into_file(predictor, found, options, out, embedding_path, ranks, listener)


def _open_predictor(
    model: Model, options: AnswerOptions, batch_size: int, device: str, precision: str, listener: OnEvent
) -> Predictor:
    """Return a predictor; raise a ConfigError if it does not give what is asked for."""
    predictor = Predictor(
        model, device=device, batch_size=batch_size, precision=precision, on_message=send_messages(listener)
    )
    if not predictor.labels and not options.embeds and not options.unknown:
        raise ConfigError(
            "the model has no classes, and therefore no labels: give embed=True, or write --embed out.parquet"
        )
    if options.coverage is not None:
        predictor.check_coverage(options.coverage)
    if options.unknown:
        require_unknown(predictor.engine.reliability)
    return predictor


def _tell_images(predictor: Predictor, found: Sequence[FoundImage], options: AnswerOptions, listener: OnEvent) -> None:
    """Send the event of the images that were found."""
    values: dict[str, Any] = {"files": [image.name for image in found], "labels": list(predictor.labels)}
    if predictor.labels and not predictor.engine.has_labels:
        values |= {"task": predictor.task.kind, "columns": list(list_cell_names(predictor.task))}
    if options.unknown:
        values |= {"tells_unknown": True}
    listener("images", values)


def _predict_all(
    predictor: Predictor, found: Sequence[FoundImage], options: AnswerOptions, path: Path | None, listener: OnEvent
) -> PredictionResult:
    """Predict the images that were found; tell of each, and add its embedding to the file or to the result."""
    started, predictions, kept = time.perf_counter(), list[FilePrediction](), list[FloatArray]()
    progress = send_progress(listener, "predicting")
    answers = answer_images(predictor, found, options)
    progress(0, len(found))
    with _open_table(path, kept) as add, closing(answers) as coming:
        for prediction, embedding in coming:
            predictions.append(prediction)
            if embedding is not None:
                add(prediction.file, embedding)
            progress(len(predictions), len(found))
            listener("prediction", prediction.to_dict())
    seconds, rows = time.perf_counter() - started, None
    if options.embeds and path is None:
        rows = np.stack(kept) if kept else np.empty((0, predictor.engine.embedding_size or 0), np.float32)
    is_written = path is not None and any(each.error is None for each in predictions)
    return PredictionResult(tuple(predictions), predictor.labels, seconds, path if is_written else None, rows)


def _open_table(path: Path | None, kept: list[FloatArray]) -> AbstractContextManager[AddEmbedding]:
    """Return a context with a function that takes embeddings: into a file, or into a list if there is no file."""
    return nullcontext(lambda name, embedding: kept.append(embedding)) if path is None else write_embeddings(path)
