"""Write a graph as an ONNX file, and run such a file with onnxruntime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from vitrail.errors import ExportError, MissingExtraError, WeightsError
from vitrail.exporting.graphs import ExportGraph, collect_metadata, trace_graph
from vitrail.exporting.runtimes import ExportRunner, first_line, silence_exporters, wrap_session
from vitrail.inference.sessions import OnnxSession
from vitrail.model.vit import VisionTransformer

OPSET = 20
"""The first with GELU as one operator; read by onnxruntime from 1.17 on (2024), OpenVINO and TensorRT."""
MOST_INSIDE = 2**31 - 2**24
"""The most bytes of weights inside the file: protobuf ends at 2 GiB. Larger weights lie in a file beside it."""


def import_extra(module: str) -> Any:
    """Import a package of the extra `export`, or raise a MissingExtraError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtraError("exporting to ONNX", "export") from None


def write_onnx(graph: ExportGraph, path: Path) -> None:
    """Write a graph with its metadata into one file; beyond 2 GB, with the weights in a second file beside it."""
    for module in ("onnx", "onnxscript"):
        import_extra(module)
    program = _decompose_attention(trace_graph(graph), graph)
    try:
        with silence_exporters():
            exported = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[graph.input],
                output_names=list(graph.outputs),
                dynamic_shapes=(graph.dynamic,),
                opset_version=OPSET,
                verbose=False,
            )
    except Exception as error:  # the exporter's own kinds, which it keeps private
        raise ExportError(f"this model cannot be written as ONNX: {_find_cause(error)}") from error
    assert exported is not None
    _remove_traces(exported.model)
    _keep_zeros_around_pooling(exported.model)
    exported.model.metadata_props.update(collect_metadata(graph.model))
    exported.save(path, external_data=weight_bytes(graph) > MOST_INSIDE)


def weight_bytes(graph: ExportGraph) -> int:
    """Return the bytes of a graph's weights in float32."""
    return sum(tensor.nbytes for tensor in graph.module.state_dict().values())


def open_onnx(path: Path) -> ExportRunner:
    """Open an ONNX file as a function that runs on the CPU."""
    try:
        session = OnnxSession(path, torch.get_num_threads(), ["CPUExecutionProvider"])
    except WeightsError as error:
        raise ExportError(f"onnxruntime cannot open the export: {first_line(error)}") from error
    return wrap_session(session)


def _decompose_attention(program: ExportedProgram, graph: ExportGraph) -> ExportedProgram:
    """Write biased attention in plain operators: torch's exporter misreads its memory layout and fails."""
    if isinstance(graph.model, VisionTransformer) and graph.model.position in ("relative", "relative-bias"):
        with silence_exporters():
            plain: ExportedProgram = program.run_decompositions()
        return plain
    return program


def _keep_zeros_around_pooling(model: Any) -> None:
    """Keep onnxruntime from changing the border of zeros that BiT pools over.

    It merges a Pad with the MaxPool after it, whose own border is minus infinity (seen in 1.31). A Max operator that
    changes nothing between them prevents that.
    """
    ir = import_extra("onnx_ir")
    for node in list(model.graph):
        padded = node.inputs[0] if node.op_type == "MaxPool" else None
        if padded is not None and padded.producer() is not None and padded.producer().op_type == "Pad":
            lowest = ir.tensor(torch.tensor(torch.finfo(torch.float32).min).numpy())
            constant = ir.node("Constant", inputs=[], attributes={"value": lowest})
            same = ir.node("Max", inputs=[padded, constant.outputs[0]])
            same.outputs[0].type, same.outputs[0].shape = padded.type, padded.shape
            model.graph.insert_before(node, [constant, same])
            node.replace_input_with(0, same.outputs[0])


def _remove_traces(model: Any) -> None:
    """Remove the source lines that nodes were traced from: they name folders of this machine."""
    for part in (model.graph, *model.functions.values()):
        for node in part:
            node.metadata_props.clear()
            node.doc_string = None
        for value in (*part.inputs, *part.outputs):
            value.metadata_props.clear()
        part.metadata_props.clear()


def _find_cause(error: Exception) -> str:
    """Return the first line of the innermost cause, which tells what the exporter could not do."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return first_line(error)
