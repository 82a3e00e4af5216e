"""How good a model is, for the top of the report: what is known, and the small photos that show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitrail.data.sources.source import Source, make_printable
from vitrail.data.transforms.decode import IGNORE_WARNINGS, open_image, to_rgb, turn_upright
from vitrail.errors import DataError
from vitrail.evaluation.report import EvaluationReport
from vitrail.evaluation.task_report import TaskReport
from vitrail.inference.class_names import translate_wnid
from vitrail.inspection.findings import AnsweredPhoto, ScoredPhoto, Scores, TaskScores

MOST_MISTAKES, MOST_DOUBTFUL = 24, 5
"""Photos on the page."""
MISTAKE_SIDE, DOUBTFUL_SIDE = 240, 320
"""The longer side of such a photo, in pixels."""


@dataclass(frozen=True)
class DoubtfulImage:
    """An image whose label may be wrong."""

    index: int
    """Its number in the source."""
    label: str
    guess: str
    """The class that it looks like."""
    probability: float
    """Of the guess."""


@dataclass(frozen=True)
class ModelScores:
    """How good one model is on labelled images, for the top of the report."""

    report: EvaluationReport
    source: Source
    """The images that `report.mistakes` and `doubtful` point into."""
    remark: str
    """Which images these are, such as "49 photos that were neither trained on nor used to choose anything"."""
    doubtful: tuple[DoubtfulImage, ...] = ()
    """The most doubtful first."""


@dataclass(frozen=True)
class TaskModelScores:
    """How good one model with another task than one label is, for the top of the report."""

    report: TaskReport
    source: Source
    """The images that `report.worst` points into."""
    remark: str
    """Which images these are."""


AnyScores = ModelScores | TaskModelScores


def read_score_photos(scores: AnyScores) -> Scores | TaskScores:
    """Return the scores with small photos: of the surest mistakes and the most doubtful labels, or the worst answers.

    Images that cannot be read are skipped, and the next take their places.
    """
    if isinstance(scores, TaskModelScores):
        worst = {each.index: each for each in scores.report.worst}
        answered = tuple(
            AnsweredPhoto(name, pixels, worst[index].lines, worst[index].truth)
            for index, name, pixels in _read_pixels(scores.source, worst, MOST_MISTAKES, MISTAKE_SIDE)
        )
        return TaskScores(scores.report, scores.remark, answered)
    mistakes = ((each.index, each.label, each.guess, each.confidence) for each in scores.report.mistakes)
    doubtful = ((each.index, each.label, each.guess, each.probability) for each in scores.doubtful)
    return Scores(
        scores.report,
        scores.remark,
        _read_photos(scores.source, mistakes, MOST_MISTAKES, MISTAKE_SIDE),
        _read_photos(scores.source, doubtful, MOST_DOUBTFUL, DOUBTFUL_SIDE),
        len(scores.doubtful),
    )


def _read_photos(
    source: Source, images: Iterable[tuple[int, str, str, float]], most: int, side: int
) -> tuple[ScoredPhoto, ...]:
    """Read the first images that can be read, each given by its number, label, guess and probability."""
    known = {index: (label, guess, share) for index, label, guess, share in images}
    photos = []
    for index, name, pixels in _read_pixels(source, known, most, side):
        label, guess, probability = known[index]
        photos.append(ScoredPhoto(name, pixels, translate_wnid(label), translate_wnid(guess), probability))
    return tuple(photos)


def _read_pixels(
    source: Source, indices: Iterable[int], most: int, side: int
) -> Iterator[tuple[int, str, NDArray[np.uint8]]]:
    """Yield number, name and pixels of the first images that can be read."""
    found = 0
    for index in indices:
        if found == most:
            return
        try:
            pixels = shrink_photo(source.read(index).content, side)
        except (DataError, OSError):
            continue
        found += 1
        yield index, make_printable(source.display_name(index).rsplit("/", 1)[-1]), pixels


def shrink_photo(content: bytes | Tensor, side: int) -> NDArray[np.uint8]:
    """Return an image, upright, with a longer side of at most `side` pixels: (height, width, 1 or 3) uint8.

    A JPEG is decoded no larger than needed. Of two channels the first is taken, of more than three the first three.

    Raises:
        DataError: the image cannot be decoded.
    """
    if isinstance(content, Tensor):
        pixels = content[: 3 if len(content) >= 3 else 1].permute(1, 2, 0).cpu().numpy()
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    else:
        image = _decode_small(content, side)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    small = np.asarray(image)
    return small[..., None] if small.ndim == 2 else small


def _decode_small(content: bytes, side: int) -> Image.Image:
    with IGNORE_WARNINGS:
        image = open_image(content)
        image.draft("RGB", (2 * side, 2 * side))  # of a JPEG only; other formats ignore it
        try:
            image.load()
            return to_rgb(turn_upright(image))
        except DataError:
            raise
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise DataError(f"damaged: {error}") from None
