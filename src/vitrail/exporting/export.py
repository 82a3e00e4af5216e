"""Write a model for another runtime: run the export and compare it with the model before it counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitrail.errors import ConfigError, did_you_mean
from vitrail.exporting.check import compare_with_model
from vitrail.exporting.check_embedding import check_embedding
from vitrail.exporting.graphs import ExportGraph, build_graph
from vitrail.exporting.images import CALIBRATED, pick_images, prepare_calibration, split_for_calibration
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.openvino import open_openvino, write_openvino
from vitrail.exporting.place import check_target, measure_size, write_atomically
from vitrail.exporting.program import open_package, open_program, write_package, write_program
from vitrail.exporting.result import ExportResult
from vitrail.exporting.runtimes import ExportRunner
from vitrail.inference.engine import Model, check_model
from vitrail.inspection.image_choice import Images
from vitrail.model.base import ImageModel
from vitrail.system.events import OnEvent, open_listener, send_progress
from vitrail.weights.load import load

CHECKED = 128
"""The most images that an export is compared on. For int8 it is more, because the share of equal guesses counts."""
CHECKED_INT8 = 512
Size = int | tuple[int, int] | str

KINDS: dict[str, tuple[str, Callable[[ExportGraph, Path], None], Callable[[Path], ExportRunner]]] = {
    "onnx": (".onnx", write_onnx, open_onnx),
    "onnx-int8": (".onnx", write_int8, open_onnx),
    "torch": (".pt2", write_program, open_program),
    "aoti": (".pt2", write_package, open_package),
    "openvino": (".xml", write_openvino, open_openvino),
}
"""For each kind: the suffix of its file, the function that writes it, the function that opens it. Of several kinds with
one suffix, the first is taken if none is named."""
READ_BACK = ("onnx", "onnx-int8", "openvino")
"""Kinds that `vitrail predict` and `vitrail serve` run."""


def export(
    model: Model,
    target: str | Path,
    to: str | None = None,
    *,
    dynamic_size: bool = False,
    with_preprocessing: bool = False,
    images: Images | None = None,
    size: Size | None = None,
    on_event: OnEvent | None = None,
) -> ExportResult:
    """Write a model for another runtime, after running the export and comparing it with the model.

    Events:
        loading: model: a model that was named is being loaded.
        writing: kind, path: the export is being made.
        comparing: images, images_from: it is being compared with the model on so many images.
        progress: task "comparing", done, total.

    Args:
        model: a loaded model, which is not changed, or anything that `vitrail.load` takes.
        target: a file that ends in .onnx, .pt2 or .xml, depending on `to`; an existing file is replaced.
        to: onnx, onnx-int8, torch, aoti or openvino; by the suffix if None: .onnx onnx, .pt2 torch, .xml openvino.
        dynamic_size: whether height and width may change as well as the batch size.
        with_preprocessing: whether the graph takes pixels of any size and gives probabilities.
        images: a folder, a data set or a list of images to compare on, and to calibrate int8 on; built-in photographs
            if None.
        size: resize the model first: pixels, or height and width as a pair or as in "224x320".
        on_event: called with events.

    Returns:
        The file that was written, and the measured differences, sizes and latencies.

    Raises:
        ConfigError: an option is not valid, or the model cannot be exported with it.
        ExportError: the export computes something else than the model; nothing is written then.
        MissingExtraError: a package that the runtime needs is not installed.
    """
    to = guess_kind(Path(target)) if to is None else to
    suffix, write, open_export = find_kind(to)
    target = check_target(Path(target), suffix)  # before the weights are read
    with open_listener(on_event) as listener:
        graph, model_bytes = _open_graph(model, size, with_preprocessing, dynamic_size, to in READ_BACK, listener)
        calibrates = to == "onnx-int8" and images is not None
        most = CHECKED if to != "onnx-int8" else CHECKED_INT8 + CALIBRATED if calibrates else CHECKED_INT8
        picked = pick_images(graph, images, most)
        calibration_images, picked = split_for_calibration(picked) if calibrates else ([], picked)
        with write_atomically(target) as draft:
            listener("writing", {"kind": to, "path": str(target)})
            if calibrates:
                write_int8(graph, draft, prepare_calibration(graph, calibration_images))
            else:
                write(graph, draft)
            listener("comparing", {"images": len(picked.measured), "images_from": picked.measured_on})
            if len(graph.outputs) > 1:
                check_embedding(graph, draft, picked, is_rounded=to == "onnx-int8")
            return compare_with_model(
                to,
                graph,
                open_export(draft),
                picked,
                given=images is not None,
                calibrated=len(calibration_images),
                path=target,
                export_bytes=measure_size(draft),
                model_bytes=model_bytes,
                progress=send_progress(listener, "comparing"),
            )


def _open_graph(
    model: Model,
    size: Size | None,
    with_preprocessing: bool,
    dynamic_size: bool,
    gives_embedding: bool,
    on_event: OnEvent,
) -> tuple[ExportGraph, int]:
    """Return the graph of a model, of which only the copy for the export is kept, and the bytes of its own weights."""
    check_model(model)
    new_size = None if size is None else parse_size(size)
    if not isinstance(model, ImageModel):
        on_event("loading", {"model": str(model)})
        model, new_size = load(model, image_size=new_size), None
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    return build_graph(model, with_preprocessing, dynamic_size, new_size, gives_embedding), model_bytes


def find_kind(to: str) -> tuple[str, Callable[[ExportGraph, Path], None], Callable[[Path], ExportRunner]]:
    """Return the entry of `KINDS` for a kind, or raise a ConfigError that names the nearest."""
    if to not in KINDS:
        raise ConfigError(f"unknown kind {to!r}{did_you_mean(to, KINDS) or ':'} there are {', '.join(KINDS)}")
    return KINDS[to]


def guess_kind(target: Path) -> str:
    """Return the kind of export that a file with this suffix usually holds."""
    for kind, (suffix, *_) in KINDS.items():
        if target.suffix == suffix:
            return kind
    raise ConfigError(f"{target}: name a file that ends in .onnx, .pt2 or .xml")


def parse_size(size: Size) -> int | tuple[int, int]:
    """Turn 384, (224, 320), or a text such as 384 or 224x320 for height × width, into pixels."""
    if isinstance(size, str):
        sides = size.lower().replace("×", "x").split("x")
    else:
        sides = [str(side) for side in (size if isinstance(size, tuple | list) else [size])]
    if len(sides) not in (1, 2) or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise ConfigError(f"size {size}: give a number of pixels, or height and width as in 224x320")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))
