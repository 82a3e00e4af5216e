"""The table of named models, each with its cost at an image size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.model.architecture import VitArchitecture
from vitrail.model.cost import compute_cost, count_tokens
from vitrail.model.variants import LISTED_NAMES, make_architecture


class ModelEntry(NamedTuple):
    """One row of the table of models."""

    name: str
    """What `create_model` takes."""
    parameters: int
    """Number of weights, those of the head for 1,000 classes included."""
    gflops: float
    """10⁹ operations for one image, a multiply-accumulate counted as two."""
    tokens: int | None
    """Length of the encoder's sequence; None for a ResNet."""
    image_size: int
    """Side of the image in pixels."""


def list_models(names: str | Sequence[str] | None = None, *, image_size: int = 224) -> list[ModelEntry]:
    """List models with 1,000 classes, and what each costs: parameters, operations and tokens for one image.

        vitrail.list_models(["S/8", "R50+B/16"], image_size=384)

    Args:
        names: names that `create_model` takes, or one of them; the usual ones if None.
        image_size: side of the image in pixels. Among the usual models, one whose patches do not divide it is listed
            at the next smaller size that they divide.

    Returns:
        A row for each model, in the order of the names.

    Raises:
        ConfigError: an unknown name, or a named model whose patches do not divide the image size.
    """
    entries = []
    names = [names] if isinstance(names, str) else names
    for name in names or LISTED_NAMES:
        plain = make_architecture(name)
        stride = plain.stride if isinstance(plain, VitArchitecture) else 1
        size = image_size if names else max(image_size // stride, 1) * stride
        resized = make_architecture(name, image_size=size)
        cost = compute_cost(resized)
        length = count_tokens(resized) if isinstance(resized, VitArchitecture) else None
        entries.append(ModelEntry(name, cost.parameters, cost.flops / 1e9, length, size))
    return entries
