"""Write an ONNX file whose encoder computes in int8, with activation ranges found at run time or on given images.

Weights are symmetric with a scale for each output channel. The head, the product that reads the image and the patch
projection stay in float32: they are a hundredth of the work, and no later layer can repair their errors. Attention,
norms and softmax stay in float32 too.

A range found at run time holds for the whole batch, so an image's answer depends on the other images in it.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitrail.errors import ExportError
from vitrail.exporting.graphs import ExportGraph
from vitrail.exporting.onnx import MOST_INSIDE, import_extra, weight_bytes, write_onnx
from vitrail.exporting.runtimes import first_line, silence_exporters

QUANTISATION = "quantisation"
"""The metadata key of an ONNX file that tells how its int8 ranges were found: `dynamic` or `calibrated`."""
PRODUCTS = ("MatMul", "Gemm", "Conv")
PERCENTILE = 99.99
"""The percentage of values that a calibrated range covers: outliers would cost the others precision."""


def write_int8(graph: ExportGraph, path: Path, calibration: Sequence[Tensor] = ()) -> None:
    """Write a graph in int8. If inputs to calibrate on are given, ranges are fixed and convolutions are in int8 too."""
    onnx = import_extra("onnx")
    quantization = import_extra("onnxruntime.quantization")
    if weight_bytes(graph) > MOST_INSIDE:
        raise ExportError(
            f"int8 is made of an ONNX file with its weights inside, which ends at 2 GiB, and this model has "
            f"{weight_bytes(graph) / 2**30:.1f} GiB of them in float32: export it to onnx (--to onnx)"
        )
    with tempfile.TemporaryDirectory() as folder:
        plain, folded = Path(folder) / "plain.onnx", Path(folder) / "folded.onnx"
        write_onnx(graph, plain)
        _fold(plain, folded)
        model = onnx.load(folded)
        # Shapes that the exporter wrote down, with names for those that change, are in the way of onnxruntime's own.
        del model.graph.value_info[:]
        onnx.save(model, folded)
        kinds = ["MatMul", "Conv"] if calibration else ["MatMul"]
        nodes = _choose_nodes(model.graph, graph, kinds)
        if not nodes:
            hint = "" if calibration else ": calibrate on images (--images DATA), which takes convolutions too"
            raise ExportError(f"this model has no product with weights that int8 would speed up{hint}")
        # Without the kinds, ranges would be taken of every value in the graph, and those of sizes have none.
        which = {"nodes_to_quantize": nodes, "op_types_to_quantize": kinds}
        weights = {"per_channel": True, "weight_type": quantization.QuantType.QInt8, **which}
        try:
            with silence_exporters(), _silence_onnxruntime():
                if calibration:
                    _quantise_static(quantization, folded, path, weights, _CalibrationReader(graph.input, calibration))
                else:
                    options = {"MatMulConstBOnly": True}
                    quantization.quantize_dynamic(folded, path, extra_options=options, **weights)
        except Exception as error:  # onnxruntime's own kinds
            raise ExportError(f"onnxruntime cannot bring this model to int8: {first_line(error)}") from error
        _copy_metadata(onnx, plain, path, "calibrated" if calibration else "dynamic")


def _quantise_static(quantization: Any, source: Path, path: Path, weights: dict[str, Any], reader: Any) -> None:
    """Quantise with fixed ranges, in the QuantizeLinear/DequantizeLinear form that every runtime reads."""
    quantization.quantize_static(
        source,
        path,
        reader,
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        calibrate_method=quantization.CalibrationMethod.Percentile,
        extra_options={"WeightSymmetric": True, "ActivationSymmetric": False, "CalibPercentile": PERCENTILE},
        **weights,
    )


def _fold(source: Path, path: Path) -> None:
    """Compute once and for all what depends on weights alone, such as standardised convolution weights."""
    onnxruntime = import_extra("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _choose_nodes(part: Any, graph: ExportGraph, kinds: Sequence[str]) -> list[str]:
    """Return the products with weights, except those that read the image itself and the patch projection."""
    weights = {tensor.name: tensor for tensor in part.initializer}
    products = [node for node in part.node if node.op_type in PRODUCTS and node.input[1] in weights]
    kept = _find_image_readers(part, {node.name for node in products})
    kept |= {node.name for node in products if _projects_patches(weights[node.input[1]], graph)}
    return [node.name for node in products if node.op_type in kinds and node.name not in kept]


def _find_image_readers(part: Any, products: set[str]) -> set[str]:
    """Return the products that come first on a path from the image; nodes are in the order of computation."""
    reached, found = {value.name for value in part.input}, set[str]()
    for node in part.node:
        if node.op_type == "Shape" or reached.isdisjoint(node.input):  # a size is no image
            continue
        if node.name in products:
            found.add(node.name)
        else:
            reached.update(node.output)
    return found


def _projects_patches(weight: Any, graph: ExportGraph) -> bool:
    """By its values: names do not outlive what exporters do to a graph. A linear map's are transposed in it."""
    projection = getattr(getattr(graph.model, "patch_embed", None), "projection", None)
    if projection is None:
        return False
    own = projection.weight.detach().numpy()
    if tuple(weight.dims) not in (own.shape, own.T.shape):
        return False
    values = import_extra("onnx.numpy_helper").to_array(weight)
    return np.array_equal(values, own) or np.array_equal(values, own.T)


class _CalibrationReader:
    """Give onnxruntime the calibration inputs one after the other."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        self.name, self.inputs = name, iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        inputs = next(self.inputs, None)
        return None if inputs is None else {self.name: inputs.numpy()}


def _copy_metadata(onnx: Any, plain: Path, path: Path, how: str) -> None:
    """Copy the metadata, which quantisation drops, and add how the ranges were found."""
    carried = onnx.load(plain, load_external_data=False).metadata_props
    model = onnx.load(path)
    del model.metadata_props[:]
    model.metadata_props.extend(carried)
    model.metadata_props.add(key=QUANTISATION, value=how)
    onnx.save(model, path)


@contextmanager
def _silence_onnxruntime() -> Iterator[None]:
    """Silence onnxruntime's quantisation, which logs to the root logger and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
