"""Runtimes for CPUs (onnxruntime, OpenVINO), which run our own model, exported, with our weights."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peer_libraries.models import check_packages
from vitrail.benchmark.case import BuiltCandidate, Candidate, Case, RandomBatch, count_parameters
from vitrail.exporting.graphs import build_graph
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.runtimes import ExportRunner
from vitrail.model.base import ImageModel

CALIBRATION_IMAGES = 8
"""At most so many images of the batch calibrate OpenVINO's int8."""


def list_runtime_candidates(library: str, case: Case, batch: RandomBatch, model: ImageModel) -> Iterator[Candidate]:
    """Yield a runtime in float32, and in int8 if an extra precision is requested."""
    if case.trains or case.device.type != "cpu" or case.precision != "fp32":
        return

    def make_candidate(
        name: str, precision: str, export: Callable[[ImageModel, Tensor, Path], ExportRunner]
    ) -> Candidate:
        build = partial(_build, model, batch, export)
        return Candidate(library, name, build, precision=precision, has_our_weights=True)

    plain, int8 = {
        "onnxruntime": (_export_onnx, _export_onnx_int8),
        "openvino": (_export_openvino, _export_openvino_int8),
    }[library]
    yield make_candidate("graph", "fp32", plain)
    if case.extra_precision is not None:
        yield make_candidate("graph, int8", "int8", int8)


def _build(
    model: ImageModel, batch: RandomBatch, export: Callable[[ImageModel, Tensor, Path], ExportRunner]
) -> BuiltCandidate:
    with tempfile.TemporaryDirectory() as folder:  # an open session does not need its file any more
        run = export(copy.deepcopy(model), batch.images, Path(folder))
    return BuiltCandidate(lambda: run(batch.images), count_parameters(model))


def _export_onnx(model: ImageModel, images: Tensor, folder: Path) -> ExportRunner:
    write_onnx(build_graph(model), folder / "model.onnx")
    return open_onnx(folder / "model.onnx")


def _export_onnx_int8(model: ImageModel, images: Tensor, folder: Path) -> ExportRunner:
    """Export with ranges that are found at run time, as `vitrail export --to onnx-int8` does without images."""
    write_int8(build_graph(model), folder / "model.onnx")
    return open_onnx(folder / "model.onnx")


def _export_openvino(model: ImageModel, images: Tensor, folder: Path) -> ExportRunner:
    return _compile(_convert(model, folder), {"INFERENCE_PRECISION_HINT": "f32"})


def _export_openvino_int8(model: ImageModel, images: Tensor, folder: Path) -> ExportRunner:
    """Quantise by NNCF, OpenVINO's own tool, calibrated on the measured images themselves."""
    check_packages(["nncf"])
    nncf = importlib.import_module("nncf")
    nncf.set_log_level(logging.ERROR)
    converted = _convert(model, folder)
    dataset = nncf.Dataset([image.numpy() for image in images[:CALIBRATION_IMAGES].split(1)])
    with redirect_stdout(io.StringIO()):  # progress bars
        quantised = nncf.quantize(
            converted, dataset, subset_size=CALIBRATION_IMAGES, model_type=nncf.ModelType.TRANSFORMER
        )
    return _compile(quantised, {})


def _convert(model: ImageModel, folder: Path) -> Any:
    write_onnx(build_graph(model), folder / "model.onnx")
    return importlib.import_module("openvino").convert_model(folder / "model.onnx")


def _compile(model: Any, options: dict[str, str]) -> ExportRunner:
    """Compile a model for as many threads as torch has."""
    openvino = importlib.import_module("openvino")
    settings = {**options, "INFERENCE_NUM_THREADS": str(torch.get_num_threads()), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(model, "CPU", settings)
    return lambda inputs: torch.from_numpy(compiled(inputs.numpy())[0])
