"""What was measured inside a model: numbers only, before anything is drawn.

A part that a model does not have is an `Absent`, which says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vitrail.evaluation.report import EvaluationReport
    from vitrail.evaluation.task_report import TaskReport
    from vitrail.tasks.task import AnswerLine

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Absent:
    """Stands in place of a part that a model does not have."""

    why: str
    """A sentence for the reader of the report, without a full stop."""


NO_IMAGES = Absent("there were no images to measure it on")


@dataclass(frozen=True)
class ShownImage:
    """An image that the report shows."""

    name: str
    pixels: NDArray[np.uint8]
    """(height, width, 1 or 3): what the model saw, before it was normalised."""
    guesses: tuple[tuple[str, float], ...]
    """Labels with their probabilities, the best first; none for a model without classes, or with another task."""
    answer: tuple[AnswerLine, ...] = ()
    """What a model with another task than one label says."""


@dataclass(frozen=True)
class ScoredPhoto:
    """A photo with its label and what the model takes it for, small enough for the page."""

    name: str
    pixels: NDArray[np.uint8]
    """(height, width, 1 or 3): the whole photo, upright."""
    label: str
    guess: str
    probability: float
    """Of the guess."""


@dataclass(frozen=True)
class AnsweredPhoto:
    """A photo with what a model answers and what is true, small enough for the page."""

    name: str
    pixels: NDArray[np.uint8]
    """(height, width, 1 or 3): the whole photo, upright."""
    answer: tuple[AnswerLine, ...]
    truth: str


@dataclass(frozen=True)
class TaskScores:
    """How good a model with another task than one label is."""

    report: TaskReport
    remark: str
    """Which images these are."""
    photos: tuple[AnsweredPhoto, ...]
    """The worst answers, the worst first."""


@dataclass(frozen=True)
class Scores:
    """How good a model is on labelled images."""

    report: EvaluationReport
    remark: str
    """Which images these are, in words."""
    mistakes: tuple[ScoredPhoto, ...]
    """The surest first."""
    doubtful: tuple[ScoredPhoto, ...] = ()
    """Photos whose label may be wrong, the most doubtful first."""
    all_doubtful: int = 0
    """The number of all such images; the page shows the first of them."""


@dataclass(frozen=True)
class Filters:
    """Figure 7, left: principal components of the filters of an embedding."""

    of: str
    """The layer of the filters: the patch embedding, the root convolution, …"""
    components: Array
    """(components, height, width, channels), each of length 1."""
    explained: Array
    """(components,): the share of the variance that each explains."""


@dataclass(frozen=True)
class Neighbours:
    """Whether patches that touch have more similar embeddings than others."""

    near: float
    """Mean similarity of 4-neighbours."""
    far: float
    """Mean similarity of all other pairs."""
    p_value: float
    """p-value of a permutation test: how often randomly placed patches differ as much."""
    permutations: int


@dataclass(frozen=True)
class Positions:
    """Figure 7, centre: cosine similarity of position embeddings."""

    kind: str
    """learned-1d, …"""
    similarity: Array
    """(rows, columns, rows, columns)."""
    neighbours: Neighbours | None
    """None if the grid is too small for a test."""

    @property
    def learned(self) -> bool:
        """Whether neighbours had to be learned; in all other kinds of table they are alike by construction."""
        return self.kind.startswith("learned-1d")


@dataclass(frozen=True)
class Distance:
    """Figure 7, right: mean attention distance."""

    layers: tuple[str, ...]
    pixels: Array
    """(layers, heads), in pixels; NaN for a head that never attends to patches."""
    image_size: tuple[int, int]
    """Height and width in pixels, as a scale for the distances."""
    images: int


@dataclass(frozen=True)
class Attention:
    """Figures 6 and 14, for each image that is shown, up to each layer; and the attention of each head."""

    layers: tuple[str, ...]
    rollout: Array
    """(images, layers, rows, columns): the share of each patch in the representation, up to each layer."""
    rollout_prefix: Array
    """(images, layers, prefix): the share of each token that is no patch. All shares together sum to 1."""
    heads: Array
    """(images, layers, heads, rows, columns): what the tokens behind the representation attend to."""
    heads_prefix: Array
    """(images, layers, heads, prefix)."""
    prefix: tuple[str, ...]
    """The names of tokens that are no patch."""
    reads: str
    """Whose attention it is: the class token, the mean of the patches, …"""


@dataclass(frozen=True)
class Components:
    """Principal components of the patches' features, over all shown images together."""

    values: Array
    """(images, rows, columns, components), each around 0; zeros for components that the features do not have."""
    explained: Array
    """(components,): the share of the variance that each explains."""


@dataclass(frozen=True)
class Tokens:
    """How similar the state of one patch is to the states of the others, by layer, for each shown image."""

    layers: tuple[str, ...]
    similarity: tuple[Array, ...]
    """For each layer (images, rows, columns, rows, columns) of cosine similarities. Grids may differ between layers
    and may be coarser than the layer's own: on a fine grid, blocks of patches are averaged first."""


@dataclass(frozen=True)
class Layers:
    """How alike the representations of layers are, by linear CKA."""

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
    """The name in the report, which strangers may read: no path of this machine."""
    facts: tuple[tuple[str, str], ...]
    """Name and value of each row of its card: size, preprocessing, classes, …"""
    card: str
    """The text of the model card beside the weights; "" if there is none."""
    filters: tuple[Filters, ...] | Absent
    """Several for hybrids."""
    positions: Positions | Absent
    records: tuple[Mapping[str, Any], ...]
    """The measurements of the run that trained the model; () if it is not known."""
    images: tuple[ShownImage, ...] = ()
    images_from: str = "none"
    """Where the images come from, in words: "the two photographs inside scikit-learn"."""
    measured_on: str = "none"
    """The images behind distance and CKA, in words: "128 images of photos"."""
    distance: Distance | Absent = NO_IMAGES
    attention: Attention | Absent = NO_IMAGES
    components: Components | Absent = NO_IMAGES
    tokens: Tokens | Absent = NO_IMAGES
    layers: Layers | Absent = NO_IMAGES
    scores: Scores | TaskScores | None = None
    """How good the model is; None if it was not measured."""
