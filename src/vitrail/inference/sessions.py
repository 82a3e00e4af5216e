"""Run exported files: .onnx by onnxruntime, .xml by OpenVINO. `vitrail export` compares an export through these too."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vitrail.errors import MissingExtraError, WeightsError

Array = NDArray[Any]
SECOND_OUTPUT = "embedding"
"""The name of the only second output that a file may have."""


class Session(ABC):
    """An opened file that computes its outputs from one input.

    Attributes:
        runtime: the library that computes.
        input_type: the type of the input as the library writes it, such as tensor(float) or f32.
        output_name: the name of the first output.
        has_embedding: whether the second output is the embedding.
        metadata: texts that travel with the file.
    """

    runtime: str
    input_type: str
    output_name: str
    has_embedding: bool
    metadata: Mapping[str, str]

    def run(self, inputs: Array) -> Array:
        """Compute the first output for a batch; errors are the library's own."""
        return self.run_all(inputs)[0]

    @abstractmethod
    def run_all(self, inputs: Array) -> Sequence[Array]:
        """Compute the first output for a batch, and the embedding if there is one."""


class OnnxSession(Session):
    """An .onnx file.

    Args:
        path: the file.
        threads: CPU threads; onnxruntime's own number if None.
        providers: onnxruntime's names of what computes; all that its package has if None, which may include a GPU.
    """

    runtime = "onnxruntime"

    def __init__(self, path: Path, threads: int | None = None, providers: Sequence[str] | None = None) -> None:
        try:
            onnxruntime: Any = importlib.import_module("onnxruntime")
        except ImportError:
            raise MissingExtraError("running an .onnx file", "export") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or 0
        try:
            available = onnxruntime.get_available_providers()
            self._session = onnxruntime.InferenceSession(str(path), options, providers=providers or available)
            self.metadata = self._session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime raises many kinds
            raise WeightsError(f"{path} is no ONNX file that onnxruntime can run: {error}") from None
        (first, *others), (output, *more) = self._session.get_inputs(), self._session.get_outputs()
        if others:
            raise WeightsError(f"{path} takes {1 + len(others)} inputs, not one of images")
        self._input_name, self.input_type, self.output_name = first.name, first.type, output.name
        self.has_embedding = [each.name for each in more] == [SECOND_OUTPUT]

    def run_all(self, inputs: Array) -> Sequence[Array]:
        names = [self.output_name, *([SECOND_OUTPUT] if self.has_embedding else [])]
        rows: Sequence[Array] = self._session.run(names, {self._input_name: inputs})
        return rows


class OpenVinoSession(Session):
    """An .xml file with its weights beside it as .bin. It computes in float32 on the CPU.

    Args:
        path: the .xml file.
        threads: CPU threads; OpenVINO's own number if None.
    """

    runtime = "OpenVINO"

    def __init__(self, path: Path, threads: int | None = None) -> None:
        try:
            openvino: Any = importlib.import_module("openvino")
        except ImportError:
            raise MissingExtraError("running an .xml file of OpenVINO", "openvino") from None
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        try:
            model = openvino.Core().read_model(path)
            self._compiled = openvino.compile_model(model, "CPU", settings)
            info = model.get_rt_info(["vitrail"]).astype(dict) if model.has_rt_info(["vitrail"]) else {}
        except Exception as error:  # OpenVINO's own kinds; their first lines point into its source code
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise WeightsError(f"{path} is no file that OpenVINO can run: {reason}") from None
        output = model.output(0)
        self.input_type = model.input(0).get_element_type().get_type_name()
        self.output_name = output.get_any_name() if output.get_names() else ""
        self.metadata = {key: text.astype(str) for key, text in info.items()}
        self.has_embedding = [each.get_any_name() for each in model.outputs[1:] if each.get_names()] == [SECOND_OUTPUT]

    def run_all(self, inputs: Array) -> Sequence[Array]:
        rows = self._compiled(inputs)
        return [rows[0], rows[1]] if self.has_embedding else [rows[0]]


def open_session(path: Path, threads: int | None = None) -> Session:
    """Open an .onnx or .xml file; raise a WeightsError if its library cannot run it."""
    return OnnxSession(path, threads) if path.suffix.lower() == ".onnx" else OpenVinoSession(path, threads)
