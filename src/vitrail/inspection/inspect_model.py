"""A look inside one model: everything that the report tells, measured on the images that were picked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vitrail.errors import NotApplicableError
from vitrail.inference.batches import Progress, in_full_precision
from vitrail.inference.predictor import labels_of
from vitrail.inspection.findings import Absent, Distance, Findings, Layers, Shown
from vitrail.inspection.images import Picked, batch, seen
from vitrail.inspection.measure import anatomy
from vitrail.inspection.measure.attention import attention_names, attention_of_images, mean_attention_distance
from vitrail.inspection.measure.filters import filters_of
from vitrail.inspection.measure.positions import positions_of
from vitrail.inspection.measure.similarity import layers_between, layers_of, tokens_of
from vitrail.model.base import ImageModel
from vitrail.weights.card import facts

GUESSES = 5
PASSES = 2
"""Over the images that are measured on: distance and CKA. Those that are shown go through thrice."""

Part = TypeVar("Part")


def look_inside(
    model: ImageModel,
    name: str,
    picked: Picked | Absent,
    *,
    card: str = "",
    records: Sequence[Mapping[str, Any]] = (),
    progress: Progress | None = None,
) -> Findings:
    """Everything, with `Absent` in place of what a model of that kind does not have, or of what needs images.

    A model in half precision becomes one in float32.
    """
    in_full_precision(model)
    alone = Findings(
        name=name,
        facts=tuple(facts(model)),
        card=card,
        filters=_if_any(lambda: filters_of(model)),
        positions=_if_any(lambda: positions_of(model)),
        records=tuple(records),
    )
    if isinstance(picked, Absent):
        return replace(alone, distance=picked, attention=picked, tokens=picked, layers=picked)
    shown = batch([pixels for _, pixels in picked.shown], model)
    measured = batch(picked.measured, model)
    with counted(model, PASSES * len(measured) + 3 * len(shown), progress):
        return replace(
            alone,
            images=_shown(model, picked, shown),
            images_from=picked.shown_from,
            measured_on=picked.measured_on,
            distance=_if_any(lambda: _distance(model, measured)),
            attention=_if_any(lambda: attention_of_images(model, shown)),
            tokens=_if_any(lambda: tokens_of(model, shown)),
            layers=_if_any(lambda: layers_of(model, measured)),
        )


def look_between(
    first: ImageModel,
    second: ImageModel,
    one: Picked | Absent,
    other: Picked | Absent,
    progress: Progress | None = None,
) -> Layers | Absent:
    """The layers of two models beside each other, on the same images, each in its own preprocessing."""
    if isinstance(one, Absent):
        return one
    if isinstance(other, Absent):
        return other
    images = batch(one.measured, first), batch(other.measured, second)
    with counted(second, len(other.measured), progress):
        return _if_any(lambda: layers_between(first, images[0], second, images[1]))


def guesses(model: ImageModel, images: Tensor, most: int = GUESSES) -> list[tuple[tuple[str, float], ...]]:
    """For each image the labels that the model gives the highest probabilities; none where it has no classes."""
    if not model.num_classes:
        return [()] * len(images)
    labels = labels_of(model)
    with torch.inference_mode(), anatomy.evaluating(model):
        probabilities = torch.cat([model(part).softmax(dim=1) for part in anatomy.few_at_a_time(model, images)])
    values, classes = probabilities.topk(min(most, model.num_classes), dim=1)
    return [
        tuple((labels[number], value) for value, number in zip(row, column, strict=True))
        for row, column in zip(values.tolist(), classes.tolist(), strict=True)
    ]


@contextmanager
def counted(model: ImageModel, total: int, progress: Progress | None) -> Iterator[None]:
    """Tells `progress` of every image that has come through the last layer."""
    try:
        *_, last = anatomy.layers(model).values()
    except NotApplicableError:
        progress = None
    if progress is None:
        yield
        return
    done = 0

    def tell(module: nn.Module, arguments: Any, output: Any) -> None:
        nonlocal done
        done = min(done + len(output), total)
        progress(done, total)

    hook = last.register_forward_hook(tell)
    try:
        yield
        progress(total, total)
    finally:
        hook.remove()


def _shown(model: ImageModel, picked: Picked, images: Tensor) -> tuple[Shown, ...]:
    found = guesses(model, images)
    return tuple(
        Shown(name, seen(pixels, model), told) for (name, pixels), told in zip(picked.shown, found, strict=True)
    )


def _distance(model: ImageModel, images: Tensor) -> Distance:
    height, width = images.shape[2:]
    return Distance(attention_names(model), mean_attention_distance(model, images), (height, width), len(images))


def _if_any(measure: Callable[[], Part]) -> Part | Absent:
    try:
        return measure()
    except NotApplicableError as error:
        return Absent(str(error))
