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
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.decode import to_channels
from vitrail.errors import ExportError
from vitrail.exporting.graphs import Graph
from vitrail.exporting.runtimes import Run
from vitrail.inspection.images import Picked, batch

EXACT = 1e-4
"""The largest difference of an output in float32; of outputs beyond 10, which float32 holds no better, 1e-5 of them."""
ROUNDED = 2e-2
"""With preprocessing inside, as a share of the largest output of the same image, for probabilities of many classes are
all small: a pixel that lies half-way may be rounded to the other side. Trained models came to 4e-3."""
AGREEMENT, AGREEMENT_ANYWHERE = 0.95, 0.9
"""Images on which int8 guesses as its model does: of those that were given, and of photographs that were not."""
COSINE = 0.95
"""The least similarity of an embedding in int8 with the model's own. Of trained models (S/8, S/4, BiT) the worst image
came to 0.995, ten times as near to 1."""
FEW = 30
"""Images, below which a share of them says little."""
CALIBRATE = "calibrate with --images DATA, images as the model was trained on"
BATCHES = (1, 7)
TIMED, WARM, MOST_SECONDS = 15, 2, 10.0
"""Runs of each that latency is the median of, after so many; fewer where they would take longer."""


@dataclass(frozen=True)
class Checked:
    """What was measured when an export was compared with its model."""

    kind: str
    images: int
    """Compared, each counted once."""
    calibrated: int
    """Images that int8 was calibrated on; 0 where its ranges are found at run time."""
    images_from: str
    """In words."""
    sizes: tuple[str, ...]
    """Of the inputs that were run."""
    output: str
    """What was compared: logits, probabilities, embedding."""
    relative: bool
    """Whether differences are shares of the largest output of the same image, as with preprocessing inside."""
    max_difference: float
    """The largest of any output."""
    tolerance: float | None
    """What was allowed; None for int8, which is held to its agreement, or without classes to its cosine."""
    agreement: float | None
    """The share of images with the same first guess; None without classes."""
    cosine: float | None
    """The least cosine similarity of an image's embedding with the model's own; None with classes."""
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
    counted: bool = True
    """Whether its images have not been in another."""


def check(
    kind: str,
    graph: Graph,
    run: Run,
    picked: Picked,
    *,
    given: bool,
    calibrated: int = 0,
    export_bytes: int,
    model_bytes: int,
) -> Checked:
    """Run an export and its model on images; an ExportError where they differ by more than the kind allows.

    Args:
        run: the export.
        picked: the images.
        given: whether a person chose them.
        calibrated: how many others int8 was calibrated on.
    """
    trials = list(_trials(graph, picked.measured))
    pairs = [(_by_model(graph, trial.images), run(trial.inputs)) for trial in trials]
    for trial, (expected, found) in zip(trials, pairs, strict=True):
        if expected.shape != found.shape:
            wrong = f"{tuple(found.shape)} where the model gives {tuple(expected.shape)}"
            raise ExportError(f"the export gives outputs of shape {wrong} for inputs of {_size(trial.inputs)}")
    counted = [pair for trial, pair in zip(trials, pairs, strict=True) if trial.counted]
    export_seconds, model_seconds = _latencies(graph, run, trials[0])
    checked = Checked(
        kind=kind,
        images=len(picked.measured),
        calibrated=calibrated,
        images_from=picked.measured_on,
        sizes=tuple(dict.fromkeys(_size(trial.inputs) for trial in trials)),
        output=graph.output,
        relative=graph.input == "pixels",
        max_difference=_difference(graph, pairs),
        tolerance=None if kind == "onnx-int8" else _tolerance(graph, [expected for expected, _ in pairs]),
        agreement=_agreement(counted) if graph.model.num_classes else None,
        cosine=None if graph.model.num_classes else _cosine(pairs),
        export_bytes=export_bytes,
        model_bytes=model_bytes,
        export_milliseconds=1e3 * export_seconds,
        model_milliseconds=1e3 * model_seconds,
        notes=_notes(kind, given, len(picked.measured)),
    )
    _hold(checked, given)
    return checked


def _hold(checked: Checked, given: bool) -> None:
    """Raise where an export is not what its model is; written so that NaN fails too."""
    if not math.isfinite(checked.max_difference):
        raise ExportError("the export gives outputs that are no numbers where its model does not: nothing was written")
    if checked.tolerance is not None and not checked.max_difference <= checked.tolerance:
        share = " of the image's largest" if checked.relative else ""
        raise ExportError(
            f"the export computes something else than its model, so nothing was written: {checked.output} differ by up "
            f"to {checked.max_difference:.3g}{share}, and {checked.tolerance:.3g} is allowed"
        )
    if checked.tolerance is not None:
        return
    least, instead = (AGREEMENT, "onnx keeps float32") if given else (AGREEMENT_ANYWHERE, CALIBRATE)
    if checked.agreement is not None and not checked.agreement >= least:
        raise ExportError(
            f"in int8 the model guesses otherwise on too many images, so nothing was written: the first guess is the "
            f"same on {checked.agreement:.1%} of {checked.images_from}, and {least:.0%} is asked for; {instead}"
        )
    if checked.cosine is not None and not checked.cosine >= COSINE:
        raise ExportError(
            f"in int8 the model embeds images elsewhere, so nothing was written: the least cosine similarity with its "
            f"own embedding is {checked.cosine:.3f}, and {COSINE} is asked for; {instead}"
        )


def _notes(kind: str, given: bool, images: int) -> tuple[str, ...]:
    if kind != "onnx-int8":
        return ()
    if not given:
        return ("photographs that the model was not made for prove little about int8: check with --images DATA",)
    if images < FEW:
        return (
            f"so few images say little about int8: compared on {images}, give twice {FEW} or more by --images DATA",
        )
    return ()


def _trials(graph: Graph, pixels: Sequence[Tensor]) -> Iterator[Trial]:
    """All images, in batches of one and of several in turn; where the size may change, at several of these in turn."""
    pixels = [to_channels(each, graph.model.in_channels) for each in pixels]
    sizes = [None, *_other_sizes(graph)] if graph.any_size else [None]
    start, number = 0, 0
    while start < len(pixels):
        count, size = BATCHES[number % len(BATCHES)], sizes[number // len(BATCHES) % len(sizes)]
        yield _trial(graph, pixels[start : start + count], size)
        start, number = start + count, number + 1
    # Few images must not mean few batches, nor few sizes.
    several = [pixels[number % len(pixels)] for number in range(BATCHES[-1])]
    for size in sizes:
        for count in BATCHES:
            yield dataclasses.replace(_trial(graph, several[:count], size), counted=False)


def _trial(graph: Graph, pixels: Sequence[Tensor], size: tuple[int, int] | None) -> Trial:
    if graph.input == "pixels":
        return _of_pixels(graph, pixels)
    images = batch(pixels, graph.model)
    if size is not None:
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
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
def _by_model(graph: Graph, images: Tensor) -> Tensor:
    """What the export should give, by the model itself, on images that were prepared outside of the graph."""
    outputs: Tensor = graph.model(images)
    return outputs.softmax(dim=1) if graph.output == "probabilities" else outputs


def _tolerance(graph: Graph, expected: Sequence[Tensor]) -> float:
    if graph.input == "pixels":
        return ROUNDED
    return EXACT * max(1.0, max(float(outputs.abs().max()) for outputs in expected) / 10)


def _difference(graph: Graph, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """By torch's own maximum: Python's would lose a NaN that is not the first."""
    differences = torch.cat([(expected - found).abs().amax(dim=1) for expected, found in pairs])
    if graph.input == "pixels":
        largest = torch.cat([expected.abs().amax(dim=1) for expected, _ in pairs])
        differences = differences / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return float(differences.max())


def _cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return float(torch.cat([F.cosine_similarity(expected, found) for expected, found in pairs]).min())


def _agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    same = torch.cat([expected.argmax(dim=1) == found.argmax(dim=1) for expected, found in pairs])
    return int(same.sum()) / len(same)  # in float32 nine of ten would be less than 0.9


def _latencies(graph: Graph, run: Run, trial: Trial) -> tuple[float, float]:
    """Seconds for one image: of the export, of the model on what is prepared already. In turn, so that a busy moment of
    the machine hits both."""
    inputs, images = trial.inputs[:1], trial.images[:1]
    taken: tuple[list[float], list[float]] = ([], [])
    by_model: Run = partial(_by_model, graph)
    ends = time.perf_counter() + MOST_SECONDS
    for number in range(WARM + TIMED):
        for seconds, compute, given in zip(taken, (run, by_model), (inputs, images), strict=True):
            start = time.perf_counter()
            compute(given)
            seconds.append(time.perf_counter() - start)
        if number >= WARM and time.perf_counter() > ends:
            break
    export_seconds, model_seconds = (statistics.median(seconds[WARM:]) for seconds in taken)
    return export_seconds, model_seconds


def _size(inputs: Tensor) -> str:
    return "×".join(map(str, inputs.shape))
