"""Answer the images that were found, one after the other: labels, a set of labels, or the answer of another task."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from vitrail.inference.engine import FloatArray
from vitrail.inference.find_images import FoundImage
from vitrail.inference.prediction_result import FilePrediction
from vitrail.inference.predictor import Prediction, Predictor
from vitrail.inference.prepare import OneImage


class AnswerOptions(NamedTuple):
    """What is asked of each image."""

    top: int
    coverage: float | None
    unknown: bool
    embeds: bool


class AnsweredImage(NamedTuple):
    """An image's prediction, and its representation if that was asked for."""

    prediction: FilePrediction
    embedding: FloatArray | None
    """(D,) float32."""


def answer_images(
    predictor: Predictor, images: Iterable[FoundImage], options: AnswerOptions
) -> Generator[AnsweredImage, None, None]:
    """Return what comes of each image, in order. Close the generator if you do not read it to its end.

    Images are taken a few batches ahead. The first `predictor.batch_size` are a batch, the next ones another one, and
    so on.

    Raises:
        ConfigError: the model does not give what is asked for.
    """
    names = deque[str]()

    def read_contents() -> Iterator[OneImage]:
        for image in images:
            names.append(image.name)
            yield image.content

    stream = predictor.stream(
        read_contents(),
        probabilities=bool(predictor.labels),
        embeddings=options.embeds,
        familiarity=options.unknown,
    )
    return _answer_stream(predictor, stream, names, options)


def _answer_stream(
    predictor: Predictor, stream: Generator[Prediction, None, None], names: deque[str], options: AnswerOptions
) -> Generator[AnsweredImage, None, None]:
    with closing(stream) as coming:
        for prediction in coming:
            yield AnsweredImage(_answer_image(predictor, prediction, names.popleft(), options), prediction.embedding)


def _answer_image(predictor: Predictor, prediction: Prediction, name: str, options: AnswerOptions) -> FilePrediction:
    if prediction.error is not None:
        return FilePrediction(name, error=str(prediction.error))
    values, familiarity = prediction.values, prediction.familiarity
    if values is None:
        return FilePrediction(name, familiarity=familiarity)
    if not predictor.engine.has_labels:
        return FilePrediction(name, answer=predictor.make_answer(values, options.top), familiarity=familiarity)
    if options.coverage is None:
        labels = predictor.rank_labels(values, options.top)
    else:
        labels = predictor.form_set(values, options.coverage)
    return FilePrediction(name, tuple(labels), familiarity=familiarity)
