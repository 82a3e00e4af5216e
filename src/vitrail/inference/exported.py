"""The engine of an exported file: ONNX by onnxruntime, OpenVINO's .xml by OpenVINO, both on the CPU.

`vitrail export` writes labels and preprocessing into the file, so that it needs nothing beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import WeightsError
from vitrail.inference.engine import Engine, EngineOutput
from vitrail.inference.sessions import Array, open_session
from vitrail.reliability.record import Reliability, read_reliability
from vitrail.system.files import sha256
from vitrail.tasks.labels import Labels
from vitrail.tasks.registry import read_task
from vitrail.tasks.task import Task


class ExportedEngine(Engine):
    """An .onnx or .xml file that `vitrail export` wrote: it computes logits, or representations if it has no classes.

    A file that needs representations to tell unknown images computes both.

    On a machine with a GPU, onnxruntime uses it if its own package can.
    """

    precision = "exported"
    device = torch.device("cpu")

    def __init__(self, path: Path, threads: int | None = None) -> None:
        self.path = path
        if not path.is_file():
            raise WeightsError(f"there is no file {path}: vitrail export makes one")
        self._session = open_session(path, threads)
        self.runtime, metadata, input_type = self._session.runtime, self._session.metadata, self._session.input_type
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
            labels = json.loads(metadata.get("classes") or metadata.get("labels") or "null")
            architecture = json.loads(metadata.get("architecture", "{}"))
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path} has metadata that cannot be read: {error}") from None
        # With dynamic quantisation the result for an image would depend on the other images of its batch.
        self.one_by_one = metadata.get("quantisation") == "dynamic"
        rows, *more = self._run_all(self.make_blank())
        width = rows.shape[1]
        has_classes = not self._session.output_name.startswith("embed") and architecture.get("num_classes") != 0
        self.num_classes = width if has_classes else 0
        self._embedding_size = int(more[0].shape[1]) if more else None if has_classes else width
        self.class_names = tuple(labels) if labels else None
        self.task = self._read_task(metadata)
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise WeightsError(f"{path} has {self.num_classes} classes and {len(self.class_names)} labels")
        self.reliability = self._read_reliability(metadata)

    def _read_reliability(self, metadata: Mapping[str, str]) -> Reliability | None:
        """Return what a file's metadata says the answers are worth; None if it says nothing."""
        if "reliability" not in metadata:
            return None
        try:
            found = read_reliability(
                json.loads(metadata["reliability"]), self.num_classes, isinstance(self.task, Labels)
            )
        except (ValueError, TypeError, RecursionError) as error:  # a ConfigError is a ValueError
            raise WeightsError(f"{self.path} has a record of reliability that cannot be read: {error}") from None
        if found.unknown is not None and found.unknown.needs_embeddings and self._embedding_size is None:
            raise WeightsError(f"{self.path} tells unknown images by representations, and gives none")
        return found

    def _read_task(self, metadata: Mapping[str, str]) -> Task:
        """Return the task in a file's metadata; labels if there is none."""
        if "task" not in metadata:
            return Labels(names=self.labels)
        try:
            task = read_task(json.loads(metadata["task"]))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # a ConfigError is a ValueError
            raise WeightsError(f"{self.path} has a task that cannot be read: {error}") from None
        if len(task.output_names) != self.num_classes:
            raise WeightsError(f"{self.path} has {self.num_classes} outputs and its task {len(task.output_names)}")
        return task

    @property
    def embedding_size(self) -> int | None:
        return self._embedding_size

    def compute(self, pixels: Tensor, *, logits: bool = True, embeddings: bool = False) -> EngineOutput:
        self.check_request(logits, embeddings)
        rows = [torch.from_numpy(each) for each in self._run_all(pixels)]
        return EngineOutput(rows[0] if logits else None, rows[-1] if embeddings else None)

    def compute_digest(self) -> str:
        # OpenVINO's weights, and those of a large ONNX file, lie beside it.
        beside = [self.path.with_suffix(".bin"), self.path.with_name(f"{self.path.name}.data")]
        return "-".join(sha256(path) for path in (self.path, *beside) if path.is_file())

    def _run_all(self, pixels: Tensor) -> list[Array]:
        """Return logits or representations; logits and representations if the file gives both."""
        images = normalise(pixels.cpu(), self.preprocessing).numpy()
        images = images.astype(np.float16) if self.is_half else images
        parts = np.split(images, len(images)) if self.one_by_one else [images]
        computed = zip(*(self._session.run_all(part) for part in parts), strict=True)
        return [np.concatenate(rows).astype(np.float32, copy=False) for rows in computed]
