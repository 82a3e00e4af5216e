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
from vitrail.inference.engine import Engine, FloatArray, check_finite, to_array
from vitrail.inference.predictor import RankedLabels, form_set, rank_labels
from vitrail.reliability.record import require_sets, require_unknown
from vitrail.reliability.unknown import Familiarity
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
    coverage: float | None = None
    """Of the set of labels, if one is wanted."""


class DecodedRequest(NamedTuple):
    """The same request with the image decoded."""

    operation: Operation
    pixels: Tensor
    top: int
    box: Box
    coverage: float | None = None


class JudgedAnswer(NamedTuple):
    """An answer, and how far it can be relied on."""

    result: Any
    """As without: [(label, probability), …] or an Answer."""
    coverage: float | None
    label_set: RankedLabels
    """The set at that coverage; empty if none was wanted."""
    familiarity: Familiarity | None
    """Whether the image looks like the known ones; None if the model cannot tell."""


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
            "coverage": self.gives_sets,
            "unknown": self.tells_unknown,
        }

    @property
    def has_answers(self) -> bool:
        """Whether the model has a head, and therefore a task."""
        return self.engine.num_classes > 0

    @property
    def gives_sets(self) -> bool:
        """Whether sets of labels were fitted for the model."""
        return self.engine.reliability is not None and self.engine.reliability.sets is not None

    @property
    def tells_unknown(self) -> bool:
        """Whether a score of unknown images was fitted for the model."""
        return self.engine.reliability is not None and self.engine.reliability.unknown is not None

    def decode(self, request: ImageRequest) -> DecodedRequest:
        """Decode and resize the image; raise an HttpError if it cannot be read."""
        pixels, box = decode_upload(request.content, self.engine.preprocessing)
        return DecodedRequest(request.operation, pixels, request.top, box, request.coverage)

    def expect_decoding_seconds(self, request: ImageRequest) -> float:
        """Return about how long `decode` takes."""
        return expect_decoding_seconds(request.content)

    def compute(self, batch: Sequence[DecodedRequest]) -> list[Any]:
        """Return one result for each request.

        A result is [(label, probability), …] for "classify", an Answer for "predict", [float, …] for "embed" and a
        RolloutMaps for "attention"; an HttpError if the numbers are not finite. The first two are in a JudgedAnswer if
        the model tells unknown images, or a set of labels is wanted.
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
            check_finite(self._compute_values(pixels)[0] if self.has_answers else self.engine.embed(pixels), self.name)
        return (time.monotonic() - started) / batch

    def _answer(self, requests: Sequence[DecodedRequest], pixels: Tensor) -> list[Any]:
        rows, familiarities = self._compute_values(pixels)
        return [
            _find_error(row) or self._make_answer(request, row, familiarity)
            for request, row, familiarity in zip(requests, rows, familiarities, strict=True)
        ]

    def _compute_values(self, pixels: Tensor) -> tuple[FloatArray, Sequence[Familiarity | None]]:
        """Return the values of the task, and whether each image looks like the known ones; None if that is not told."""
        if not self.tells_unknown:
            return self.engine.predict(pixels), [None] * len(pixels)
        output = self.engine.compute(pixels, embeddings=require_unknown(self.engine.reliability).needs_embeddings)
        assert output.logits is not None
        return to_array(self.engine.task.activate(output.logits)), self.engine.judge(output)

    def _make_answer(self, request: DecodedRequest, values: FloatArray, familiarity: Familiarity | None) -> Any:
        label_set: RankedLabels = []
        if request.coverage is not None:
            label_set = form_set(require_sets(self.engine.reliability), values, self.labels, request.coverage)
        if request.operation == "classify":
            result: Any = label_set or rank_labels(values, self.labels, request.top)
        else:
            result = make_answer(self.task, values, request.top)
        if request.coverage is None and familiarity is None:
            return result
        return JudgedAnswer(result, request.coverage, label_set, familiarity)

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
