"""An ONNX file with the products of its encoder in int8: ranges of activations found at run time, or on given images.

Weights are symmetric with a scale for each output channel. The head and the projection of patches stay in float32:
they are a hundredth of the work, and what they lose nothing after them can repair. So do products of activations with
each other (attention), norms and softmax.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.errors import ExportError
from vitrail.export.graphs import Graph
from vitrail.export.onnx import needed, write_onnx
from vitrail.export.runtimes import first_line, quiet
from vitrail.model.patches import PatchEmbed

PERCENTILE = 99.99
"""Of an activation's values that its range covers when it is calibrated: single outliers would cost all the others."""


def write_int8(graph: Graph, path: Path, calibration: Sequence[Tensor] = ()) -> None:
    """Write a graph in int8; with inputs to calibrate on, ranges are fixed and convolutions are in int8 too."""
    onnx = needed("onnx")
    quantization = needed("onnxruntime.quantization")
    with tempfile.TemporaryDirectory() as folder:
        plain, folded = Path(folder) / "plain.onnx", Path(folder) / "folded.onnx"
        write_onnx(graph, plain)
        _fold(plain, folded)
        model = onnx.load(folded)
        # Shapes that the exporter wrote down, with names for those that change, are in the way of onnxruntime's own.
        del model.graph.value_info[:]
        onnx.save(model, folded)
        nodes = _nodes(model.graph, graph, ("MatMul", "Conv") if calibration else ("MatMul",))
        if not nodes:
            hint = "" if calibration else ": calibrate on images with --images DATA, which takes convolutions too"
            raise ExportError(f"this model has no product with weights that int8 would speed up{hint}")
        weights = {"per_channel": True, "weight_type": quantization.QuantType.QInt8, "nodes_to_quantize": nodes}
        try:
            with quiet(), _hushed():
                if calibration:
                    _calibrated(quantization, folded, path, weights, _Reader(graph.input, calibration))
                else:
                    options = {"MatMulConstBOnly": True}
                    quantization.quantize_dynamic(folded, path, extra_options=options, **weights)
        except Exception as error:  # onnxruntime's own kinds
            raise ExportError(f"onnxruntime cannot bring this model to int8: {first_line(error)}") from error
        _carry(onnx, plain, path)


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
    """Products with weights, but for what embeds patches."""
    weights = {tensor.name for tensor in part.initializer}
    found = [node.name for node in part.node if node.op_type in kinds and node.input[1] in weights]
    embeds = isinstance(getattr(graph.model, "patch_embed", None), PatchEmbed)
    return found[1:] if embeds or (found and "Conv" in kinds) else found


class _Reader:
    """Inputs to calibrate on, one after the other, as onnxruntime asks for them."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        self.name, self.inputs = name, iter(inputs)

    def get_next(self) -> dict[str, Any] | None:
        """None at the end."""
        inputs = next(self.inputs, None)
        return None if inputs is None else {self.name: inputs.numpy()}


def _carry(onnx: Any, plain: Path, path: Path) -> None:
    """What the model carries, which quantisation leaves behind."""
    carried = onnx.load(plain, load_external_data=False).metadata_props
    model = onnx.load(path)
    del model.metadata_props[:]
    model.metadata_props.extend(carried)
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
