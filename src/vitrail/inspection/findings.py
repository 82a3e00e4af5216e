"""What a look inside one model found: numbers only, before anything is drawn.

A part that a model has nothing to show for is an `Absent`, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Absent:
    """In place of a part."""

    why: str
    """A sentence for the reader of the report, without a full stop."""


NO_IMAGES = Absent("there were no images to measure it on")


@dataclass(frozen=True)
class Shown:
    """An image that the report shows."""

    name: str
    pixels: NDArray[np.uint8]
    """(height, width, 1 or 3): what the model saw, before it was normalised."""
    guesses: tuple[tuple[str, float], ...]
    """Labels with their probabilities, the best first; none for a model without classes."""


@dataclass(frozen=True)
class Filters:
    """Figure 7, left: principal components of the filters of an embedding."""

    of: str
    """What they are the filters of: the patch embedding, the root convolution, …"""
    components: Array
    """(components, height, width, channels), each of length 1."""
    explained: Array
    """(components,): shares of the variance."""


@dataclass(frozen=True)
class Neighbours:
    """Whether patches that touch have more similar embeddings than others."""

    near: float
    """Mean similarity of 4-neighbours."""
    far: float
    """Of all other pairs."""
    p_value: float
    """Of a permutation test: how often patches in places drawn by lot differ as much."""
    permutations: int


@dataclass(frozen=True)
class Positions:
    """Figure 7, centre: cosine similarity of position embeddings."""

    kind: str
    """learned-1d, …"""
    similarity: Array
    """(rows, columns, rows, columns)."""
    neighbours: Neighbours | None
    """None where the grid is too small to tell."""

    @property
    def learned(self) -> bool:
        """Whether the table could only learn which patches touch; all other kinds have it by construction."""
        return self.kind.startswith("learned-1d")


@dataclass(frozen=True)
class Distance:
    """Figure 7, right: mean attention distance."""

    layers: tuple[str, ...]
    pixels: Array
    """(layers, heads); not a number for a head that never attends to patches."""
    image_size: tuple[int, int]
    """Height and width, to tell far from near."""
    images: int


@dataclass(frozen=True)
class Attention:
    """Figures 6 and 14, for each image that is shown, up to each layer; and the attention of each head."""

    layers: tuple[str, ...]
    rollout: Array
    """(images, layers, rows, columns): what the representation would gather from each patch after so many layers."""
    rollout_prefix: Array
    """(images, layers, prefix): what it would from tokens that are no patch. With the patches' it sums to 1."""
    heads: Array
    """(images, layers, heads, rows, columns): what the tokens that are read attend to."""
    heads_prefix: Array
    """(images, layers, heads, prefix)."""
    prefix: tuple[str, ...]
    """The names of tokens that are no patch."""
    reads: str
    """Whose attention it is: the class token, the mean of the patches, …"""


@dataclass(frozen=True)
class Tokens:
    """How similar what a layer knows of one patch is to what it knows of the others, for each image that is shown."""

    layers: tuple[str, ...]
    similarity: tuple[Array, ...]
    """For each layer (images, rows, columns, rows, columns) of cosine similarities. Grids may differ from layer to
    layer, and may be coarser than the layer's own: of a fine one, blocks of patches were averaged first."""


@dataclass(frozen=True)
class Layers:
    """How alike the representations of two layers are: linear CKA."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    """The same, or the layers of another model."""
    cka: Array
    """(names, others)."""
    images: int


@dataclass(frozen=True)
class Findings:
    """Everything about one model."""

    name: str
    """What to call it where strangers may read it: no path of this machine."""
    facts: tuple[tuple[str, str], ...]
    """Name and value of each row of its card: size, preprocessing, classes, …"""
    card: str
    """The text of its model card, where there is one beside the weights; else empty."""
    filters: tuple[Filters, ...] | Absent
    """Several for hybrids."""
    positions: Positions | Absent
    records: tuple[Mapping[str, Any], ...]
    """What a run measured while it trained; empty where the model is no run's."""
    images: tuple[Shown, ...] = ()
    images_from: str = "none"
    """What they are, in words: "the two photographs inside scikit-learn"."""
    measured_on: str = "none"
    """What distance and CKA were measured on, in words: "128 images of photos"."""
    distance: Distance | Absent = NO_IMAGES
    attention: Attention | Absent = NO_IMAGES
    tokens: Tokens | Absent = NO_IMAGES
    layers: Layers | Absent = NO_IMAGES
