"""Runtimes for CPUs as peers: our own model, exported for them, with our weights. They infer and do not train."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.benchmark.case import Batch, Built, Case, Way
from vitrail.benchmark.peers import check_packages, parameters_of
from vitrail.exporting.graphs import graph_of
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.runtimes import Run
from vitrail.model.base import ImageModel

CALIBRATED = 8
"""Images, at most, of the batch, that OpenVINO's ranges are found on."""


def runtime_ways(library: str, case: Case, batch: Batch, ours: ImageModel) -> Iterator[Way]:
    """Of a runtime in float32, and in int8 where another precision than the plain one is asked for."""
    if case.trains or case.device.type != "cpu" or case.precision != "fp32":
        return

    def way(name: str, precision: str, made: Callable[[ImageModel, Tensor, Path], Run]) -> Way:
        return Way(library, name, lambda: _built(ours, batch, made), precision=precision, our_weights=True)

    plain, int8 = {"onnxruntime": (_onnx, _onnx_int8), "openvino": (_openvino, _openvino_int8)}[library]
    yield way("graph", "fp32", plain)
    if case.beyond is not None:
        yield way("graph, int8", "int8", int8)


def _built(model: ImageModel, batch: Batch, made: Callable[[ImageModel, Tensor, Path], Run]) -> Built:
    with tempfile.TemporaryDirectory() as folder:  # an opened export needs its file no longer
        run = made(copy.deepcopy(model), batch.images, Path(folder))
    return Built(lambda: run(batch.images), parameters_of(model))


def _onnx(model: ImageModel, images: Tensor, folder: Path) -> Run:
    write_onnx(graph_of(model), folder / "model.onnx")
    return open_onnx(folder / "model.onnx")


def _onnx_int8(model: ImageModel, images: Tensor, folder: Path) -> Run:
    """With ranges that are found at run time, as `vitrail export --to onnx-int8` writes it without images."""
    write_int8(graph_of(model), folder / "model.onnx")
    return open_onnx(folder / "model.onnx")


def _openvino(model: ImageModel, images: Tensor, folder: Path) -> Run:
    return _compiled(_converted(model, folder), {"INFERENCE_PRECISION_HINT": "f32"})


def _openvino_int8(model: ImageModel, images: Tensor, folder: Path) -> Run:
    """By NNCF, OpenVINO's own, calibrated on the very images that are measured."""
    check_packages(["nncf"])
    nncf = importlib.import_module("nncf")
    nncf.set_log_level(logging.ERROR)
    converted, some = _converted(model, folder), [image.numpy() for image in images[:CALIBRATED].split(1)]
    with redirect_stdout(io.StringIO()):  # bars
        quantised = nncf.quantize(
            converted, nncf.Dataset(some), subset_size=CALIBRATED, model_type=nncf.ModelType.TRANSFORMER
        )
    return _compiled(quantised, {})


def _converted(model: ImageModel, folder: Path) -> Any:
    write_onnx(graph_of(model), folder / "model.onnx")
    return importlib.import_module("openvino").convert_model(folder / "model.onnx")


def _compiled(model: Any, options: dict[str, str]) -> Run:
    """With as many threads as torch has."""
    openvino = importlib.import_module("openvino")
    told = {**options, "INFERENCE_NUM_THREADS": str(torch.get_num_threads()), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(model, "CPU", told)
    return lambda inputs: torch.from_numpy(compiled(inputs.numpy())[0])
