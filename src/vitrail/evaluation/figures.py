"""Draw a report: the confusion matrix, the calibration of the probabilities, and the most confident mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.errors import DataError
from vitrail.evaluation.answered_images import AnsweredImages
from vitrail.evaluation.report import EvaluationReport, Mistake
from vitrail.evaluation.task_report import TaskReport
from vitrail.inference.class_names import translate_wnid
from vitrail.system.figures import BLUE, FAINT, INK, VERMILION, new_figure, replace_unprintable, set_title
from vitrail.tasks.draw_measures import paint_confusions, shorten_name
from vitrail.tasks.task import Task

COLUMNS, ROWS = 6, 4
"""Images on the contact sheet of mistakes."""
SIDE = 256
"""Largest side of an image on the contact sheet, in pixels."""
PATH_LETTERS = 36
"""Longer file paths are cut."""
CAPTION_LETTERS = 25
"""Longer answers are cut."""
MOST_PIXELS = 100_000_000


@dataclass(frozen=True)
class CaptionedImage:
    """An image of a contact sheet."""

    index: int
    """Its number in the source."""
    name: str
    caption: str
    """Two lines."""


def draw_report(report: EvaluationReport, source: Source, folder: Path) -> list[Path]:
    """Draw all figures of a report into a folder and return their paths. Without mistakes there is no mistakes.png."""
    paths = [draw_confusion(report, folder / "confusion.png"), draw_calibration(report, folder / "calibration.png")]
    sheet = draw_mistakes(report.mistakes[: COLUMNS * ROWS], source, folder / "mistakes.png")
    return [*paths, *([sheet] if sheet else [])]


def draw_task_report(
    report: TaskReport, task: Task, answered: AnsweredImages, source: Source, folder: Path
) -> list[Path]:
    """Draw the figures of a task, and a contact sheet of the images with the worst answers; return the .png files."""
    images = [
        CaptionedImage(each.index, each.image, f"{_cut_line(each.words)}\ntrue: {_cut_line(each.truth)}")
        for each in report.worst[: COLUMNS * ROWS]
    ]
    title = report.worst_words[:1].upper() + report.worst_words[1:]
    sheet = draw_contact_sheet(images, source, folder / "worst.png", f"{title}: the answer, and what is true below it")
    return [*task.draw(answered.values, answered.targets, folder), *([sheet] if sheet else [])]


def draw_confusion(report: EvaluationReport, path: Path) -> Path:
    """Draw the confusion matrix: a row for each label, a column for each guess, colours by share of the row."""
    present = [
        number for number, score in enumerate(report.classes) if score.images or report.confusion[:, number].any()
    ]
    names = [shorten_name(translate_wnid(report.classes[number].name)) for number in present]
    counts = report.confusion[np.ix_(present, [*present, *([-1] if report.foreign_guesses else [])])]
    side = float(np.clip(3.5 + 0.32 * len(names), 6, 18))
    with new_figure(path, side + 1, side) as figure:
        axes = figure.add_subplot()
        paint_confusions(figure, axes, names, [*names, "(another)"][: counts.shape[1]], counts, "share of the class")
        axes.set(xlabel="guess", ylabel="label")
        set_title(figure, f"{_format_percent(report.top1.value)} right on {report.images:,} images of {report.data}")
    return path


def draw_calibration(report: EvaluationReport, path: Path) -> Path:
    """Draw how often guesses of a given probability are right, and below it how many guesses have that probability."""
    with new_figure(path, 6.5, 7) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        middles = [(each.low + each.high) / 2 for each in report.bins]
        widths = [(each.high - each.low) * 0.92 for each in report.bins]
        above.bar(middles, [each.accuracy for each in report.bins], widths, color=BLUE, label="right")
        above.plot([each.confidence for each in report.bins], [each.confidence for each in report.bins], "o",
                   color=VERMILION, markersize=5, label="if it were calibrated")  # fmt: skip
        above.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle=":")
        above.set(xlim=(0, 1), ylim=(0, 1), ylabel="share that is right")
        above.legend(loc="upper left")
        below.bar(middles, [each.images for each in report.bins], widths, color=FAINT)
        below.set(xlabel="probability of the first guess", ylabel="images")
        error = report.calibration
        set_title(figure, f"Calibration error {error.value:.3f} ({error.low:.3f} to {error.high:.3f})")
    return path


def draw_mistakes(mistakes: tuple[Mistake, ...], source: Source, path: Path) -> Path | None:
    """Draw a contact sheet of images with label and wrong guess; return None if there is no image to draw."""
    images = []
    for mistake in mistakes:
        guess, label = (shorten_name(translate_wnid(name)) for name in (mistake.guess, mistake.label))
        caption = f"{guess} {_format_percent(mistake.confidence)}\nlabel: {label}"
        images.append(CaptionedImage(mistake.index, mistake.image, caption))
    return draw_contact_sheet(images, source, path, "The surest mistakes: the guess, and the label below it")


def draw_contact_sheet(images: Sequence[CaptionedImage], source: Source, path: Path, title: str) -> Path | None:
    """Draw images with two lines above and the name below each; return None if there is no image to draw."""
    pairs = [(each, image) for each in images if (image := _read_image(source, each.index)) is not None]
    if not pairs:
        return None
    rows = -(-len(pairs) // COLUMNS)
    with new_figure(path, 12, 2.55 * rows + 0.5) as figure:
        for place, axes in enumerate(np.atleast_1d(figure.subplots(rows, COLUMNS)).flat):
            axes.set_axis_off()
            if place >= len(pairs):
                continue
            each, image = pairs[place]
            pixels = image.permute(1, 2, 0).numpy()
            sharp = "nearest" if max(pixels.shape) < SIDE / 2 else None
            axes.imshow(pixels, cmap="grey", vmin=0, vmax=255, interpolation=sharp)
            axes.set_title(each.caption, fontsize=8.5, loc="center", color=INK, parse_math=False)
            axes.text(0.5, -0.02, each.name[-PATH_LETTERS:], transform=axes.transAxes, ha="center", va="top",
                      fontsize=6, color=FAINT, parse_math=False)  # fmt: skip
        set_title(figure, title)
    return path


def _read_image(source: Source, index: int) -> Tensor | None:
    """Return (C, height, width) uint8 with one or three channels, or None if the image cannot be read."""
    try:
        content = source.read(index).content
        pixels = content if isinstance(content, Tensor) else decode_image(content, MOST_PIXELS)
    except DataError:
        return None
    pixels = to_channels(pixels, 1 if pixels.shape[0] == 1 else 3)
    scale = SIDE / max(pixels.shape)
    if scale < 1:
        size = [max(round(side * scale), 1) for side in pixels.shape[1:]]
        pixels = F.interpolate(pixels[None], size=size, mode="bilinear", antialias=True)[0]
    return pixels


def _cut_line(words: str) -> str:
    """Return words that fit above an image of a contact sheet."""
    words = replace_unprintable(words)
    return words if len(words) <= CAPTION_LETTERS else f"{words[: CAPTION_LETTERS - 1]}…"


def _format_percent(share: float) -> str:
    return f"{share:.1%}" if share == share else "nothing"
