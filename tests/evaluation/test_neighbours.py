"""Nearest neighbours against all pairs in float64, with many that are equally near."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import neighbours
from vitrail.evaluation.features import Features
from vitrail.evaluation.neighbours import find_nearest, predict_knn, score_knn


def made(values, labels) -> Features:
    labels = torch.as_tensor(labels)
    return Features(torch.as_tensor(values).float(), labels, torch.arange(len(labels)))


def by_brute_force(queries, bank, k):
    """Every cosine in turn, then an order by (similarity to nine digits, place)."""
    similarities, places = [], []
    for query in queries.double().numpy():
        row = []
        for place, other in enumerate(bank.double().numpy()):
            length = np.sqrt((query**2).sum()) * np.sqrt((other**2).sum())
            row.append((-np.round((query * other).sum() / length if length else 0.0, 9), place))
        similarities.append([-similarity for similarity, _ in sorted(row)[:k]])
        places.append([place for _, place in sorted(row)[:k]])
    return np.array(similarities), np.array(places)


# Few different values: many rows are equal, parallel or zero.
rows = st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=30)


@given(rows, rows, st.integers(1, 8), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_equals_brute_force_whatever_the_blocks(queries, bank, k, query_block, bank_block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours, "QUERIES", query_block)
        patch.setattr(neighbours, "BANK", bank_block)
        similarities, places = find_nearest(torch.tensor(queries), torch.tensor(bank), k)
    expected, where = by_brute_force(torch.tensor(queries), torch.tensor(bank), k)
    np.testing.assert_array_equal(places, where)
    np.testing.assert_allclose(similarities, expected, rtol=0, atol=1.1e-9)


def test_equals_brute_force_on_features():
    generator = torch.Generator().manual_seed(0)
    queries, bank = torch.randn(30, 40, generator=generator), torch.randn(200, 40, generator=generator)
    bank[100:150] = bank[:50]  # doubles
    similarities, places = find_nearest(queries, bank, 12)
    expected, where = by_brute_force(queries, bank, 12)
    np.testing.assert_array_equal(places, where)
    np.testing.assert_allclose(similarities, expected, rtol=0, atol=1.1e-9)


def test_an_image_is_its_own_nearest():
    bank = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    similarities, places = find_nearest(3 * bank, bank, 1)
    assert torch.equal(places[:, 0], torch.arange(50))
    assert torch.equal(similarities, torch.ones(50, 1, dtype=torch.float64))


def test_memory_is_bounded(monkeypatch):
    """No product is larger than a block of queries with a block of the bank."""
    seen = []
    unit = neighbours._normalise

    def watched(values):
        seen.append(len(values))
        return unit(values)

    monkeypatch.setattr(neighbours, "_normalise", watched)
    monkeypatch.setattr(neighbours, "QUERIES", 100)
    monkeypatch.setattr(neighbours, "BANK", 200)
    find_nearest(torch.randn(450, 4), torch.randn(1000, 4), 3)
    assert max(seen) == 200
    assert sorted(set(seen)) == [50, 100, 200]


def test_votes_by_hand():
    """Two of class 1 at 60° against one of class 0 at 0°: exp(½/T)·2 > exp(1/T) only for T > 1/(2·ln 2) = 0.72."""
    train = made([[1.0, 0.0], [0.5, 0.75**0.5], [0.5, 0.75**0.5]], [0, 1, 1])
    query = torch.tensor([[1.0, 0.0]])
    assert predict_knn(train, query, 2, k=3, temperature=0.70).tolist() == [0]
    assert predict_knn(train, query, 2, k=3, temperature=0.74).tolist() == [1]
    assert predict_knn(train, query, 2, k=3, temperature=1e-6).tolist() == [0], "nothing overflows"
    assert predict_knn(train, query, 2, k=1, temperature=0.74).tolist() == [0]


@given(st.integers(0, 10_000), st.integers(1, 25), st.sampled_from([0.07, 0.5]))
@settings(max_examples=40, deadline=None)
def test_accuracy_equals_voting_in_a_loop(seed, k, temperature):
    rng = np.random.default_rng(seed)
    train = made(rng.normal(size=(20, 3)), rng.integers(0, 4, 20))
    test = made(rng.normal(size=(15, 3)), rng.integers(0, 4, 15))
    hits = 0
    similarities, places = by_brute_force(test.values, train.values, k)
    for row, around, label in zip(similarities, places, test.labels.tolist(), strict=True):
        votes = np.zeros(4)
        for similarity, place in zip(row, around, strict=True):
            votes[train.labels[place]] += np.exp(similarity / temperature)
        hits += int(votes.argmax() == label)
    assert score_knn(train, test, 4, k, temperature) == hits / 15


def test_what_cannot_be():
    train = made(torch.eye(3), [0, 1, 2])
    with pytest.raises(ConfigError, match="k = 0"):
        find_nearest(train.values, train.values, 0)
    with pytest.raises(ConfigError, match="temperature = 0"):
        score_knn(train, train, 3, temperature=0)
    with pytest.raises(DataError, match="search"):
        find_nearest(train.values, train.values[:0], 1)
    with pytest.raises(DataError, match="test on"):
        score_knn(train, train[:0], 3)
