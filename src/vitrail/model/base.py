"""`ImageModel`, the base class of all models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.config import Origin, Preprocessing, TrainingCost
from vitrail.errors import ConfigError, InputError
from vitrail.model.architecture import Architecture
from vitrail.model.initialise import initialise_head
from vitrail.reliability.record import Reliability
from vitrail.tasks.labels import Labels
from vitrail.tasks.task import Task


class ImageModel(nn.Module, ABC):
    """A model that turns images into representations and logits, and carries its preprocessing and labels."""

    architecture: Architecture
    """All options that are needed to build the same network again."""
    preprocessing: Preprocessing
    """How image files become this model's input."""
    head: nn.Module
    """Representation → logits."""
    origin: Origin | None
    """Where the weights came from; None for fresh ones."""
    training_cost: TrainingCost | None
    """The compute that the training of the weights took, if known."""
    learned_from: str | None
    """The fingerprint of the last training images, if known."""
    chosen_by: str | None
    """The fingerprint of the images that chose among several states of the training, if known."""
    stored_task: Task | None
    """What the outputs mean, if they are not the classes of one label; see `task`."""
    reliability: Reliability | None
    """What the answers are worth, if `vitrail calibrate` has fitted it; another head or image size makes it None."""
    unused_tensors: dict[str, Tensor]
    """Tensors of the loaded checkpoint that the model does not need, by name, kept for a conversion back."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = architecture
        self.in_channels = architecture.in_channels
        half = (0.5,) * self.in_channels
        self.preprocessing = Preprocessing(image_size=architecture.image_size, mean=half, std=half)
        self._labels: tuple[str, ...] | None = None
        self.origin = None
        self.training_cost = None
        self.learned_from = None
        self.chosen_by = None
        self.stored_task = None
        self.reliability = None
        self.unused_tensors = {}

    @abstractmethod
    def build_head(self) -> nn.Module:
        """Build the head of the architecture, without values."""

    @abstractmethod
    def forward_features(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → the features before pooling."""

    @abstractmethod
    def pool_features(self, features: Tensor) -> Tensor:
        """The result of `forward_features` → the representation y, (B, D)."""

    @abstractmethod
    def resize(self, image_size: int | tuple[int, int]) -> Self:
        """Change the image size the model is built for, for good."""

    @abstractmethod
    def set_gradient_checkpointing(self, enabled: bool = True) -> None:
        """While training, compute the activations of each block again in the backward pass, to save memory."""

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """The result of `forward_features` → logits (B, K), or the representation (B, D) with `pre_logits`."""
        y = self.pool_features(features)
        return y if pre_logits else self.head(y)

    def embed(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, D): the representation y of each image."""
        return self.pool_features(self.forward_features(images))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W), normalised as `preprocessing` says → (B, K) logits; y itself if there are no classes."""
        return self.forward_head(self.forward_features(images))

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width the model is built for."""
        return self.architecture.image_size

    @property
    def num_classes(self) -> int:
        """0 for a model without a head."""
        return self.architecture.num_classes

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of the logits, or None."""
        return self._labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        check_labels(labels, self.num_classes)
        self._labels = None if labels is None else tuple(labels)

    @property
    def task(self) -> Task:
        """What the outputs mean: the classes of one label, unless `give_task` gave another task."""
        names = self.labels or tuple(f"class {number}" for number in range(self.num_classes))
        return self.stored_task or Labels(names=names)

    def give_task(self, task: Task) -> Self:
        """Replace the head by a zero-initialised linear layer for a task; its output names become the labels."""
        self.replace_head(len(task.output_names), task.output_names)
        self.stored_task = None if task.kind == "labels" else task
        return self

    def replace_head(self, num_classes: int, labels: Sequence[str] | None = None) -> Self:
        """Replace the whole head by a zero-initialised linear layer, as the paper does to fine-tune (section 3.2)."""
        check_labels(labels, num_classes)
        update: dict[str, object] = {"num_classes": num_classes}
        if "representation_size" in type(self.architecture).model_fields:
            update["representation_size"] = None
        self._rebuild_architecture(**update)
        like = next(self.parameters())
        with torch.device("meta"):  # torch's own values would be drawn in vain, and change its global generator
            head = self.build_head()
        self.head = head.to(like.dtype).to_empty(device=like.device)
        initialise_head(self.head)
        self.labels, self.stored_task, self.reliability = labels, None, None
        return self

    def _prepare_at_own_size(self) -> None:
        """Let the preprocessing follow the model's image size. What was fitted at another size no longer holds."""
        if self.preprocessing.image_size != self.image_size:
            self.reliability = None
        self.preprocessing = self.preprocessing.model_copy(update={"image_size": self.image_size})

    def _rebuild_architecture(self, **update: object) -> None:
        """Change fields of the architecture, and check it again."""
        fields = {name: getattr(self.architecture, name) for name in type(self.architecture).model_fields}
        self.architecture = type(self.architecture)(**{**fields, **update})

    def check_images(self, images: Tensor) -> None:
        """Raise an InputError if the shape or type of a batch of images does not fit the model."""
        if not isinstance(images, Tensor):
            kind = f"{type(images).__module__}.{type(images).__name__}"
            raise InputError(f"images must be a torch tensor, not a {kind}: vitrail.prepare makes one")
        expected = f"(batch, {self.in_channels}, height, width)"
        if images.ndim != 4:
            hint = ": for a single image give images[None]" if images.ndim == 3 else ""
            raise InputError(f"images must be a batch of shape {expected}, not {tuple(images.shape)}{hint}")
        if images.shape[1] != self.in_channels:
            turned = images.shape[3] == self.in_channels
            hint = ": channels come second, so images.permute(0, 3, 1, 2) would fit" if turned else ""
            raise InputError(f"images must have shape {expected}, not {tuple(images.shape)}{hint}")
        dtype = next(self.parameters()).dtype
        # Under autocast other types are cast, but float64 is not among them.
        castable = images.dtype in (torch.float32, torch.float16, torch.bfloat16)
        if images.dtype != dtype and not (castable and torch.is_autocast_enabled(images.device.type)):
            hint = " after scaling pixels as model.preprocessing says" if images.dtype == torch.uint8 else ""
            raise InputError(f"images are {images.dtype} but the model is {dtype}: give images.to({dtype}){hint}")


def check_labels(labels: Sequence[str] | None, num_classes: int) -> None:
    if labels is not None and len(labels) != num_classes:
        raise ConfigError(f"{len(labels)} labels were given to a model of {num_classes} classes")
