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
    parameters: int
    gflops: float
    """10⁹ operations for one image, a multiply-accumulate counted as two."""
    tokens: int | None
    """None for a ResNet."""
    image_size: int


def list_models(names: Sequence[str] | None, image_size: int) -> list[ModelEntry]:
    """Return a row for each of `names`, or for all listed models if None.

    A listed model whose patches do not divide `image_size` gets the nearest smaller size.
    """
    entries = []
    for name in names or LISTED_NAMES:
        plain = make_architecture(name)
        stride = plain.stride if isinstance(plain, VitArchitecture) else 1
        size = image_size if names else max(image_size // stride, 1) * stride
        resized = make_architecture(name, image_size=size)
        cost = compute_cost(resized)
        length = count_tokens(resized) if isinstance(resized, VitArchitecture) else None
        entries.append(ModelEntry(name, cost.parameters, cost.flops / 1e9, length, size))
    return entries
