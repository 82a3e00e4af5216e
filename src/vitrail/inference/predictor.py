"""The predictor: images in any common form in; ranked labels, other answers, values or embeddings out.

Shapes: B images, K classes, V values of a task, D the size of the representation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.data.parallel import resolve_worker_count
from vitrail.data.transforms.decode import MOST_PIXELS_TRAINING
from vitrail.errors import ConfigError, DataError, InputError, VitrailError, detach_error
from vitrail.fast.optimize import FastModel
from vitrail.inference.answers import Answer, make_answer
from vitrail.inference.engine import Engine, FloatArray, Model, get_model, open_engine, to_array
from vitrail.inference.prepare import ALLOWED, OneImage, describe_image, fit_image, is_one_image, name_kind
from vitrail.model.base import ImageModel
from vitrail.reliability.record import require_sets, require_unknown
from vitrail.reliability.sets import LabelSets, check_coverage
from vitrail.reliability.unknown import Familiarity
from vitrail.tasks.task import Task

AHEAD = 2
"""Batches that are decoded ahead, while one is computed."""
MOST_THREADS = 16
"""Threads that decode for one call. Each may hold a large image in memory."""
TOP = 5
COVERAGE = 0.95
RankedLabels = list[tuple[str, float]]
"""Labels and their probabilities, best first."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result for one image: values, embedding or both, as requested; or an error."""

    index: int
    """Position of the image among the images, from 0."""
    name: str
    """The path of the image on one line, or "a tensor", "a Pillow image", …"""
    values: FloatArray | None = None
    """(V,) values of the task, if requested: for labels the probability of each class."""
    embedding: FloatArray | None = None
    """(D,) representation y, if requested."""
    error: VitrailError | None = None
    """Why the image cannot be used."""
    familiarity: Familiarity | None = None
    """Whether the image looks like the known ones, if requested."""

    @property
    def probabilities(self) -> FloatArray | None:
        """The values, for a model that gives probabilities: (K,), one for each class."""
        return self.values


class Predictor:
    """A model that takes images in any common form and returns labels, answers of other tasks, or embeddings.

    One image is a path, the bytes of a file, a Pillow image, a uint8 NumPy array (height, width[, channels]) or a uint8
    tensor (channels, height, width). A list, a tuple or any other iterable of these is many images: they run in batches
    of `batch_size`, and threads decode a few batches ahead. So do not change an array after you pass it.

    A predictor has no state that changes between calls, so several threads may call one predictor at the same time.

    Example:
        >>> predictor = vitrail.Predictor("pane")
        >>> predictor("cat.jpg", top=2)
        [("tabby", 0.71), ("Egyptian cat", 0.12)]

    A model of another task than labels returns the answer of its task: {"tags": ["cat", "indoor"], …}.

    Args:
        model: a loaded model, which is not changed, anything that `vitrail.load` takes, an exported .onnx or .xml file,
            or an engine.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        batch_size: images that run at a time, at least 1.
        precision: fp32, the exact one; or a faster one: bf16, fp16 and fp8 (GPU), int8 (CPU), or auto, which takes the
            fastest on this machine. `predictor.fast.distance` is then the distance from the exact results.
        most_pixels: images with more pixels are refused before they are decoded.
        on_message: called with lines of text while a faster model than fp32 is prepared.

    Attributes:
        labels: the names of the classes in words, in the order of the probabilities; () for a model without classes.
            For another task, the names of its values.
        task: what the model answers: labels, tags, …; see vitrail/tasks/task.py.
        engine: what computes; see vitrail/inference/engine.py.

    Raises:
        ConfigError: if an option or the model is not valid.
    """

    def __init__(
        self,
        model: Model | Engine,
        *,
        device: str = "auto",
        batch_size: int = 32,
        precision: str = "fp32",
        most_pixels: int = MOST_PIXELS_TRAINING,
        on_message: Callable[[str], None] = lambda line: None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size}: give 1 or more")
        self.engine = (
            model
            if isinstance(model, Engine)
            else open_engine(model, device=device, precision=precision, batch=batch_size, on_message=on_message)
        )
        self.batch_size, self.most_pixels = batch_size, most_pixels
        self.task: Task = self.engine.display_task
        self.labels = self.task.value_names if self.engine.num_classes else ()

    def __repr__(self) -> str:
        engine = self.engine
        answers = self.task.summarise() if engine.num_classes else "0 classes"
        return f"Predictor({answers}, {engine.precision} by {engine.runtime} on {engine.device})"

    @property
    def model(self) -> ImageModel:
        """The model, on the device; an exported file has none, and asking raises a NotApplicableError."""
        return get_model(self.engine)

    @property
    def fast(self) -> FastModel | None:
        """The faster version of the model that computes; None in fp32 and for exported files."""
        return getattr(self.engine, "fast", None)

    def __call__(self, images: OneImage | Iterable[OneImage], top: int = TOP) -> Any:
        """Return the answer for an image; for many images, a list of these.

        Args:
            images: one image or many.
            top: the number of labels, or of other lines that a task has many of, at least 1.

        Returns:
            For labels, the `top` labels with their probabilities, best first: [(label, probability), …]. For another
            task, its answer as plain data, such as {"tags": ["cat"], "probabilities": {"cat": 0.93, …}}.

        Raises:
            ConfigError: if the model has no classes, or `top` is less than 1.
            DataError, InputError: if an image cannot be used; the message names the image and the reason.
        """
        rows: list[Any]
        if self.engine.has_labels or not self.engine.num_classes:
            check_top(top)
            rows = [self.rank_labels(row, top) for row in self._predict_values(images)]
        else:
            rows = [answer.content for answer in self.answers(images, top)]
        return rows[0] if is_one_image(images) else rows

    def answers(self, images: OneImage | Iterable[OneImage], top: int = TOP) -> list[Answer]:
        """Return the answers for one image or many with all that is shown of them: plain data, lines, cells of a table.

        Raises:
            ConfigError: if the model has no outputs to answer with, or `top` is less than 1.
            DataError, InputError: if an image cannot be used; the message names the image and the reason.
        """
        check_top(top)
        return [self.make_answer(row, top) for row in self._predict_values(images)]

    def values(self, images: OneImage | Iterable[OneImage]) -> FloatArray:
        """Return the values of the task, (B, V), for one image (B = 1) or many: probabilities, or numbers in the units
        of the data. `predictor.task.value_names` names them."""
        rows = self._predict_values(images)
        return np.stack(rows) if rows else np.empty((0, len(self.task.value_names)), np.float32)

    def probabilities(self, images: OneImage | Iterable[OneImage]) -> FloatArray:
        """Return the probability of every class, (B, K), for one image (B = 1) or many. Each row adds up to 1.

        For another task than labels, these are its values, which need not add up to 1: each tag has its own.

        Raises:
            ConfigError: if the values of the task are no probabilities, or the model has no classes.
        """
        if self.engine.num_classes and not self.task.gives_probabilities:
            raise ConfigError(
                f"this model gives {self.task.summarise()}, whose values are no probabilities: use predictor.values"
            )
        return self.values(images)

    def embed(self, images: OneImage | Iterable[OneImage]) -> FloatArray:
        """Return the representation y, (B, D), of one image (B = 1) or many."""
        self.engine.check_request(logits=False, embeddings=True)
        predictions = self._predict_or_raise(images, values=False, embeddings=True)
        rows = [prediction.embedding for prediction in predictions if prediction.embedding is not None]
        return np.stack(rows) if rows else np.empty((0, self.engine.embedding_size or 0), np.float32)

    def sets(
        self, images: OneImage | Iterable[OneImage], coverage: float = COVERAGE
    ) -> RankedLabels | list[RankedLabels]:
        """Return the set of labels of an image, best first; for many images, a list of these.

        The set holds the right label with a probability of at least `coverage`, for images drawn like those that
        `vitrail calibrate` was given. No set is empty.

        Args:
            images: one image or many.
            coverage: a share between 0 and 1.

        Raises:
            ConfigError: if the coverage is no share, or nothing was fitted for sets.
            DataError, InputError: if an image cannot be used; the message names the image and the reason.
        """
        self.check_coverage(coverage)
        rows = [self.form_set(row, coverage) for row in self._predict_values(images)]
        return rows[0] if is_one_image(images) else rows

    def unknown(self, images: OneImage | Iterable[OneImage]) -> Familiarity | list[Familiarity]:
        """Return whether an image looks like nothing that the model knows; for many images, a list of these.

        The result has `is_unknown`, which is True for about 5% of known images, and `share`, the share of known images
        that look at least as strange.

        Raises:
            ConfigError: if no score of unknown images was fitted.
            DataError, InputError: if an image cannot be used; the message names the image and the reason.
        """
        require_unknown(self.engine.reliability)
        predictions = self._predict_or_raise(images, values=False, embeddings=False, familiarity=True)
        rows = [each.familiarity for each in predictions if each.familiarity is not None]
        return rows[0] if is_one_image(images) else rows

    def check_coverage(self, coverage: float) -> None:
        """Raise a ConfigError if the coverage is no share, or the model gives no sets of labels."""
        check_coverage(coverage)
        if not self.engine.has_labels:
            raise ConfigError("sets of labels (coverage) are for models that give one label of several: leave it out")
        require_sets(self.engine.reliability)

    def form_set(self, probabilities: FloatArray, coverage: float) -> RankedLabels:
        """Return the set of labels for the probabilities (K,) of one image, best first."""
        return form_set(require_sets(self.engine.reliability), probabilities, self.labels, coverage)

    def rank_labels(self, probabilities: FloatArray, top: int = TOP) -> RankedLabels:
        """Return the `top` labels for the probabilities (K,) of one image, best first."""
        return rank_labels(probabilities, self.labels, top)

    def make_answer(self, values: FloatArray, top: int = TOP) -> Answer:
        """Return the answer for the values (V,) of one image, as `stream` gives them."""
        return make_answer(self.task, values, top)

    def stream(
        self,
        images: Iterable[OneImage],
        *,
        probabilities: bool = True,
        embeddings: bool = False,
        familiarity: bool = False,
    ) -> Generator[Prediction, None, None]:
        """Yield the prediction of each image, in order, as soon as its batch is computed.

        An image that cannot be used yields a prediction with an error, and the stream continues. The stream holds
        threads: close it (`contextlib.closing`) if you do not read it to its end.

        Args:
            images: the images. Do not change an array after you pass it: images are decoded ahead.
            probabilities: whether to compute the probability of every class; for another task, its values.
            embeddings: whether to compute the representation. Both together cost one pass through the model.
            familiarity: whether to compute if the image looks like the known ones, in the same pass.

        Raises:
            ConfigError: if probabilities are requested of a model without classes, or familiarity of one that no score
                of unknown images was fitted for.
        """
        self.engine.check_request(probabilities, embeddings)
        if familiarity:
            require_unknown(self.engine.reliability)
        return self._predict_ahead(images, _ComputedParts(probabilities, embeddings, familiarity))

    def _predict_ahead(self, images: Iterable[OneImage], wanted: _ComputedParts) -> Generator[Prediction, None, None]:
        remaining, done = iter(images), 0
        ahead: deque[tuple[str, Future[Tensor | VitrailError]]] = deque()
        pool = ThreadPoolExecutor(min(resolve_worker_count(None), MOST_THREADS), thread_name_prefix="vitrail-decode")
        try:
            while True:
                for image in islice(remaining, (1 + AHEAD) * self.batch_size - len(ahead)):
                    ahead.append((describe_image(image), pool.submit(self._prepare_image, image)))
                if not ahead:
                    return
                batch = [ahead.popleft() for _ in range(min(self.batch_size, len(ahead)))]
                names, prepared = [name for name, _ in batch], [pixels.result() for _, pixels in batch]
                yield from self._predict_batch(done, names, prepared, wanted)
                done += len(batch)
        finally:
            pool.shutdown(cancel_futures=True)

    def _predict_values(self, images: OneImage | Iterable[OneImage]) -> list[FloatArray]:
        self.engine.check_request(logits=True, embeddings=False)
        predictions = self._predict_or_raise(images, values=True, embeddings=False)
        return [prediction.values for prediction in predictions if prediction.values is not None]

    def _predict_or_raise(
        self, images: OneImage | Iterable[OneImage], *, values: bool, embeddings: bool, familiarity: bool = False
    ) -> Generator[Prediction, None, None]:
        """Predict one image or many; raise an error with number and name for the first image that cannot be used."""
        wanted = _ComputedParts(values, embeddings, familiarity)
        if is_one_image(images):  # without threads: they take a while to start
            name, prepared = describe_image(images), self._prepare_image(images)
            (prediction,) = self._predict_batch(0, [name], [prepared], wanted)
            if prediction.error is not None:
                raise type(prediction.error)(f"{name}: {prediction.error}")
            yield prediction
            return
        if hasattr(images, "read"):  # iterating over it would give lines, not images
            raise InputError(
                f"an open file ({name_kind(images)}) is no image: give its path, or what its read() returns"
            )
        if not isinstance(images, Iterable) or isinstance(images, Mapping):
            raise InputError(f"{name_kind(images)} is no image: give {ALLOWED}, or a list of these")
        many: Iterable[Any] = images
        with closing(self._predict_ahead(many, wanted)) as predictions:
            for prediction in predictions:
                if prediction.error is not None:
                    raise type(prediction.error)(f"images[{prediction.index}], {prediction.name}: {prediction.error}")
                yield prediction

    def _predict_batch(
        self,
        first: int,
        names: Sequence[str],
        prepared: Sequence[Tensor | VitrailError],
        wanted: _ComputedParts,
    ) -> list[Prediction]:
        """Predict one batch of prepared images. `first` is the index of its first image."""
        usable = [pixels for pixels in prepared if isinstance(pixels, Tensor)]
        computed = iter(self._compute(torch.stack(usable), wanted) if usable else ())
        return [
            Prediction(index, name, error=pixels)
            if isinstance(pixels, VitrailError)
            else _make_prediction(index, name, *next(computed))
            for index, (name, pixels) in enumerate(zip(names, prepared, strict=True), start=first)
        ]

    def _compute(
        self, pixels: Tensor, wanted: _ComputedParts
    ) -> Iterator[tuple[FloatArray | None, FloatArray | None, Familiarity | None]]:
        """Turn pixels, (B, C, height, width) uint8, into values, embedding and familiarity of each image."""
        nothing = [None] * len(pixels)
        by_embeddings = wanted.familiarity and require_unknown(self.engine.reliability).needs_embeddings
        output = self.engine.compute(
            pixels,
            logits=wanted.values or (wanted.familiarity and not by_embeddings),
            embeddings=wanted.embeddings or by_embeddings,
        )
        logits, y = output
        return zip(
            to_array(self.task.activate(logits)) if wanted.values and logits is not None else nothing,
            to_array(y) if wanted.embeddings and y is not None else nothing,
            self.engine.judge(output) if wanted.familiarity else nothing,
            strict=True,
        )

    def _prepare_image(self, image: OneImage) -> Tensor | VitrailError:
        """Return the image resized and cropped, (C, height, width) uint8, or the error if it cannot be used."""
        try:
            return fit_image(image, self.engine.preprocessing, self.most_pixels)
        except (DataError, InputError) as error:
            return detach_error(error)


class _ComputedParts(NamedTuple):
    """What to compute for each image."""

    values: bool
    embeddings: bool
    familiarity: bool = False


def form_set(sets: LabelSets, probabilities: FloatArray, labels: Sequence[str], coverage: float) -> RankedLabels:
    """Return the set of labels for the probabilities (K,) of one image, best first."""
    size = int(sets.select(probabilities[None], coverage).sum())
    return rank_labels(probabilities, labels, size)


def rank_labels(probabilities: FloatArray, labels: Sequence[str], top: int) -> RankedLabels:
    """Return the `top` labels for the probabilities (K,) of one image, best first; equal ones in class order."""
    best = np.argsort(-probabilities, kind="stable")[:top]
    return [(labels[number], float(probabilities[number])) for number in best]


def check_top(top: int) -> None:
    """Raise a ConfigError if `top` is less than 1."""
    if top < 1:
        raise ConfigError(f"top = {top}: give 1 or more")


def _make_prediction(
    index: int, name: str, values: FloatArray | None, embedding: FloatArray | None, familiarity: Familiarity | None
) -> Prediction:
    """Return the prediction for an image; one with an error if it contains infinities or NaN."""
    scores = None if familiarity is None else np.float64(familiarity.score)
    if all(row is None or np.isfinite(row).all() for row in (values, embedding, scores)):
        return Prediction(index, name, values, embedding, familiarity=familiarity)
    error = InputError("the model's result for it is not a number: the weights may be damaged")
    return Prediction(index, name, error=error)
