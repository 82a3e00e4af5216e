"""How well clusters of features agree with the classes: k-means on frozen features, without labels.

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
"""Random starts of k-means; the best counts."""


@dataclass(frozen=True)
class ClusterAgreement:
    """How well clusters agree with classes. All measures are 1 if the groups are the same."""

    accuracy: float
    """Accuracy under the best one-to-one naming of clusters by classes."""
    nmi: float
    """Normalised mutual information, from 0 to 1: divided by the mean of the two entropies."""
    ari: float
    """Adjusted Rand index: 0 for chance, negative if worse than chance."""


def cluster_features(values: Tensor, number: int, seed: int = 0) -> Tensor:
    """(N, D) features → (N,) int64: the cluster of each image, by k-means on features of length 1."""
    if not 1 <= number <= len(values):
        raise ConfigError(f"{len(values)} images cannot be put into {number} clusters: give a number from 1 to that")
    from sklearn.cluster import KMeans

    points = torch.nn.functional.normalize(values.double(), dim=1).cpu().numpy()
    with warnings.catch_warnings():
        # With fewer different images than clusters some clusters are empty, which is no error.
        warnings.filterwarnings("ignore", message="Number of distinct clusters")
        assigned = KMeans(number, n_init=STARTS, random_state=seed).fit_predict(points)
    return torch.from_numpy(assigned.astype(np.int64))


def measure_agreement(assigned: Tensor, labels: Tensor) -> ClusterAgreement:
    """Compare (N,) clusters with (N,) labels; their numbers may differ."""
    if not len(labels):
        raise ConfigError("there are no images whose clusters could be compared with their classes")
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

    clusters, classes = assigned.cpu().numpy(), labels.cpu().numpy()
    nmi = float(normalized_mutual_info_score(classes, clusters))
    return ClusterAgreement(assignment_accuracy(assigned, labels), nmi, float(adjusted_rand_score(classes, clusters)))


def assignment_accuracy(assigned: Tensor, labels: Tensor) -> float:
    """Return the share of images whose cluster has the name of their class, under the best one-to-one naming.

    If there are more clusters than classes, some clusters have no name, and their images count as wrong.
    """
    from scipy.optimize import linear_sum_assignment

    _, rows = np.unique(assigned.cpu().numpy(), return_inverse=True)
    _, columns = np.unique(labels.cpu().numpy(), return_inverse=True)
    counts = np.zeros((rows.max() + 1, columns.max() + 1), dtype=np.int64)
    np.add.at(counts, (rows, columns), 1)
    return float(counts[linear_sum_assignment(counts, maximize=True)].sum() / len(rows))
