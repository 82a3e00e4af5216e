"""A graph as an ONNX file, and such a file run by onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitrail.errors import ExportError, MissingExtraError
from vitrail.exporting.carried import carried
from vitrail.exporting.graphs import Graph, traced
from vitrail.exporting.runtimes import Run, first_line, quiet
from vitrail.model.vit import VisionTransformer

OPSET = 20
"""The first with GELU as one operator; read by onnxruntime from 1.17 on (2024), OpenVINO and TensorRT."""
MOST_INSIDE = 2**31 - 2**24
"""Bytes of weights inside the file. Protobuf ends at 2 GiB; beyond, weights lie in a file beside it."""


def needed(module: str) -> Any:
    """A package of the extra `export`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError("exporting to ONNX", "export") from None


def write_onnx(graph: Graph, path: Path) -> None:
    """Write a graph with what its model carries: one file, or beyond 2 GB one with its weights beside it."""
    for module in ("onnx", "onnxscript"):
        needed(module)
    program = _decomposed(traced(graph), graph)
    try:
        with quiet():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[graph.input],
                output_names=[graph.output],
                dynamic_shapes=(graph.dynamic,),
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter's own kinds, which it keeps private
        raise ExportError(f"this model cannot be written as ONNX: {_reason(error)}") from error
    assert exported is not None
    _without_traces(exported.model)
    _keep_zeros_around_pooling(exported.model)
    exported.model.metadata_props.update(carried(graph.model))
    exported.save(path, external_data=weight_bytes(graph) > MOST_INSIDE)


def weight_bytes(graph: Graph) -> int:
    """Of a graph in float32."""
    return sum(tensor.nbytes for tensor in graph.module.state_dict().values())


def open_onnx(path: Path) -> Run:
    """A file as a function, run on the CPU."""
    onnxruntime = needed("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own kinds, which share no root
        raise ExportError(f"onnxruntime cannot open the export: {first_line(error)}") from error
    (given,) = session.get_inputs()

    def run(inputs: Tensor) -> Tensor:
        try:
            return torch.from_numpy(session.run(None, {given.name: inputs.numpy()})[0])
        except Exception as error:
            raise ExportError(f"onnxruntime cannot run the export: {first_line(error)}") from error

    return run


def _decomposed(program: ExportedProgram, graph: Graph) -> ExportedProgram:
    """Attention with a bias in plain operators: torch's exporter takes its memory for laid out otherwise, and fails."""
    if isinstance(graph.model, VisionTransformer) and graph.model.position == "relative":
        with quiet():
            plain: ExportedProgram = program.run_decompositions()
        return plain
    return program


def _keep_zeros_around_pooling(model: Any) -> None:
    """BiT pools over a border of zeros, and onnxruntime must be kept from computing something else.

    It joins a Pad with the MaxPool after it, whose own border is below any number (seen in 1.31). An operator between
    them that changes nothing prevents that.
    """
    ir = needed("onnx_ir")
    for node in list(model.graph):
        padded = node.inputs[0] if node.op_type == "MaxPool" else None
        if padded is not None and padded.producer() is not None and padded.producer().op_type == "Pad":
            lowest = ir.tensor(torch.tensor(torch.finfo(torch.float32).min).numpy())
            constant = ir.node("Constant", inputs=[], attributes={"value": lowest})
            same = ir.node("Max", inputs=[padded, constant.outputs[0]])
            same.outputs[0].type, same.outputs[0].shape = padded.type, padded.shape
            model.graph.insert_before(node, [constant, same])
            node.replace_input_with(0, same.outputs[0])


def _without_traces(model: Any) -> None:
    """Nodes name the lines of the code they were traced from, with the folders of this machine: not for strangers."""
    for part in (model.graph, *model.functions.values()):
        for node in part:
            node.metadata_props.clear()
            node.doc_string = None
        for value in (*part.inputs, *part.outputs):
            value.metadata_props.clear()
        part.metadata_props.clear()


def _reason(error: Exception) -> str:
    """The last cause says what an exporter could not do; the first only that it could not."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return first_line(error)
