"""Write a model for another runtime: run the export and compare it with the model before it counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitrail.data.transforms.decode import to_channels
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ConfigError, did_you_mean
from vitrail.exporting.check import ExportComparison, compare_with_model
from vitrail.exporting.graphs import ExportGraph, build_graph
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.openvino import open_openvino, write_openvino
from vitrail.exporting.place import check_target, measure_size, write_atomically
from vitrail.exporting.program import open_package, open_program, write_package, write_program
from vitrail.exporting.runtimes import ExportRunner
from vitrail.inspection.images import InspectionImages, pick_from_folder, pick_photographs, prepare_batch, spread_evenly
from vitrail.model.base import ImageModel
from vitrail.weights.load import load

CHECKED = 128
"""The most images that an export is compared on. For int8 it is more, because the share of equal guesses counts."""
CHECKED_INT8 = 512
CALIBRATED = 64
"""Further images that int8 is calibrated on; if only a few are given, half of them."""

KINDS: dict[str, tuple[str, Callable[[ExportGraph, Path], None], Callable[[Path], ExportRunner]]] = {
    "onnx": (".onnx", write_onnx, open_onnx),
    "onnx-int8": (".onnx", write_int8, open_onnx),
    "torch": (".pt2", write_program, open_program),
    "aoti": (".pt2", write_package, open_package),
    "openvino": (".xml", write_openvino, open_openvino),
}
"""For each kind: the suffix of its file, the function that writes it, the function that opens it."""


def export_by_name(
    source: str,
    target: Path,
    to: str,
    *,
    dynamic_size: bool = False,
    with_preprocessing: bool = False,
    images: str | None = None,
    size: str | None = None,
) -> ExportComparison:
    """Load a model by name and export it; see `export`. `size`, such as 384 or 224x320, resizes the model first."""
    check_target(target, find_kind(to)[0])  # before the weights are read
    model = load(source, image_size=None if size is None else parse_size(size))
    return export(model, target, to, dynamic_size=dynamic_size, with_preprocessing=with_preprocessing, images=images)


def export(
    model: ImageModel,
    target: str | Path,
    to: str = "onnx",
    *,
    dynamic_size: bool = False,
    with_preprocessing: bool = False,
    images: str | None = None,
) -> ExportComparison:
    """Write a model for another runtime, after running the export and comparing it with the model.

    Args:
        model: the model to export; it is moved to float32 on the CPU.
        target: a file that ends in .onnx, .pt2 or .xml, depending on `to`; an existing file is replaced.
        to: onnx, onnx-int8, torch, aoti or openvino.
        dynamic_size: whether height and width may change as well as the batch size.
        with_preprocessing: whether the graph takes pixels of any size and gives probabilities.
        images: a folder or data set to compare on, and to calibrate int8 on; built-in photographs if None.

    Returns:
        What was measured: differences, sizes and latencies.

    Raises:
        ExportError: the export computes something else than the model; nothing is written then.
    """
    suffix, write, open_export = find_kind(to)
    target = check_target(Path(target), suffix)
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    graph = build_graph(model, with_preprocessing, dynamic_size)
    calibrates = to == "onnx-int8" and images is not None
    most = CHECKED if to != "onnx-int8" else CHECKED_INT8 + CALIBRATED if calibrates else CHECKED_INT8
    picked = (
        pick_photographs(model.in_channels, most)
        if images is None
        else pick_from_folder(images, model.in_channels, most, 1)
    )
    calibration_images, picked = split_for_calibration(picked) if calibrates else ([], picked)
    with write_atomically(target) as draft:
        if calibrates:
            write_int8(graph, draft, prepare_calibration(graph, calibration_images))
        else:
            write(graph, draft)
        facts = {"calibrated": len(calibration_images), "export_bytes": measure_size(draft), "model_bytes": model_bytes}
        return compare_with_model(to, graph, open_export(draft), picked, given=images is not None, **facts)


def split_for_calibration(picked: InspectionImages) -> tuple[list[Tensor], InspectionImages]:
    """Return evenly spread images to calibrate on, and the others to compare on; a single image serves both."""
    count = len(picked.measured)
    if count == 1:
        return picked.measured, replace(picked, measured_on=f"{picked.measured_on}, which it was calibrated on too")
    chosen = set(spread_evenly(count, min(CALIBRATED, count // 2)))
    others = [pixels for index, pixels in enumerate(picked.measured) if index not in chosen]
    description = f"{picked.measured_on}: {len(others):,} compared, the other {len(chosen)} to calibrate on"
    return [picked.measured[index] for index in sorted(chosen)], replace(
        picked, measured=others, measured_on=description
    )


def prepare_calibration(graph: ExportGraph, images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return images one by one as the graph takes them. Pixels are resized, because onnxruntime wants one size."""
    model, how = graph.model, graph.model.preprocessing
    if graph.input == "images":
        return list(prepare_batch(images, model).split(1))
    resized = how.model_copy(update={"image_size": how.resized, "crop_fraction": 1.0})
    fits = [resize_and_crop(to_channels(pixels, model.in_channels), resized) for pixels in images]
    return [pixels.permute(1, 2, 0)[None].contiguous() for pixels in fits]


def find_kind(to: str) -> tuple[str, Callable[[ExportGraph, Path], None], Callable[[Path], ExportRunner]]:
    """Return the entry of `KINDS` for a kind, or raise a ConfigError that names the nearest."""
    if to not in KINDS:
        raise ConfigError(f"unknown kind {to!r}{did_you_mean(to, KINDS) or ':'} there are {', '.join(KINDS)}")
    return KINDS[to]


def parse_size(text: str) -> int | tuple[int, int]:
    """Parse 384, or 224x320 for height × width, into pixels."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--size {text}: give a number of pixels, or height and width as in 224x320")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
