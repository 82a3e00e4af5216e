"""What computes behind the server: a PyTorch model, or an ONNX file.

Shapes: B images, C channels, K classes, D the representation's width, L attention layers.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError, MissingExtraError, NotApplicableError, WeightsError
from vitrail.fast.cpu.packed import pack_layers
from vitrail.fast.optimize import FastModel, optimize
from vitrail.inference.class_names import make_display_labels
from vitrail.inference.torch_engine import cast_half_to_float32
from vitrail.inspection.measure.anatomy import patch_grid, prefix_names
from vitrail.inspection.measure.attention import rollout_by_layer
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device

Array = NDArray[Any]


class Backend(Protocol):
    """A model that computes for the server."""

    preprocessing: Preprocessing
    labels: tuple[str, ...]
    """Class names in words; empty for a model without classes."""
    embedding: int | None
    """D; None if the backend gives no representations."""
    layers: int | None
    """L; None if there is no attention to show, and `why_no_attention` says why."""
    why_no_attention: str

    def enter_thread(self) -> None:
        """Prepare the thread that will compute. Called once, in that thread."""

    def probabilities(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, K) float32."""

    def representations(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, D) float32."""

    def rollout(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, L, rows, columns)."""


def blank_images(preprocessing: Preprocessing, count: int = 1) -> Tensor:
    """Return (count, C, height, width) black images."""
    return torch.zeros(count, len(preprocessing.mean), *preprocessing.image_size, dtype=torch.uint8)


class TorchBackend:
    """A vitrail model, on a GPU if there is one.

    The backend owns the model: in fp32 it packs the model's layers in place.

    Args:
        threads: threads for each matrix product on a CPU; torch's own number if None.
        precision: precisions other than fp32 are faster and less exact.
        batch: the number of images that will usually be computed at a time.
    """

    def __init__(
        self,
        model: ImageModel,
        threads: int | None = None,
        device: str = "auto",
        precision: str = "fp32",
        batch: int = 1,
    ) -> None:
        cast_half_to_float32(model)
        self.model = model.to(choose_device(device)).eval().requires_grad_(False)
        self.fast: FastModel | None = None
        if precision == "fp32":
            pack_layers(self.model)
        else:
            before = torch.get_num_threads()
            torch.set_num_threads(threads or before)  # the fastest variant depends on the number of threads
            try:
                self.fast = optimize(self.model, "latency", precision, batch=batch)
            finally:
                torch.set_num_threads(before)
        self.preprocessing = model.preprocessing
        self.labels = make_display_labels(model.labels, model.num_classes)
        self.threads = threads
        self.layers: int | None = None
        self.why_no_attention = ""
        blank = blank_images(self.preprocessing)
        self.embedding: int | None = self.representations(blank).shape[1]
        try:
            self.layers = self.rollout(blank).shape[1]
        except (NotApplicableError, ConfigError) as error:
            self.why_no_attention = str(error)

    def enter_thread(self) -> None:
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    @torch.inference_mode()
    def probabilities(self, pixels: Tensor) -> Array:
        model = self.model if self.fast is None else self.fast
        probabilities: Array = model(self._normalise(pixels)).float().softmax(dim=1).cpu().numpy()
        return probabilities

    @torch.inference_mode()
    def representations(self, pixels: Tensor) -> Array:
        model = self.model if self.fast is None else self.fast
        representations: Array = model.embed(self._normalise(pixels)).float().cpu().numpy()
        return representations

    def rollout(self, pixels: Tensor) -> Array:
        images = self._normalise(pixels)
        rows = rollout_by_layer(self.model, images)[:, :, len(prefix_names(self.model)) :]
        return rows.reshape(*rows.shape[:2], *patch_grid(self.model, images))

    def _normalise(self, pixels: Tensor) -> Tensor:
        parameter = next(self.model.parameters())
        return normalise(pixels.to(parameter.device), self.preprocessing, parameter.dtype)


class OnnxBackend:
    """A file written by `vitrail export --to onnx`: its metadata holds labels and preprocessing."""

    def __init__(self, path: Path, threads: int | None = None) -> None:
        try:
            onnxruntime: Any = importlib.import_module("onnxruntime")
        except ImportError:
            raise MissingExtraError("serving an .onnx file", "export") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        try:
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=onnxruntime.get_available_providers()
            )
            metadata = self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime raises many kinds
            raise WeightsError(f"{path} is no ONNX file that onnxruntime can run: {error}") from None
        (self.input, *other_inputs), (output, *_) = self.session.get_inputs(), self.session.get_outputs()
        if other_inputs or "float" not in self.input.type:
            raise WeightsError(
                f"{path} takes {self.input.name!r} of {self.input.type}, not normalised images: the server prepares "
                "images itself, so export the model without --with-preprocessing"
            )
        if "preprocessing" not in metadata:
            raise WeightsError(f"{path} does not say how images are prepared: write it with `vitrail export --to onnx`")
        try:
            self.preprocessing = Preprocessing(**json.loads(metadata["preprocessing"]))
            labels = json.loads(metadata.get("labels", "null"))
            architecture = json.loads(metadata.get("architecture", "{}"))
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path} has metadata that cannot be read: {error}") from None
        # With dynamic quantisation the result for an image would depend on the other images of its batch.
        self.one_by_one = metadata.get("quantisation") == "dynamic"
        width = self._run(blank_images(self.preprocessing)).shape[1]
        classes = 0 if output.name.startswith("embed") or architecture.get("num_classes") == 0 else width
        self.labels = make_display_labels(labels or None, classes)
        if len(self.labels) != classes:
            raise WeightsError(f"{path} has {classes} classes and {len(self.labels)} labels")
        self.embedding = None if classes else width
        self.layers: int | None = None
        self.why_no_attention = "an ONNX file does not give out its attention: serve the model itself for that"

    def enter_thread(self) -> None:
        """Do nothing: onnxruntime has threads of its own."""

    def probabilities(self, pixels: Tensor) -> Array:
        logits = self._run(pixels)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities: Array = powers / powers.sum(axis=1, keepdims=True)
        return probabilities

    def representations(self, pixels: Tensor) -> Array:
        return self._run(pixels)

    def rollout(self, pixels: Tensor) -> Array:
        raise NotApplicableError(self.why_no_attention)

    def _run(self, pixels: Tensor) -> Array:
        """Return logits; representations if the file has no classes."""
        images = normalise(pixels, self.preprocessing).numpy()
        images = images.astype(np.float16) if "float16" in self.input.type else images
        parts = np.split(images, len(images)) if self.one_by_one else [images]
        outputs = [self.session.run(None, {self.input.name: part})[0] for part in parts]
        return np.concatenate(outputs).astype(np.float32, copy=False)
