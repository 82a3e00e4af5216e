"""A model behind the server: decode uploads, compute a batch of requests, warm up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitrail.inference.answers import make_answer
from vitrail.inference.engine import Engine, FloatArray, check_finite
from vitrail.inference.predictor import rank_labels
from vitrail.serving.attention import Array, AttentionRollout
from vitrail.serving.http_errors import HttpError
from vitrail.serving.image_decoding import Box, decode_upload, expect_decoding_seconds
from vitrail.serving.settings import TOP

Operation = Literal["classify", "predict", "embed", "attention"]
ANSWERING = ("classify", "predict")
"""Operations that need the values of the task; they share a pass through the model."""


class ImageRequest(NamedTuple):
    """An uploaded image file, and what to compute for it."""

    operation: Operation
    content: bytes
    top: int = TOP


class DecodedRequest(NamedTuple):
    """The same request with the image decoded."""

    operation: Operation
    pixels: Tensor
    top: int
    box: Box


class RolloutMaps(NamedTuple):
    """Attention rollout of one image up to each layer."""

    maps: Array
    """(L, rows, columns)"""
    box: Box


@dataclass
class ServedModel:
    """An engine with the name that requests give."""

    name: str
    engine: Engine
    rollout: AttentionRollout = field(init=False)
    labels: tuple[str, ...] = field(init=False)
    """The names of the classes in words; () if there are none, or for another task than labels."""
    facts: dict[str, Any] = field(init=False)
    """The entry in `/v1/models`."""

    def __post_init__(self) -> None:
        self.rollout, self.task = AttentionRollout(self.engine), self.engine.display_task
        self.labels = self.engine.labels if self.engine.has_labels else ()
        self.facts = {
            "name": self.name,
            "image_size": list(self.engine.preprocessing.image_size),
            "task": self.task.kind if self.has_answers else None,
            "answers": self.task.summarise() if self.has_answers else None,
            "lines": len(make_answer(self.task, self.task.make_example(), TOP).lines) if self.has_answers else 0,
            "classes": len(self.labels),
            "layers": self.rollout.layers,
            "attention": self.rollout.layers is not None,
            "embedding": self.engine.embedding_size,
        }

    @property
    def has_answers(self) -> bool:
        """Whether the model has a head, and therefore a task."""
        return self.engine.num_classes > 0

    def decode(self, request: ImageRequest) -> DecodedRequest:
        """Decode and resize the image; raise an HttpError if it cannot be read."""
        pixels, box = decode_upload(request.content, self.engine.preprocessing)
        return DecodedRequest(request.operation, pixels, request.top, box)

    def expect_decoding_seconds(self, request: ImageRequest) -> float:
        """Return about how long `decode` takes."""
        return expect_decoding_seconds(request.content)

    def compute(self, batch: Sequence[DecodedRequest]) -> list[Any]:
        """Return one result for each request.

        A result is [(label, probability), …] for "classify", an Answer for "predict", [float, …] for "embed" and a
        RolloutMaps for "attention"; an HttpError if the numbers are not finite.
        """
        results: list[Any] = [None] * len(batch)
        steps = ((ANSWERING, self._answer), (("embed",), self._embed), (("attention",), self._roll_out_attention))
        for operations, compute in steps:
            places = [place for place, request in enumerate(batch) if request.operation in operations]
            if places:
                requests = [batch[place] for place in places]
                computed = compute(requests, torch.stack([request.pixels for request in requests]))
                for place, result in zip(places, computed, strict=True):
                    results[place] = result
        return results

    def warm_up(self, batch: int) -> float:
        """Compute a batch of one and a batch of `batch` images; return the seconds per image of the latter."""
        for count in (1, batch):
            pixels = self.engine.make_blank(count)
            started = time.monotonic()
            check_finite(self.engine.predict(pixels) if self.has_answers else self.engine.embed(pixels), self.name)
        return (time.monotonic() - started) / batch

    def _answer(self, requests: Sequence[DecodedRequest], pixels: Tensor) -> list[Any]:
        rows = self.engine.predict(pixels)
        return [
            _find_error(row) or self._make_answer(request, row) for request, row in zip(requests, rows, strict=True)
        ]

    def _make_answer(self, request: DecodedRequest, values: FloatArray) -> Any:
        if request.operation == "classify":
            return rank_labels(values, self.labels, request.top)
        return make_answer(self.task, values, request.top)

    def _embed(self, requests: Sequence[DecodedRequest], pixels: Tensor) -> list[Any]:
        return [_find_error(row) or row.tolist() for row in self.engine.embed(pixels)]

    def _roll_out_attention(self, requests: Sequence[DecodedRequest], pixels: Tensor) -> list[Any]:
        maps = self.rollout(pixels)
        return [_find_error(one) or RolloutMaps(one, request.box) for one, request in zip(maps, requests, strict=True)]


def _find_error(row: Array) -> HttpError | None:
    if np.isfinite(row).all():
        return None
    message = "the model computes values for this image that are not finite: its weights may be damaged"
    return HttpError(422, message, "no_number")
