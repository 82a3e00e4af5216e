"""What is served: a model by name, with all that a request can ask of it. Two kinds compute: torch and onnxruntime.

Shapes: B images, C channels, K classes, D the representation's width, L attention layers.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.evaluation import normalise
from vitrail.errors import ConfigError, MissingExtraError, NotApplicableError, WeightsError
from vitrail.fast.cpu.packed import pack
from vitrail.fast.optimize import FastModel, optimize
from vitrail.inference.batches import in_full_precision
from vitrail.inference.predictor import ranked, words_of
from vitrail.inspection.measure.anatomy import patch_grid, prefix_names
from vitrail.inspection.measure.attention import rollout_by_layer
from vitrail.model.base import ImageModel
from vitrail.serving.http_errors import Refusal
from vitrail.serving.images import Box, pixels_of
from vitrail.system.device import choose_device

Kind = Literal["classify", "embed", "attention"]
Array = NDArray[Any]


class Work(NamedTuple):
    """One image, and what is asked about it."""

    kind: Kind
    content: bytes
    top: int = 5


class Ready(NamedTuple):
    """The same, decoded."""

    kind: Kind
    pixels: Tensor
    top: int
    box: Box


class Rollout(NamedTuple):
    """Attention rollout of one image up to each layer."""

    maps: Array
    """(L, rows, columns)"""
    box: Box


class Backend(Protocol):
    """What computes."""

    preprocessing: Preprocessing
    labels: tuple[str, ...]
    """In words; none where there are no classes."""
    embedding: int | None
    """D; None where representations are not given out."""
    layers: int | None
    """L; None where there is no attention to show, and `why_no_attention` says why."""
    why_no_attention: str

    def enter(self) -> None:
        """In the thread that will compute."""

    def probabilities(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, K) float32."""

    def representations(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, D) float32."""

    def rollout(self, pixels: Tensor) -> Array:
        """(B, C, height, width) uint8 → (B, L, rows, columns)."""


@dataclass
class Served:
    """A model by its name."""

    name: str
    backend: Backend
    facts: dict[str, Any] = field(init=False)
    """What `/v1/models` says of it."""

    def __post_init__(self) -> None:
        self.facts = {
            "name": self.name,
            "image_size": list(self.backend.preprocessing.image_size),
            "classes": len(self.backend.labels),
            "layers": self.backend.layers,
            "attention": self.backend.layers is not None,
            "embedding": self.backend.embedding,
        }

    def prepare(self, work: Work) -> Ready:
        """Decode and resize; a Refusal where that cannot be."""
        pixels, box = pixels_of(work.content, self.backend.preprocessing)
        return Ready(work.kind, pixels, work.top, box)

    def compute(self, batch: Sequence[Ready]) -> list[Any]:
        """One result for each, whatever each asks for: [(label, probability), …], [float, …] or a Rollout; or a
        Refusal where that would be no numbers."""
        results: list[Any] = [None] * len(batch)
        for kind, give in (("classify", self._guesses), ("embed", self._embeddings), ("attention", self._rollouts)):
            places = [place for place, ready in enumerate(batch) if ready.kind == kind]
            if places:
                asked = [batch[place] for place in places]
                found = give(asked, torch.stack([ready.pixels for ready in asked]))
                for place, result in zip(places, found, strict=True):
                    results[place] = result
        return results

    def warm_up(self, batch: int) -> float:
        """Compute at the smallest and the largest batch; seconds that each image of the latter took."""
        for count in (1, batch):
            pixels = _blank(self.backend.preprocessing, count)
            started = time.monotonic()
            found = self.backend.probabilities(pixels) if self.backend.labels else self.backend.representations(pixels)
            if not np.isfinite(found).all():
                raise WeightsError(f"{self.name} computes what is no number: its weights are damaged")
        return (time.monotonic() - started) / batch

    def _guesses(self, asked: Sequence[Ready], pixels: Tensor) -> list[Any]:
        rows, labels = self.backend.probabilities(pixels), self.backend.labels
        return [_no_number(row) or ranked(row, labels, ready.top) for ready, row in zip(asked, rows, strict=True)]

    def _embeddings(self, asked: Sequence[Ready], pixels: Tensor) -> list[Any]:
        return [_no_number(row) or row.tolist() for row in self.backend.representations(pixels)]

    def _rollouts(self, asked: Sequence[Ready], pixels: Tensor) -> list[Any]:
        maps = self.backend.rollout(pixels)
        return [_no_number(one) or Rollout(one, ready.box) for one, ready in zip(maps, asked, strict=True)]


def _no_number(row: Array) -> Refusal | None:
    if np.isfinite(row).all():
        return None
    return Refusal(422, "what the model computes of this image is no number: its weights may be damaged", "no_number")


def _blank(preprocessing: Preprocessing, count: int = 1) -> Tensor:
    """(count, C, height, width) of nothing."""
    return torch.zeros(count, len(preprocessing.mean), *preprocessing.image_size, dtype=torch.uint8)


class TorchBackend:
    """A model of vitrail's, on a GPU where there is one. It is ours from then on: on a CPU its layers are packed."""

    def __init__(
        self,
        model: ImageModel,
        threads: int | None = None,
        device: str = "auto",
        precision: str = "fp32",
        batch: int = 1,
    ) -> None:
        """`precision`: other than fp32 is faster, and less exact; `batch`: images that are to come at a time."""
        in_full_precision(model)
        self.model = model.to(choose_device(device)).eval().requires_grad_(False)
        self.fast: FastModel | None = None
        if precision == "fp32":
            pack(self.model)
        else:
            before = torch.get_num_threads()
            torch.set_num_threads(threads or before)  # what is fastest depends on them
            try:
                self.fast = optimize(self.model, "latency", precision, batch=batch)
            finally:
                torch.set_num_threads(before)
        self.preprocessing = model.preprocessing
        self.labels = words_of(model.labels, model.num_classes)
        self.threads = threads
        self.layers: int | None = None
        self.why_no_attention = ""
        blank = _blank(self.preprocessing)
        self.embedding: int | None = self.representations(blank).shape[1]
        try:
            self.layers = self.rollout(blank).shape[1]
        except (NotApplicableError, ConfigError) as error:
            self.why_no_attention = str(error)

    def enter(self) -> None:
        """So many threads for each product, started from this one."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    @torch.inference_mode()
    def probabilities(self, pixels: Tensor) -> Array:
        """By softmax."""
        model = self.model if self.fast is None else self.fast
        found: Array = model(self._images(pixels)).float().softmax(dim=1).cpu().numpy()
        return found

    @torch.inference_mode()
    def representations(self, pixels: Tensor) -> Array:
        """Before the head."""
        model = self.model if self.fast is None else self.fast
        found: Array = model.embed(self._images(pixels)).float().cpu().numpy()
        return found

    def rollout(self, pixels: Tensor) -> Array:
        """Of the patches only."""
        images = self._images(pixels)
        rows = rollout_by_layer(self.model, images)[:, :, len(prefix_names(self.model)) :]
        return rows.reshape(*rows.shape[:2], *patch_grid(self.model, images))

    def _images(self, pixels: Tensor) -> Tensor:
        parameter = next(self.model.parameters())
        return normalise(pixels.to(parameter.device), self.preprocessing, parameter.dtype)


class OnnxBackend:
    """A file that `vitrail export --to onnx` wrote: labels and preprocessing are in its metadata."""

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
            written = self.session.get_modelmeta().custom_metadata_map
        except Exception as error:  # onnxruntime's own, of many kinds
            raise WeightsError(f"{path} is no ONNX file that onnxruntime can run: {error}") from None
        (self.input, *more), (output, *_) = self.session.get_inputs(), self.session.get_outputs()
        if more or "float" not in self.input.type:
            raise WeightsError(
                f"{path} takes {self.input.name!r} of {self.input.type}, not normalised images: export it without "
                "--with-preprocessing, for the server prepares images itself"
            )
        if "preprocessing" not in written:
            raise WeightsError(f"{path} does not say how images are prepared: write it by `vitrail export --to onnx`")
        try:
            self.preprocessing = Preprocessing(**json.loads(written["preprocessing"]))
            labels = json.loads(written.get("labels", "null"))
            architecture = json.loads(written.get("architecture", "{}"))
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path} has metadata that cannot be read: {error}") from None
        # One range for all activations of a batch would make an image's answer depend on its neighbours.
        self.one_by_one = written.get("quantisation") == "dynamic"
        width = self._outputs(_blank(self.preprocessing)).shape[1]
        classes = 0 if output.name.startswith("embed") or architecture.get("num_classes") == 0 else width
        self.labels = words_of(labels or None, classes)
        if len(self.labels) != classes:
            raise WeightsError(f"{path} has {classes} classes and {len(self.labels)} labels")
        self.embedding = None if classes else width
        self.layers: int | None = None
        self.why_no_attention = "an ONNX file does not give out its attention: serve the model itself for that"

    def enter(self) -> None:
        """onnxruntime has threads of its own."""

    def probabilities(self, pixels: Tensor) -> Array:
        """By softmax."""
        found = self._outputs(pixels)
        powers = np.exp(found - found.max(axis=1, keepdims=True))
        shares: Array = powers / powers.sum(axis=1, keepdims=True)
        return shares

    def representations(self, pixels: Tensor) -> Array:
        """What a file without classes gives out."""
        return self._outputs(pixels)

    def rollout(self, pixels: Tensor) -> Array:
        """Never asked for: there are no layers."""
        raise NotApplicableError(self.why_no_attention)

    def _outputs(self, pixels: Tensor) -> Array:
        """Logits, or representations of a file without classes."""
        images = normalise(pixels, self.preprocessing).numpy()
        images = images.astype(np.float16) if "float16" in self.input.type else images
        parts = np.split(images, len(images)) if self.one_by_one else [images]
        found = [self.session.run(None, {self.input.name: part})[0] for part in parts]
        return np.concatenate(found).astype(np.float32, copy=False)
