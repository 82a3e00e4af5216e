"""An ONNX file with the products of its encoder in int8: ranges of activations found at run time, or on given images.

Weights are symmetric with a scale for each output channel. The head, what reads the image itself and the projection of
patches stay in float32: they are a hundredth of the work, and what they lose nothing after them can repair. So do
products of activations with each other (attention), norms and softmax.

A range that is found at run time is one for the whole batch, so an image's answer depends on its neighbours.
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
from vitrail.exporting.graphs import Graph
from vitrail.exporting.onnx import MOST_INSIDE, needed, weight_bytes, write_onnx
from vitrail.exporting.runtimes import first_line, quiet

QUANTISATION = "quantisation"
"""The key of an ONNX file's metadata that says how it was brought to int8: dynamic, or calibrated."""
PRODUCTS = ("MatMul", "Gemm", "Conv")
PERCENTILE = 99.99
"""Of an activation's values that its range covers when it is calibrated: single outliers would cost all the others."""


def write_int8(graph: Graph, path: Path, calibration: Sequence[Tensor] = ()) -> None:
    """Write a graph in int8; with inputs to calibrate on, ranges are fixed and convolutions are in int8 too."""
    onnx = needed("onnx")
    quantization = needed("onnxruntime.quantization")
    if weight_bytes(graph) > MOST_INSIDE:
        raise ExportError(
            f"int8 is made of an ONNX file with its weights inside, which ends at 2 GiB, and this model has "
            f"{weight_bytes(graph) / 2**30:.1f} GiB of them in float32: export it by --to onnx, or a smaller model"
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
        nodes = _nodes(model.graph, graph, kinds)
        if not nodes:
            hint = "" if calibration else ": calibrate on images with --images DATA, which takes convolutions too"
            raise ExportError(f"this model has no product with weights that int8 would speed up{hint}")
        # Without the kinds, ranges would be taken of every value in the graph, and those of sizes have none.
        which = {"nodes_to_quantize": nodes, "op_types_to_quantize": kinds}
        weights = {"per_channel": True, "weight_type": quantization.QuantType.QInt8, **which}
        try:
            with quiet(), _hushed():
                if calibration:
                    _calibrated(quantization, folded, path, weights, _Reader(graph.input, calibration))
                else:
                    options = {"MatMulConstBOnly": True}
                    quantization.quantize_dynamic(folded, path, extra_options=options, **weights)
        except Exception as error:  # onnxruntime's own kinds
            raise ExportError(f"onnxruntime cannot bring this model to int8: {first_line(error)}") from error
        _carry(onnx, plain, path, "calibrated" if calibration else "dynamic")


def _calibrated(quantization: Any, source: Path, path: Path, weights: dict[str, Any], reader: Any) -> None:
    """Operators between a pair of QuantizeLinear and DequantizeLinear, which every runtime reads."""
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
    """What follows from weights alone, such as a convolution's standardised weights, is computed for good."""
    onnxruntime = needed("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _nodes(part: Any, graph: Graph, kinds: Sequence[str]) -> list[str]:
    """Products with weights, but for those that read the image itself and the projection of patches."""
    weights = {tensor.name: tensor for tensor in part.initializer}
    products = [node for node in part.node if node.op_type in PRODUCTS and node.input[1] in weights]
    kept = _reading_the_image(part, {node.name for node in products})
    kept |= {node.name for node in products if _projects_patches(weights[node.input[1]], graph)}
    return [node.name for node in products if node.op_type in kinds and node.name not in kept]


def _reading_the_image(part: Any, products: set[str]) -> set[str]:
    """Of these, the names of nodes that no other one lies before. Nodes come in the order of their computation."""
    reached, found = {value.name for value in part.input}, set[str]()
    for node in part.node:
        if node.op_type == "Shape" or reached.isdisjoint(node.input):  # a size is no image
            continue
        if node.name in products:
            found.add(node.name)
        else:
            reached.update(node.output)
    return found


def _projects_patches(weight: Any, graph: Graph) -> bool:
    """By its values: names do not outlive what exporters do to a graph. A linear map's are transposed in it."""
    projection = getattr(getattr(graph.model, "patch_embed", None), "projection", None)
    if projection is None:
        return False
    own = projection.weight.detach().numpy()
    if tuple(weight.dims) not in (own.shape, own.T.shape):
        return False
    values = needed("onnx.numpy_helper").to_array(weight)
    return np.array_equal(values, own) or np.array_equal(values, own.T)


class _Reader:
    """Inputs to calibrate on, one after the other, as onnxruntime asks for them."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        self.name, self.inputs = name, iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        """None at the end."""
        inputs = next(self.inputs, None)
        return None if inputs is None else {self.name: inputs.numpy()}


def _carry(onnx: Any, plain: Path, path: Path, how: str) -> None:
    """What the model carries, which quantisation leaves behind, and how that was done."""
    carried = onnx.load(plain, load_external_data=False).metadata_props
    model = onnx.load(path)
    del model.metadata_props[:]
    model.metadata_props.extend(carried)
    model.metadata_props.add(key=QUANTISATION, value=how)
    onnx.save(model, path)


@contextmanager
def _hushed() -> Iterator[None]:
    """onnxruntime's quantisation gives advice through the root logger, and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
