"""Clusters against classes, worked by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError
from vitrail.evaluation.clusters import assignment_accuracy, cluster_features, measure_agreement


def test_other_names_for_the_same_groups_are_perfect():
    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3])
    found = measure_agreement(torch.tensor([7, 7, 3, 3, 3, 0, 0, 5]), labels)
    assert (found.accuracy, found.ari) == (1, 1)
    assert found.nmi == pytest.approx(1)


def test_by_hand():
    """Clusters aabbb against classes 00011: two and two of five agree. Pairs: of the 4 in a class and the 4 in
    a cluster 2 are the same pairs, of all 10; expected are 4·4/10, so (2 − 1.6) / (4 − 1.6)."""
    assigned, labels = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    found = measure_agreement(assigned, labels)
    assert found.accuracy == 4 / 5
    assert found.ari == pytest.approx(0.4 / 2.4)
    entropy = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6))  # of both
    shares = {(0, 0): 0.4, (1, 0): 0.2, (1, 1): 0.4}
    clusters_share, classes_share = {0: 0.4, 1: 0.6}, {0: 0.6, 1: 0.4}
    information = sum(p * math.log(p / clusters_share[c] / classes_share[k]) for (c, k), p in shares.items())
    assert found.nmi == pytest.approx(information / entropy)


def test_more_clusters_than_classes_and_fewer():
    labels = torch.tensor([0, 0, 0, 0, 1, 1])
    assert assignment_accuracy(torch.tensor([0, 0, 1, 2, 3, 3]), labels) == 4 / 6, "two of class 0 have no name"
    assert assignment_accuracy(torch.zeros(6, dtype=torch.int64), labels) == 4 / 6, "one cluster has one name"
    assert assignment_accuracy(torch.arange(6), labels) == 2 / 6


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_equals_the_best_of_all_namings(pairs):
    assigned, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    best = max(sum(naming[cluster] == label for cluster, label in pairs) for naming in itertools.permutations(range(4)))
    assert assignment_accuracy(assigned, labels) == best / len(pairs)


def test_groups_in_plain_sight_are_found_by_direction():
    """Lengths tell nothing: the features of a class lie on a ray."""
    labels = torch.arange(60) % 3
    generator = torch.Generator().manual_seed(0)
    lengths = 1 + 99 * torch.rand(60, 1, generator=generator)
    values = (torch.eye(3)[labels] + 0.05 * torch.randn(60, 3, generator=generator)) * lengths
    found = cluster_features(values, 3, seed=0)
    assert measure_agreement(found, labels).accuracy == 1
    assert torch.equal(found, cluster_features(values, 3, seed=0)), "the seed decides"


def test_fewer_different_images_than_clusters():
    found = cluster_features(torch.eye(2).repeat(5, 1), 4)
    assert len(found) == 10
    assert set(found.tolist()) <= set(range(4))


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="5 clusters"):
        cluster_features(torch.eye(3), 5)
    with pytest.raises(ConfigError, match="no images"):
        measure_agreement(torch.empty(0), torch.empty(0))
