"""Compare an export with its model on the same images: outputs, size, latency.

Shapes: B images, C channels, height × width pixels, K outputs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.decode import to_channels
from vitrail.errors import ExportError
from vitrail.exporting.graphs import ExportGraph
from vitrail.exporting.result import ExportResult
from vitrail.exporting.runtimes import ExportRunner
from vitrail.inspection.images import InspectionImages, normalise_batch, prepare_batch
from vitrail.system.events import Progress

EXACT = 1e-4
"""The allowed difference of an output in float32; for outputs beyond 10, 1e-5 of them."""
ROUNDED = 2e-2
"""The allowed difference with preprocessing inside, as a share of the largest output of the same image, because
probabilities of many classes are all small; for numbers, which may be in any units, as a share of their usual
deviation. A pixel half-way between two values may round the other way. Trained models differ by up to 4e-3."""
AGREEMENT, AGREEMENT_ANYWHERE = 0.95, 0.9
"""The least share of images with the same first guess, or the same answer, in int8: for images of the user, and for
our photographs."""
COSINE = 0.95
"""The least cosine similarity of an int8 embedding with the model's own. The worst image of trained models (S/8, S/4,
BiT) had 0.995."""
FEW = 30
"""With fewer images than this, a share of them says little."""
CALIBRATE = "calibrate on images as the model was trained on (--images DATA)"
BATCHES = (1, 7)
TIMED, WARM, MOST_SECONDS = 15, 2, 10.0
"""Latency is the median of `TIMED` runs after `WARM` others; fewer if they would take longer than `MOST_SECONDS`."""


@dataclass(frozen=True)
class ComparisonBatch:
    """One batch of the comparison."""

    inputs: Tensor
    """The inputs as the export takes them."""
    images: Tensor
    """The same images as the model takes them."""
    counted: bool = True
    """Whether these images count, because no other batch had them."""


def compare_with_model(
    kind: str,
    graph: ExportGraph,
    run: ExportRunner,
    picked: InspectionImages,
    *,
    given: bool,
    calibrated: int = 0,
    path: Path,
    export_bytes: int,
    model_bytes: int,
    progress: Progress | None = None,
) -> ExportResult:
    """Run an export and its model on the same images, and raise an ExportError if they differ by more than is allowed.

    Args:
        run: the opened export.
        picked: the images to compare on, as `pick_images` gives them for this graph.
        given: whether the user chose the images.
        calibrated: how many others int8 was calibrated on.
        path: where the export will be.
        progress: called with the number of compared images and of all, some of which are compared several times.
    """
    trials = list(_make_batches(graph, picked.measured))
    total, pairs = sum(len(trial.images) for trial in trials), list[tuple[Tensor, Tensor]]()
    if progress is not None:
        progress(0, total)
    for trial in trials:
        pairs.append((_run_model(graph, trial.images), run(trial.inputs)))
        if progress is not None:
            progress(sum(len(expected) for expected, _ in pairs), total)
    for trial, (expected, found) in zip(trials, pairs, strict=True):
        if expected.shape != found.shape:
            wrong = f"{tuple(found.shape)} where the model gives {tuple(expected.shape)}"
            raise ExportError(f"the export gives outputs of shape {wrong} for inputs of {_format_shape(trial.inputs)}")
    counted = [pair for trial, pair in zip(trials, pairs, strict=True) if trial.counted]
    export_seconds, model_seconds = _measure_latencies(graph, run, trials[0])
    checked = ExportResult(
        kind=kind,
        images=len(picked.measured),
        calibrated=calibrated,
        images_from=picked.measured_on,
        sizes=tuple(dict.fromkeys(_format_shape(trial.inputs) for trial in trials)),
        output=graph.output,
        relative=graph.input == "pixels",
        max_difference=_largest_difference(graph, pairs),
        tolerance=None if kind == "onnx-int8" else _allowed_difference(graph, [expected for expected, _ in pairs]),
        agreement=_share_of_same_answers(graph, counted) if graph.model.num_classes else None,
        cosine=None if graph.model.num_classes else _least_cosine(pairs),
        export_bytes=export_bytes,
        model_bytes=model_bytes,
        export_milliseconds=1e3 * export_seconds,
        model_milliseconds=1e3 * model_seconds,
        path=path,
        notes=_warnings_for(kind, given, len(picked.measured)),
        task=graph.model.task.kind,
        has_units=_has_units(graph),
    )
    _require_agreement(checked, given)
    return checked


def _require_agreement(checked: ExportResult, given: bool) -> None:
    """Raise an ExportError if the export differs too much; the comparisons are written so that NaN fails too."""
    if not math.isfinite(checked.max_difference):
        raise ExportError("the export gives outputs that are no numbers where its model does not: nothing was written")
    if checked.tolerance is not None and not checked.max_difference <= checked.tolerance:
        share = f" of {checked.relative_to}" if checked.relative else ""
        raise ExportError(
            f"the export computes something else than its model, so nothing was written: {checked.output} differ by up "
            f"to {checked.max_difference:.3g}{share}, and {checked.tolerance:.3g} is allowed"
        )
    if checked.tolerance is not None:
        return
    least, instead = (AGREEMENT, "onnx keeps float32") if given else (AGREEMENT_ANYWHERE, CALIBRATE)
    if checked.agreement is not None and not checked.agreement >= least:
        does = "guesses" if checked.task == "labels" else "answers"
        raise ExportError(
            f"in int8 the model {does} otherwise on too many images, so "
            f"nothing was written: {checked.agreement_name} on {checked.agreement:.1%} of {checked.images_from}, and "
            f"{least:.0%} is asked for; {instead}"
        )
    if checked.cosine is not None and not checked.cosine >= COSINE:
        raise ExportError(
            f"in int8 the model embeds images elsewhere, so nothing was written: the least cosine similarity with its "
            f"own embedding is {checked.cosine:.3f}, and {COSINE} is asked for; {instead}"
        )


def _warnings_for(kind: str, given: bool, images: int) -> tuple[str, ...]:
    if kind != "onnx-int8":
        return ()
    if not given:
        return ("photographs that the model was not made for prove little about int8: give your own (--images DATA)",)
    if images < FEW:
        return (f"so few images say little about int8: compared on {images}, give twice {FEW} or more (--images DATA)",)
    return ()


def _make_batches(graph: ExportGraph, pixels: Sequence[Tensor]) -> Iterator[ComparisonBatch]:
    """Yield all images in batches of one and of several; if the size may change, at several sizes in turn."""
    sizes = [None, *_choose_other_sizes(graph)] if graph.any_size else [None]
    start, number = 0, 0
    while start < len(pixels):
        count, size = BATCHES[number % len(BATCHES)], sizes[number // len(BATCHES) % len(sizes)]
        yield _make_batch(graph, pixels[start : start + count], size)
        start, number = start + count, number + 1
    # Few images must not mean few batches, nor few sizes.
    several = [pixels[number % len(pixels)] for number in range(BATCHES[-1])]
    for size in sizes:
        for count in BATCHES:
            yield dataclasses.replace(_make_batch(graph, several[:count], size), counted=False)


def _make_batch(graph: ExportGraph, pixels: Sequence[Tensor], size: tuple[int, int] | None) -> ComparisonBatch:
    if graph.input == "pixels":
        return _make_pixel_batch(graph, pixels)
    images = normalise_batch(pixels, graph.model)
    if size is not None:
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
    return ComparisonBatch(images, images)


def _make_pixel_batch(graph: ExportGraph, pixels: Sequence[Tensor]) -> ComparisonBatch:
    """Cut all images to a common size at the top left, because a batch of pixels has one size."""
    pixels = [to_channels(each, graph.model.in_channels) for each in pixels]
    height, width = (min(each.shape[side] for each in pixels) for side in (1, 2))
    cut = [each[:, :height, :width] for each in pixels]
    return ComparisonBatch(torch.stack(cut).permute(0, 2, 3, 1).contiguous(), prepare_batch(cut, graph.model))


def _choose_other_sizes(graph: ExportGraph) -> list[tuple[int, int]]:
    """Return the traced size, a wider one, and if possible one that is smaller than the model's own."""
    height, width = graph.example.shape[2:]
    own_height, own_width = graph.model.image_size
    steps = height - own_height, (width - own_width) // 2
    smaller = [max(own // 2 // step, 2) * step for own, step in zip((own_height, own_width), steps, strict=True)]
    least = 2 * getattr(graph.model, "stride", 1)
    return [(height, width), (own_height, 2 * width - own_width), (max(smaller[0], least), max(smaller[1], least))]


@torch.inference_mode()
def _run_model(graph: ExportGraph, images: Tensor) -> Tensor:
    """Compute with the model itself what the export should give, on images prepared outside of the graph."""
    outputs: Tensor = graph.model(images)
    return graph.model.task.activate(outputs) if graph.gives_values else outputs


def _allowed_difference(graph: ExportGraph, expected: Sequence[Tensor]) -> float:
    if graph.input == "pixels":
        return ROUNDED
    return EXACT * max(1.0, max(float(outputs.abs().max()) for outputs in expected) / 10)


def _largest_difference(graph: ExportGraph, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference, relative for `ROUNDED`.

    By torch's maximum: Python's would lose a NaN that is not the first.
    """
    scales = torch.tensor((graph.model.task.value_scales if _has_units(graph) else None) or 1.0)
    differences = torch.cat([((expected - found) / scales).abs().amax(dim=1) for expected, found in pairs])
    if graph.input == "pixels" and not _has_units(graph):
        largest = torch.cat([expected.abs().amax(dim=1) for expected, _ in pairs])
        differences = differences / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return float(differences.max())


def _least_cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    return float(torch.cat([F.cosine_similarity(expected, found) for expected, found in pairs]).min())


def _has_units(graph: ExportGraph) -> bool:
    """Return whether the graph gives numbers in the units of the data, and not logits, probabilities or embeddings."""
    return graph.gives_values and not graph.model.task.gives_probabilities


def _share_of_same_answers(graph: ExportGraph, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return how well the answers agree, by the measure of the task: 1 for the same on all images."""
    task = graph.model.task
    expected, found = (
        torch.cat([pair[side] if graph.gives_values else task.activate(pair[side]) for pair in pairs]).double().numpy()
        for side in (0, 1)
    )
    return task.compare(expected, found)


def _measure_latencies(graph: ExportGraph, run: ExportRunner, trial: ComparisonBatch) -> tuple[float, float]:
    """Return the median seconds for one image of the export and of the model, measured in turn so that a busy moment
    hits both."""
    inputs, images = trial.inputs[:1], trial.images[:1]
    taken: tuple[list[float], list[float]] = ([], [])
    by_model: ExportRunner = partial(_run_model, graph)
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


def _format_shape(inputs: Tensor) -> str:
    return "×".join(map(str, inputs.shape))
