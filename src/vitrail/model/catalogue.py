"""The models that have a name, each with its cost at an image size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.model.architecture import VitArchitecture
from vitrail.model.cost import compute_cost, count_tokens
from vitrail.model.variants import LISTED_NAMES, make_architecture


class ModelEntry(NamedTuple):
    """One row."""

    name: str
    parameters: int
    gflops: float
    """10⁹ operations for one image, a multiply-accumulate counted as two."""
    count_tokens: int | None
    """None for a ResNet."""
    image_size: int


def list_models(names: Sequence[str] | None, image_size: int) -> list[ModelEntry]:
    """The named models, or the listed ones; at the nearest size below that their patches divide."""
    entries = []
    for name in names or LISTED_NAMES:
        plain = make_architecture(name)
        stride = plain.stride if isinstance(plain, VitArchitecture) else 1
        size = image_size if names else max(image_size // stride, 1) * stride
        resized = make_architecture(name, image_size=size)
        counted = compute_cost(resized)
        length = count_tokens(resized) if isinstance(resized, VitArchitecture) else None
        entries.append(ModelEntry(name, counted.parameters, counted.flops / 1e9, length, size))
    return entries
