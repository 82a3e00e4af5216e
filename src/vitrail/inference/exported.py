"""The engines of exported files: ONNX by onnxruntime, OpenVINO's .xml by OpenVINO, both on the CPU.

`vitrail export` writes labels and preprocessing into the file, so that it needs nothing beside it.
"""

from __future__ import annotations

import importlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import MissingExtraError, WeightsError
from vitrail.inference.engine import Engine, EngineOutput
from vitrail.system.files import sha256

Array = NDArray[Any]


class ExportedEngine(Engine):
    """A file that computes logits, or the representations of a model without classes."""

    precision = "exported"
    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise WeightsError(f"there is no file {path}: vitrail export makes one")
        input_type, output_name, metadata = self._open()
        if "float" not in input_type and "f32" not in input_type and "f16" not in input_type:
            raise WeightsError(
                f"{path} takes pixels, not normalised images: vitrail prepares images itself, so export the model "
                "without preprocessing"
            )
        self.is_half = "16" in input_type
        if "preprocessing" not in metadata:
            raise WeightsError(f"{path} does not say how images are prepared: write it with `vitrail export`")
        try:
            self.preprocessing = Preprocessing(**json.loads(metadata["preprocessing"]))
            labels = json.loads(metadata.get("labels", "null"))
            architecture = json.loads(metadata.get("architecture", "{}"))
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path} has metadata that cannot be read: {error}") from None
        # With dynamic quantisation the result for an image would depend on the other images of its batch.
        self.one_by_one = metadata.get("quantisation") == "dynamic"
        width = self._run_all(self.make_blank()).shape[1]
        has_classes = not output_name.startswith("embed") and architecture.get("num_classes") != 0
        self.num_classes = width if has_classes else 0
        self._embedding_size = None if has_classes else width
        self.class_names = tuple(labels) if labels else None
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise WeightsError(f"{path} has {self.num_classes} classes and {len(self.class_names)} labels")

    @property
    def embedding_size(self) -> int | None:
        return self._embedding_size

    @abstractmethod
    def _open(self) -> tuple[str, str, Mapping[str, str]]:
        """Open the file; return the type of its input, the name of its output, and its metadata."""

    @abstractmethod
    def _run(self, images: Array) -> Array:
        """Compute a batch of normalised images."""

    def compute(self, pixels: Tensor, *, logits: bool = True, embeddings: bool = False) -> EngineOutput:
        self.check_request(logits, embeddings)
        rows = torch.from_numpy(self._run_all(pixels))
        return EngineOutput(rows if logits else None, rows if embeddings else None)

    def compute_digest(self) -> str:
        weights = self.path.with_suffix(".bin")  # OpenVINO's
        return "-".join(sha256(path) for path in (self.path, weights) if path.is_file())

    def _run_all(self, pixels: Tensor) -> Array:
        images = normalise(pixels.cpu(), self.preprocessing).numpy()
        images = images.astype(np.float16) if self.is_half else images
        parts = np.split(images, len(images)) if self.one_by_one else [images]
        return np.concatenate([self._run(part) for part in parts]).astype(np.float32, copy=False)


class OnnxEngine(ExportedEngine):
    """An .onnx file. On a machine with a GPU, onnxruntime uses it if its own package can."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self._threads = threads
        super().__init__(path)

    def _open(self) -> tuple[str, str, Mapping[str, str]]:
        try:
            onnxruntime: Any = importlib.import_module("onnxruntime")
        except ImportError:
            raise MissingExtraError("running an .onnx file", "export") from None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = self._threads or 0
        try:
            providers = onnxruntime.get_available_providers()
            self._session = onnxruntime.InferenceSession(str(self.path), options, providers=providers)
            metadata = self._session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime raises many kinds
            raise WeightsError(f"{self.path} is no ONNX file that onnxruntime can run: {error}") from None
        (self._input, *others), (output, *_) = self._session.get_inputs(), self._session.get_outputs()
        if others:
            raise WeightsError(f"{self.path} takes {1 + len(others)} inputs, not one of images")
        return self._input.type, output.name, metadata

    def _run(self, images: Array) -> Array:
        rows: Array = self._session.run(None, {self._input.name: images})[0]
        return rows


class OpenVinoEngine(ExportedEngine):
    """An .xml file with its weights beside it as .bin."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self._threads = threads
        super().__init__(path)

    def _open(self) -> tuple[str, str, Mapping[str, str]]:
        try:
            openvino: Any = importlib.import_module("openvino")
        except ImportError:
            raise MissingExtraError("running an .xml file of OpenVINO", "openvino") from None
        settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32"}
        if self._threads is not None:
            settings["INFERENCE_NUM_THREADS"] = self._threads
        try:
            model = openvino.Core().read_model(self.path)
            self._compiled = openvino.compile_model(model, "CPU", settings)
            info = model.get_rt_info(["vitrail"]).astype(dict) if model.has_rt_info(["vitrail"]) else {}
        except Exception as error:  # OpenVINO's own kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise WeightsError(f"{self.path} is no file that OpenVINO can run: {reason}") from None
        output = model.output(0)
        name = output.get_any_name() if output.get_names() else ""
        return (
            model.input(0).get_element_type().get_type_name(),
            name,
            {key: text.astype(str) for key, text in info.items()},
        )

    def _run(self, images: Array) -> Array:
        rows: Array = self._compiled(images)[0]
        return rows


def open_exported(path: Path, threads: int | None = None) -> ExportedEngine:
    """Open an .onnx or .xml file that `vitrail export` wrote."""
    return OnnxEngine(path, threads) if path.suffix.lower() == ".onnx" else OpenVinoEngine(path, threads)
