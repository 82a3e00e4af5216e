"""How well groups that nobody named agree with the classes: k-means on frozen representations.

Shapes: N images, D features.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError

STARTS = 10
"""Of k-means, of which the best counts."""


@dataclass(frozen=True)
class Agreement:
    """Of clusters with classes. All are 1 where they are the same but for their names."""

    accuracy: float
    """With each cluster named after one class and each class given to one cluster, as well as it can be."""
    nmi: float
    """Normalised mutual information, from 0; over the mean of the two entropies."""
    ari: float
    """Adjusted Rand index: 0 for chance, and below it negative."""


def clusters(values: Tensor, number: int, seed: int = 0) -> Tensor:
    """(N, D) features → (N,) int64: the cluster of each, by k-means on features of length 1."""
    if not 1 <= number <= len(values):
        raise ConfigError(f"{len(values)} images cannot be put into {number} clusters: give a number from 1 to that")
    from sklearn.cluster import KMeans

    points = torch.nn.functional.normalize(values.double(), dim=1).cpu().numpy()
    with warnings.catch_warnings():
        # Fewer different images than clusters leave some empty, which is no fault.
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        assigned = KMeans(number, n_init=STARTS, random_state=seed).fit_predict(points)
    return torch.from_numpy(assigned.astype(np.int64))


def agreement(assigned: Tensor, labels: Tensor) -> Agreement:
    """(N,) clusters and (N,) labels; there may be more of the ones than of the others."""
    if not len(labels):
        raise ConfigError("there are no images whose clusters could be compared with their classes")
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    ours, theirs = assigned.cpu().numpy(), labels.cpu().numpy()
    nmi = float(normalized_mutual_info_score(theirs, ours))
    return Agreement(assignment_accuracy(assigned, labels), nmi, float(adjusted_rand_score(theirs, ours)))


def assignment_accuracy(assigned: Tensor, labels: Tensor) -> float:
    """The share of images whose cluster is named after their class, under the best naming of one by one.

    Where there are more clusters than classes, some have no name, and their images count as wrong.
    """
    from scipy.optimize import linear_sum_assignment

    _, rows = np.unique(assigned.cpu().numpy(), return_inverse=True)
    _, columns = np.unique(labels.cpu().numpy(), return_inverse=True)
    counts = np.zeros((rows.max() + 1, columns.max() + 1), dtype=np.int64)
    np.add.at(counts, (rows, columns), 1)
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(rows))
