"""The way from pixels to answers, the same for every command: an `Engine` computes, whatever the model is made of.

    a photo ─ prepare.fit_image ─► pixels ─ engine.compute ─► logits, representations ─ softmax, labels ─► an answer

`open_engine` makes one from a model of PyTorch (in any precision), an .onnx file or an OpenVINO .xml file.

Shapes: B images, C channels, K classes, D the width of the representation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.errors import ConfigError, NotApplicableError, WeightsError
from vitrail.inference.class_names import make_display_labels
from vitrail.model.base import ImageModel
from vitrail.reliability.record import Reliability, require_unknown
from vitrail.reliability.unknown import Familiarity
from vitrail.system.device import choose_device
from vitrail.tasks.labels import Labels
from vitrail.tasks.task import Task
from vitrail.weights.source import EXPORTED

FloatArray = NDArray[np.float32]
Model = ImageModel | str | Path
"""MODEL as every verb takes it: a loaded model, or a name for `vitrail.load`, or the path of an exported file."""


class EngineOutput(NamedTuple):
    """What an engine computes for a batch, in float32 (or the model's own float64)."""

    logits: Tensor | None
    """(B, K), if requested."""
    embeddings: Tensor | None
    """(B, D) representations y, if requested."""


class Engine(ABC):
    """A model that is ready to compute.

    Attributes:
        preprocessing: how images are prepared for it.
        task: what its outputs mean, and how they become an answer.
        class_names: the names of its classes as they are stored; None if they are not known.
        num_classes: K; 0 if it does not classify.
        precision: the precision that it computes in: fp32, bf16, fp16, fp8, int8, or "exported".
        device: where it takes images.
        runtime: the library that computes: PyTorch, onnxruntime or OpenVINO.
        reliability: what its answers are worth, for sets of labels and for unknown images; None if nothing was fitted.
    """

    preprocessing: Preprocessing
    task: Task
    class_names: tuple[str, ...] | None
    num_classes: int
    precision: str
    device: torch.device
    runtime: str
    reliability: Reliability | None = None

    @property
    @abstractmethod
    def embedding_size(self) -> int | None:
        """D, the width of the representation; None if the engine gives no representations."""

    @abstractmethod
    def compute(self, pixels: Tensor, *, logits: bool = True, embeddings: bool = False) -> EngineOutput:
        """Compute what is requested, in one pass.

        Args:
            pixels: (B, C, height, width) uint8 of the size in `preprocessing`, on any device.
            logits: whether to give (B, K) logits.
            embeddings: whether to give (B, D) representations.
        """

    @abstractmethod
    def compute_digest(self) -> str:
        """Return a hash of everything that decides the results: weights and precision."""

    def enter_thread(self) -> None:
        """Prepare the thread that will compute. Called once, in that thread."""

    @property
    def in_channels(self) -> int:
        return len(self.preprocessing.mean)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes in words, in class order; () if there are no classes."""
        return make_display_labels(self.class_names, self.num_classes)

    @property
    def display_task(self) -> Task:
        """The task with the names of classes in words, for answers that people read."""
        return Labels(names=self.labels) if isinstance(self.task, Labels) else self.task

    @property
    def has_labels(self) -> bool:
        """Whether the model gives an image one label of several."""
        return bool(self.num_classes) and isinstance(self.task, Labels)

    def classify(self, pixels: Tensor) -> FloatArray:
        """Return the probability of every class, (B, K), for (B, C, height, width) uint8 pixels."""
        return to_probabilities(self._require(self.compute(pixels).logits))

    def predict(self, pixels: Tensor) -> FloatArray:
        """Return the values of the task, (B, V), for (B, C, height, width) uint8 pixels: see `Task.activate`."""
        return to_array(self.task.activate(self._require(self.compute(pixels).logits)))

    def embed(self, pixels: Tensor) -> FloatArray:
        """Return the representations, (B, D), of (B, C, height, width) uint8 pixels."""
        return to_array(self._require(self.compute(pixels, logits=False, embeddings=True).embeddings))

    def judge(self, output: EngineOutput) -> list[Familiarity]:
        """Return whether each image of a batch looks like the known ones.

        Args:
            output: logits, or embeddings if `reliability.unknown.needs_embeddings`.

        Raises:
            ConfigError: no score of unknown images was fitted for the model.
        """
        unknown = require_unknown(self.reliability)
        logits, embeddings = (None if rows is None else to_array(rows) for rows in output)
        return [unknown.judge(score) for score in unknown.measure(logits, embeddings).tolist()]

    def make_blank(self, count: int = 1) -> Tensor:
        """Return black images, (count, C, height, width) uint8, for a first or a timed call."""
        return torch.zeros(count, self.in_channels, *self.preprocessing.image_size, dtype=torch.uint8)

    def check_request(self, logits: bool, embeddings: bool) -> None:
        """Raise a ConfigError if logits or embeddings are requested that the model does not have."""
        if logits and not self.num_classes:
            raise ConfigError("the model has no classes, and therefore no labels: use embed")
        if embeddings and self.embedding_size is None:
            raise ConfigError("this file gives out logits alone, no representations: take the model it was made from")

    @staticmethod
    def _require(rows: Tensor | None) -> Tensor:
        assert rows is not None  # it was requested
        return rows


def to_probabilities(logits: Tensor) -> FloatArray:
    """(B, K) logits → (B, K) float32 probabilities, on the CPU."""
    return to_array(logits.softmax(dim=1))


def to_array(rows: Tensor) -> FloatArray:
    array: FloatArray = rows.float().cpu().numpy()
    return array


def open_engine(
    model: Model,
    *,
    device: torch.device | str = "auto",
    precision: str = "fp32",
    target: Literal["throughput", "latency"] = "throughput",
    batch: int = 1,
    threads: int | None = None,
    owns_model: bool = False,
    on_message: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Make a model ready to compute.

    Args:
        model: a loaded model, anything that `vitrail.load` takes, an .onnx file or an .xml file of OpenVINO. A loaded
            model stays as it is; the engine shares its weights if they are on the device, and not in half precision.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one. Exported files run on the CPU.
        precision: fp32, the exact one; or a faster one: bf16, fp16 and fp8 (GPU), int8 (CPU), or auto, which takes the
            fastest on this machine. An exported file has the precision it was exported in.
        target: what a faster precision is tuned for.
        batch: the number of images that will usually be computed at a time.
        threads: CPU threads for each matrix product; the library's own number if None.
        owns_model: whether the engine may change a loaded model: on a CPU it then packs its weights.
        on_message: called with lines of text while a faster precision is prepared.

    Raises:
        ConfigError: an option or the model is not valid.
        WeightsError: the file or the weights cannot be read.
        MissingExtraError: the runtime of an exported file is not installed.
    """
    check_model(model)
    if is_exported(model):
        from vitrail.inference.exported import ExportedEngine

        if precision != "fp32":
            raise ConfigError(f"precision {precision} is for models: {model} has the precision it was exported in")
        return ExportedEngine(Path(str(model)), threads)
    from vitrail.inference.torch_engine import TorchEngine
    from vitrail.model.create import share_model
    from vitrail.weights.load import load

    place = device if isinstance(device, torch.device) else choose_device(device)
    if not isinstance(model, ImageModel):
        model = load(model, device=place)
    elif not owns_model:
        model = share_model(model)
    return TorchEngine(
        model,
        place,
        precision,
        target=target,
        batch=batch,
        threads=threads,
        packs=owns_model,
        on_message=on_message,
    )


def check_model(model: object) -> None:
    """Raise a ConfigError if this is neither a loaded model nor a name of one."""
    if not isinstance(model, ImageModel | str | Path):
        raise ConfigError(f"a {type(model).__name__} is no model: give one of vitrail's, or what vitrail.load takes")


def is_exported(model: Model) -> bool:
    """Return whether this is the name of an exported file."""
    return not isinstance(model, ImageModel) and Path(model).suffix.lower() in EXPORTED


def get_model(engine: Engine) -> ImageModel:
    """Return the model of PyTorch behind an engine; raise a NotApplicableError for an exported file."""
    model = getattr(engine, "model", None)
    if not isinstance(model, ImageModel):
        raise NotApplicableError("an exported file has no layers to look at: take the model that it was made from")
    return model


def name_model(model: Model | Engine) -> str:
    """Return what a model is called in reports: its name or path, or its class if it is loaded."""
    return str(model) if isinstance(model, str | Path) else type(model).__name__


def check_finite(rows: FloatArray, name: str) -> None:
    """Raise a WeightsError if any value is NaN or infinite."""
    if not np.isfinite(rows).all():
        raise WeightsError(f"{name} computes values that are not finite: its weights are damaged")
