"""Measure everything that the report shows about one model, or about two models together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitrail.errors import NotApplicableError
from vitrail.inference.engine import open_engine
from vitrail.inference.predictor import rank_labels
from vitrail.inference.torch_engine import cast_half_to_float32
from vitrail.inspection.findings import Absent, Distance, Findings, Layers, ShownImage
from vitrail.inspection.images import InspectionImages, normalise_batch, render_input
from vitrail.inspection.measure import anatomy
from vitrail.inspection.measure.attention import mean_attention_distance, measure_attention, name_attention_layers
from vitrail.inspection.measure.components import measure_components
from vitrail.inspection.measure.filters import measure_filters
from vitrail.inspection.measure.positions import measure_learned_positions
from vitrail.inspection.measure.similarity import measure_layers, measure_layers_between, measure_tokens
from vitrail.model.base import ImageModel
from vitrail.system.events import Progress
from vitrail.tasks.task import AnswerLine
from vitrail.weights.card import list_facts

GUESSES = 5
PASSES, PASSES_SHOWN = 2, 4
"""Passes over the measured images, for distance and CKA; over the shown ones, for guesses, attention and patches."""

Part = TypeVar("Part")


def inspect_model(
    model: ImageModel,
    name: str,
    picked: InspectionImages | Absent,
    *,
    card: str = "",
    records: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> Findings:
    """Measure everything about one model. A model in half precision is cast to float32, in place.

    Args:
        model: the model, on any device.
        name: its name in the report, without a path of this machine.
        picked: the images to show and to measure on, fitted to the model, or why there are none.
        card: the text of the model card.
        records: the measurements of the run that trained the model.
        progress: called with the number of images that are done, and of all images.

    Returns:
        The findings, with `Absent` in place of parts that this kind of model does not have or that need images.
    """
    cast_half_to_float32(model)
    findings = Findings(
        name=name,
        facts=tuple(list_facts(model)),
        card=card,
        filters=_measure_if_applicable(lambda: measure_filters(model)),
        positions=_measure_if_applicable(lambda: measure_learned_positions(model)),
        records=tuple(records),
    )
    if isinstance(picked, Absent):
        return replace(findings, distance=picked, attention=picked, components=picked, tokens=picked, layers=picked)
    shown = normalise_batch([pixels for _, pixels in picked.shown], model)
    measured = normalise_batch(picked.measured, model)
    with report_progress(model, PASSES * len(measured) + PASSES_SHOWN * len(shown), progress):
        return replace(
            findings,
            images=_describe_images(model, picked.shown),
            images_from=picked.shown_from,
            measured_on=picked.measured_on,
            distance=_measure_if_applicable(lambda: _measure_distance(model, measured)),
            attention=_measure_if_applicable(lambda: measure_attention(model, shown)),
            components=_measure_if_applicable(lambda: measure_components(model, shown)),
            tokens=_measure_if_applicable(lambda: measure_tokens(model, shown)),
            layers=_measure_if_applicable(lambda: measure_layers(model, measured)),
        )


def compare_layers(
    first: ImageModel,
    second: ImageModel,
    one: InspectionImages | Absent,
    other: InspectionImages | Absent,
    progress: Progress | None = None,
) -> Layers | Absent:
    """Compare the layers of two models on the same images, each fitted to its own model; or say why not."""
    if isinstance(one, Absent):
        return one
    if isinstance(other, Absent):
        return other
    images = normalise_batch(one.measured, first), normalise_batch(other.measured, second)
    with report_progress(second, len(other.measured), progress):
        return _measure_if_applicable(lambda: measure_layers_between(first, images[0], second, images[1]))


def predict_labels(
    model: ImageModel, fitted: Sequence[Tensor], most: int = GUESSES
) -> list[tuple[tuple[str, float], ...]]:
    """Return the most probable labels of each image with their probabilities; () for a model that gives no label.

    Args:
        model: the model, on any device.
        fitted: images of the model's size, each (C, height, width) uint8.
        most: at most so many labels.
    """
    if not model.num_classes or model.task.kind != "labels" or not fitted:
        return [()] * len(fitted)
    with anatomy.evaluation_mode(model):
        engine = open_engine(model, device=next(model.parameters()).device)
        parts = anatomy.split_batch(model, torch.stack(list(fitted)))
        rows = [row for part in parts for row in engine.classify(part)]
    return [tuple(rank_labels(row, engine.labels, most)) for row in rows]


def describe_answers(model: ImageModel, fitted: Sequence[Tensor], most: int = GUESSES) -> list[tuple[AnswerLine, ...]]:
    """Return what a model with another task than one label answers for each image; () for other models.

    The arguments are those of `predict_labels`.
    """
    if not model.num_classes or model.task.kind == "labels" or not fitted:
        return [()] * len(fitted)
    with anatomy.evaluation_mode(model):
        engine = open_engine(model, device=next(model.parameters()).device)
        parts = anatomy.split_batch(model, torch.stack(list(fitted)))
        rows = [row for part in parts for row in engine.predict(part)]
    return [tuple(engine.task.describe(row, most)) for row in rows]


@contextmanager
def report_progress(model: ImageModel, total: int, progress: Progress | None) -> Iterator[None]:
    """Call `progress` for every image that passes the last layer, while the block runs."""
    try:
        *_, last = anatomy.list_layers(model).values()
    except NotApplicableError:
        progress = None
    if progress is None:
        yield
        return
    done = 0

    def count(module: nn.Module, arguments: Any, output: Any) -> None:
        nonlocal done
        done = min(done + len(output), total)
        progress(done, total)

    hook = last.register_forward_hook(count)
    try:
        progress(0, total)
        yield
        progress(total, total)
    finally:
        hook.remove()


def _describe_images(model: ImageModel, shown: Sequence[tuple[str, Tensor]]) -> tuple[ShownImage, ...]:
    images = [fitted for _, fitted in shown]
    found = zip(shown, predict_labels(model, images), describe_answers(model, images), strict=True)
    return tuple(ShownImage(name, render_input(fitted), best, answer) for (name, fitted), best, answer in found)


def _measure_distance(model: ImageModel, images: Tensor) -> Distance:
    height, width = images.shape[2:]
    return Distance(name_attention_layers(model), mean_attention_distance(model, images), (height, width), len(images))


def _measure_if_applicable(measure: Callable[[], Part]) -> Part | Absent:
    try:
        return measure()
    except NotApplicableError as error:
        return Absent(str(error))
