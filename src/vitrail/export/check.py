"""An export beside its model, on the same images: what it computes, how large it is, how fast it runs.

Shapes: B images, C channels, height × width pixels, K classes.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.decode import to_channels
from vitrail.errors import ExportError
from vitrail.export.graphs import Graph
from vitrail.export.runtimes import Run
from vitrail.inspection.images import Picked, batch
from vitrail.model.base import ImageModel

EXACT = 1e-4
"""The largest difference of an output in float32; of outputs beyond 10, which float32 holds no better, 1e-5 of them."""
ROUNDED = 5e-3
"""Of a probability, with preprocessing inside: a pixel that lies half-way may be rounded to the other side."""
AGREEMENT, AGREEMENT_ANYWHERE = 0.95, 0.9
"""Images on which int8 guesses as its model does: of those that were given, and of photographs that were not."""
BATCHES = (1, 7)
TIMED, WARM, MOST_SECONDS = 15, 2, 10.0
"""Runs of each that latency is the median of, after so many; fewer where they would take longer."""


@dataclass(frozen=True)
class Checked:
    """What was measured when an export was compared with its model."""

    kind: str
    images: int
    images_from: str
    """In words."""
    sizes: tuple[str, ...]
    """Of the inputs that were run."""
    output: str
    """What was compared: logits, probabilities, embedding."""
    max_difference: float
    """The largest of any output."""
    tolerance: float | None
    """What was allowed; None for int8, which is held to its agreement."""
    agreement: float | None
    """The share of images with the same first guess; None without classes."""
    export_bytes: int
    model_bytes: int
    """Of the model's own weights, as it was loaded."""
    export_milliseconds: float
    """At batch 1, on this machine's CPU, with as many threads as torch takes."""
    model_milliseconds: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Trial:
    """One batch of the comparison."""

    inputs: Tensor
    """As the export takes them."""
    images: Tensor
    """As the model takes them."""


def check(
    kind: str, graph: Graph, run: Run, picked: Picked, *, given: bool, export_bytes: int, model_bytes: int
) -> Checked:
    """Run an export and its model on images; an ExportError where they differ by more than the kind allows.

    Args:
        run: the export.
        picked: the images.
        given: whether a person chose them.
    """
    trials = list(_trials(graph, picked.measured))
    pairs = [(_expected(graph, trial), run(trial.inputs)) for trial in trials]
    for trial, (expected, found) in zip(trials, pairs, strict=True):
        if expected.shape != found.shape:
            wrong = f"{tuple(found.shape)} where the model gives {tuple(expected.shape)}"
            raise ExportError(f"the export gives outputs of shape {wrong} for inputs of {_size(trial.inputs)}")
    tolerance = None if kind == "onnx-int8" else _tolerance(graph, [expected for expected, _ in pairs])
    difference = max(_difference(expected, found) for expected, found in pairs)
    agreement = _agreement(pairs) if graph.model.num_classes else None
    export_seconds, model_seconds = _latencies(graph, run, trials[0])
    checked = Checked(
        kind=kind,
        images=len(picked.measured),
        images_from=picked.measured_on,
        sizes=tuple(dict.fromkeys(_size(trial.inputs) for trial in trials)),
        output=graph.output,
        max_difference=difference,
        tolerance=tolerance,
        agreement=agreement,
        export_bytes=export_bytes,
        model_bytes=model_bytes,
        export_milliseconds=1e3 * export_seconds,
        model_milliseconds=1e3 * model_seconds,
        notes=_notes(kind, given),
    )
    _hold(checked, given)
    return checked


def _hold(checked: Checked, given: bool) -> None:
    """Raise where an export is not what its model is; written so that NaN fails too."""
    if not math.isfinite(checked.max_difference):
        raise ExportError("the export gives outputs that are no numbers where its model does not: nothing was written")
    if checked.tolerance is not None and not checked.max_difference <= checked.tolerance:
        raise ExportError(
            f"the export computes something else than its model, so nothing was written: {checked.output} differ by up "
            f"to {checked.max_difference:.3g}, and {checked.tolerance:.3g} is allowed"
        )
    least = AGREEMENT if given else AGREEMENT_ANYWHERE
    if checked.tolerance is None and checked.agreement is not None and not checked.agreement >= least:
        raise ExportError(
            f"in int8 the model guesses otherwise on too many images, so nothing was written: the first guess is the "
            f"same on {checked.agreement:.1%} of {checked.images_from}, and {least:.0%} is asked for; "
            + ("onnx keeps float32" if given else "calibrate with --images DATA, images as the model was trained on")
        )


def _notes(kind: str, given: bool) -> tuple[str, ...]:
    if kind == "onnx-int8" and not given:
        return ("photographs that the model was not made for prove little about int8: check with --images DATA",)
    return ()


def _trials(graph: Graph, pixels: Sequence[Tensor]) -> Iterator[Trial]:
    """All images, in batches of one and of several in turn; where the size may change, some at others too."""
    model = graph.model
    pixels = [to_channels(each, model.in_channels) for each in pixels]
    start = 0
    while start < len(pixels):
        for count in BATCHES:
            if some := pixels[start : start + count]:
                yield _of_pixels(graph, some) if graph.input == "pixels" else _of_images(graph, some)
            start += count
    # Few images must not mean few batches.
    several = [pixels[number % len(pixels)] for number in range(BATCHES[-1])]
    yield _of_pixels(graph, several) if graph.input == "pixels" else _of_images(graph, several)
    if graph.any_size:
        images = batch(several, model)
        for size in _other_sizes(graph):
            resized = F.interpolate(images, size=size, mode="bilinear", antialias=True)
            for count in BATCHES:
                yield Trial(resized[:count], resized[:count])


def _of_images(graph: Graph, pixels: Sequence[Tensor]) -> Trial:
    images = batch(pixels, graph.model)
    return Trial(images, images)


def _of_pixels(graph: Graph, pixels: Sequence[Tensor]) -> Trial:
    """A batch of pixels is of one size: what all of them have at the top left."""
    height, width = (min(each.shape[side] for each in pixels) for side in (1, 2))
    cut = [each[:, :height, :width] for each in pixels]
    return Trial(torch.stack(cut).permute(0, 2, 3, 1).contiguous(), batch(cut, graph.model))


def _other_sizes(graph: Graph) -> list[tuple[int, int]]:
    """The one that was traced, one that is wider, and one that is smaller than the model's own where that can be."""
    height, width = graph.example.shape[2:]
    own_height, own_width = graph.model.image_size
    steps = height - own_height, (width - own_width) // 2
    smaller = [max(own // 2 // step, 2) * step for own, step in zip((own_height, own_width), steps, strict=True)]
    least = 2 * getattr(graph.model, "stride", 1)
    return [(height, width), (own_height, 2 * width - own_width), (max(smaller[0], least), max(smaller[1], least))]


@torch.inference_mode()
def _expected(graph: Graph, trial: Trial) -> Tensor:
    """By the model itself, on images that were prepared outside of the graph."""
    outputs: Tensor = graph.model(trial.images)
    return outputs.softmax(dim=1) if graph.output == "probabilities" else outputs


def _tolerance(graph: Graph, expected: Sequence[Tensor]) -> float:
    largest = max(float(outputs.abs().max()) for outputs in expected)
    return ROUNDED * max(1.0, largest) if graph.input == "pixels" else EXACT * max(1.0, largest / 10)


def _difference(expected: Tensor, found: Tensor) -> float:
    return float((expected - found).abs().max())


def _agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    same = torch.cat([expected.argmax(dim=1) == found.argmax(dim=1) for expected, found in pairs])
    return float(same.float().mean())


def _latencies(graph: Graph, run: Run, trial: Trial) -> tuple[float, float]:
    """Seconds for one image: of the export, of the model on what is prepared already. In turn, so that a busy moment of
    the machine hits both."""
    inputs, images = trial.inputs[:1], trial.images[:1]
    taken: tuple[list[float], list[float]] = ([], [])
    ends = time.perf_counter() + MOST_SECONDS
    for number in range(WARM + TIMED):
        for seconds, compute, given in zip(taken, (run, _plain(graph.model)), (inputs, images), strict=True):
            start = time.perf_counter()
            compute(given)
            seconds.append(time.perf_counter() - start)
        if number >= WARM and time.perf_counter() > ends:
            break
    export_seconds, model_seconds = (statistics.median(seconds[WARM:]) for seconds in taken)
    return export_seconds, model_seconds


def _plain(model: ImageModel) -> Run:
    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        outputs: Tensor = model(images)
        return outputs

    return run


def _size(inputs: Tensor) -> str:
    return "×".join(map(str, inputs.shape))
