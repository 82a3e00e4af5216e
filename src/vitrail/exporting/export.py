"""vitrail export: a model for another runtime, executed and compared with it before it is in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from vitrail.data.transforms.decode import to_channels
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ConfigError, did_you_mean
from vitrail.exporting.check import Checked, check
from vitrail.exporting.graphs import Graph, graph_of
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.openvino import open_openvino, write_openvino
from vitrail.exporting.place import checked_target, placed, size_of
from vitrail.exporting.program import open_package, open_program, write_package, write_program
from vitrail.exporting.runtimes import Run
from vitrail.inspection.images import Picked, batch, from_folder, photographs, spread
from vitrail.model.base import ImageModel
from vitrail.weights.load import load

CHECKED = 128
"""Images, at most, that an export is compared on; int8 on more, for it is held to the share of its guesses."""
CHECKED_INT8 = 512
CALIBRATED = 64
"""Images, beside those, that int8 is calibrated on; where few are given, half of them."""

KINDS: dict[str, tuple[str, Callable[[Graph, Path], None], Callable[[Path], Run]]] = {
    "onnx": (".onnx", write_onnx, open_onnx),
    "onnx-int8": (".onnx", write_int8, open_onnx),
    "torch": (".pt2", write_program, open_program),
    "aoti": (".pt2", write_package, open_package),
    "openvino": (".xml", write_openvino, open_openvino),
}
"""The suffix of each, what writes it and what runs it."""


def run(
    source: str,
    target: Path,
    to: str,
    *,
    dynamic_size: bool = False,
    with_preprocessing: bool = False,
    images: str | None = None,
    size: str | None = None,
) -> Checked:
    """Load a model and export it; see `export`. `size`: as in 384 or 224x320, what the model is resized to first."""
    checked_target(target, kind_of(to)[0])  # before the weights are read
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
) -> Checked:
    """Write a model for another runtime, executed and compared with the model first.

    Where they differ, nothing is written and an ExportError says by how much.

    Args:
        model: is brought to float32 on the CPU.
        target: a file that ends in .onnx, .pt2 or .xml, as the kind does; replaced where it is there.
        to: onnx, onnx-int8, torch, aoti or openvino.
        dynamic_size: height and width may change as well as the batch.
        with_preprocessing: the graph takes pixels of any size and gives probabilities.
        images: a folder or data to compare on, and to calibrate int8 on; photographs that are always there if None.
    """
    suffix, write, opened = kind_of(to)
    target = checked_target(Path(target), suffix)
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    graph = graph_of(model, with_preprocessing, dynamic_size)
    calibrates = to == "onnx-int8" and images is not None
    most = CHECKED if to != "onnx-int8" else CHECKED_INT8 + CALIBRATED if calibrates else CHECKED_INT8
    picked = photographs(model.in_channels, most) if images is None else from_folder(images, model.in_channels, most, 1)
    some, picked = parted(picked) if calibrates else ([], picked)
    with placed(target) as draft:
        if calibrates:
            write_int8(graph, draft, calibration(graph, some))
        else:
            write(graph, draft)
        told = {"calibrated": len(some), "export_bytes": size_of(draft), "model_bytes": model_bytes}
        return check(to, graph, opened(draft), picked, given=images is not None, **told)


def parted(picked: Picked) -> tuple[list[Tensor], Picked]:
    """Images to calibrate on, evenly spread, and the others to compare on; a single image is for both."""
    count = len(picked.measured)
    if count == 1:
        return picked.measured, replace(picked, measured_on=f"{picked.measured_on}, which it was calibrated on too")
    chosen = set(spread(count, min(CALIBRATED, count // 2)))
    others = [pixels for index, pixels in enumerate(picked.measured) if index not in chosen]
    told = f"{picked.measured_on}: {len(others):,} compared, the other {len(chosen)} to calibrate on"
    return [picked.measured[index] for index in sorted(chosen)], replace(picked, measured=others, measured_on=told)


def calibration(graph: Graph, some: Sequence[Tensor]) -> Sequence[Tensor]:
    """Images one by one, as the graph takes them; pixels already resized, for onnxruntime wants them of one size."""
    model, how = graph.model, graph.model.preprocessing
    if graph.input == "images":
        return list(batch(some, model).split(1))
    resized = how.model_copy(update={"image_size": how.resized, "crop_fraction": 1.0})
    fits = [resize_and_crop(to_channels(pixels, model.in_channels), resized) for pixels in some]
    return [pixels.permute(1, 2, 0)[None].contiguous() for pixels in fits]


def kind_of(to: str) -> tuple[str, Callable[[Graph, Path], None], Callable[[Path], Run]]:
    """What there is to know of a kind."""
    if to not in KINDS:
        raise ConfigError(f"unknown kind {to!r}{did_you_mean(to, KINDS) or ':'} there are {', '.join(KINDS)}")
    return KINDS[to]


def parse_size(text: str) -> int | tuple[int, int]:
    """384, or 224x320 for height × width."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"--size {text}: give a number of pixels, or height and width as in 224x320")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
