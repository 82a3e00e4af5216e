"""Write a graph in OpenVINO's format, through ONNX, and run it."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import ExportError, MissingExtraError, WeightsError
from vitrail.exporting.graphs import ExportGraph, collect_metadata
from vitrail.exporting.onnx import write_onnx
from vitrail.exporting.runtimes import ExportRunner, wrap_session
from vitrail.inference.sessions import OpenVinoSession


def write_openvino(graph: ExportGraph, path: Path) -> None:
    """Write an .xml file with its weights beside it as .bin; the metadata is under the key `vitrail`."""
    openvino = _import_openvino()
    with tempfile.TemporaryDirectory() as folder:
        between = Path(folder) / "model.onnx"
        write_onnx(graph, between)
        try:
            converted = openvino.convert_model(between)
        except Exception as error:  # OpenVINO's own
            raise ExportError(f"OpenVINO cannot convert this model: {_last_line(error)}") from error
        for key, text in collect_metadata(graph.model).items():
            converted.set_rt_info(text, ["vitrail", key])
        openvino.save_model(converted, path, compress_to_fp16=False)


def open_openvino(path: Path) -> ExportRunner:
    """Open an export as a function that runs on the CPU in float32."""
    try:
        session = OpenVinoSession(path, torch.get_num_threads())
    except WeightsError as error:
        raise ExportError(f"OpenVINO cannot open the export: {error}") from error
    return wrap_session(session)


def _import_openvino() -> Any:
    try:
        return importlib.import_module("openvino")
    except ImportError:
        raise MissingExtraError("exporting to OpenVINO", "openvino") from None


def _last_line(error: Exception) -> str:
    """Return the last line of an OpenVINO error: the lines before point into its source code."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
