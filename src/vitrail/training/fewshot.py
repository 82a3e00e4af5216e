"""Few-shot accuracy while a model trains: what a run is handed for it, and the features that it is computed from.

A run computes the features of some images by the model in training. Which images these are, and what their features
tell, is decided above this room: `run_training` takes a function that opens them (`OpenFewshot`), such as
`vitrail.evaluation.training_fewshot.open_training_fewshot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from vitrail.data.loader import Batch, EvaluationLoader
from vitrail.data.resident import CachedBatches
from vitrail.data.sources.source import Source, compute_fingerprint
from vitrail.errors import ConfigError
from vitrail.objectives.base import Objective
from vitrail.system.device import float64_device
from vitrail.system.ranks import Ranks
from vitrail.training.config import RunConfig

MOST_ON_DEVICE = 1 << 30
"""Bytes of prepared few-shot images that are kept on a GPU; more are kept in the memory of the CPU."""


class ImageFeatures(NamedTuple):
    """The features of the images of a source that could be read, in the order of the source."""

    values: Tensor
    """(N, D) float32."""
    labels: Tensor
    """(N,) int64."""
    indices: Tensor
    """(N,) int64: the images' numbers in the source."""


class Fewshot(Protocol):
    """The images whose features are needed, and the function of them that is measured."""

    @property
    def name(self) -> str:
        """A name for records and figures, such as "10-shot"."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The images, in parts."""

    def score(self, features: Sequence[ImageFeatures]) -> dict[str, float]:
        """Return what is measured by the features of each part: "accuracy", and perhaps more. Draws nothing anew."""


class OpenFewshot(Protocol):
    """Opens the images for few-shot accuracy, as the keys `fewshot_*` of the section `run` say."""

    def __call__(
        self, training: Source, validation: Source | None, *, data: str | None, shots: int, most_images: int
    ) -> Fewshot:
        """Return them.

        Args:
            training, validation: The run's own images.
            data: Other DATA, in place of the run's own images.
            shots: Images of each class to learn from.
            most_images: The most images to score.
        """


@dataclass(frozen=True)
class FewshotRun:
    """Few-shot accuracy in a run."""

    task: Fewshot
    loaders: tuple[EvaluationLoader | CachedBatches, ...]
    """One for each part of the images, with the images of this rank. Prepared images are kept."""

    @property
    def fingerprint(self) -> str:
        """A text that is the same for the same images."""
        return " ".join(compute_fingerprint(source) for source in self.task.sources)


def open_run_fewshot(
    config: RunConfig, training: Source, validation: Source | None, open_fewshot: OpenFewshot | None
) -> Fewshot | None:
    """Open the images for few-shot accuracy, if the configuration asks for it.

    Raises:
        ConfigError: It is asked for, but there is no function that opens them, or no images.
    """
    run = config.run
    if run.fewshot_every is None:
        if config.schedule.choose_by == "fewshot":
            raise ConfigError(
                'schedule.choose_by = "fewshot" needs few-shot accuracies to compare: give run.fewshot_every too'
            )
        return None
    if open_fewshot is None:
        raise ConfigError(
            "run.fewshot_every is measured by what run_training is handed for it: call vitrail.train(config), or give "
            "fewshot=vitrail.evaluation.training_fewshot.open_training_fewshot"
        )
    if config.schedule.choose_by == "fewshot" and config.data.divide_validation != "no":
        raise ConfigError(
            'data.divide_validation divides the images that choose, and with schedule.choose_by = "fewshot" validation '
            "images do not: leave out one of them"
        )
    return open_fewshot(
        training, validation, data=run.fewshot_data, shots=run.fewshot_shots, most_images=run.fewshot_images
    )


def choose_place(source: Source, image_bytes: int, device: torch.device) -> torch.device:
    """Return where the prepared images of a source are kept: on the device, or on the CPU if they are large."""
    return device if len(source) * image_bytes <= MOST_ON_DEVICE else torch.device("cpu")


def embed_batch(objective: Objective, batch: Batch) -> tuple[Tensor, ...]:
    """Return the features, labels, numbers and mask of a batch."""
    return objective.embed(batch).float(), batch.labels, batch.indices, batch.mask


def gather_features(batches: Sequence[tuple[Tensor, ...]], ranks: Ranks) -> ImageFeatures:
    """Return what `embed_batch` gave for all batches of all ranks as one. All ranks must call this."""
    columns = [torch.cat(column) for column in zip(*batches, strict=True)]
    if ranks.size > 1:
        parts = ranks.gather([column.cpu() for column in columns])
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    values, labels, indices, mask = (column.to(float64_device(ranks.device)) for column in columns)
    order = indices[mask].argsort()  # the number of ranks changes nothing
    return ImageFeatures(*(column[mask][order] for column in (values, labels, indices)))
