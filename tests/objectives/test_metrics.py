"""Sums and counts against loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.objectives.metrics import add_sums, compute_means, find_hits, sum_and_count, sum_by_class

finite = st.floats(-1e6, 1e6, width=32)
pairs = st.lists(st.tuples(finite, st.booleans()), max_size=40)


@settings(deadline=None)
@given(pairs)
def test_sum_and_count_are_loops_in_float64(samples):
    values = torch.tensor([value for value, _ in samples], dtype=torch.float32)
    mask = torch.tensor([kept for _, kept in samples], dtype=torch.bool)
    everything, chosen = sum_and_count(values), sum_and_count(values, mask)
    assert everything.shape == chosen.shape == (2,)
    assert everything.dtype == chosen.dtype == torch.float64
    assert everything.tolist() == pytest.approx([math.fsum(v for v, _ in samples), len(samples)], abs=1e-7)
    kept = [value for value, is_kept in samples if is_kept]
    assert chosen.tolist() == pytest.approx([math.fsum(kept), len(kept)], abs=1e-7)


def test_what_is_masked_does_not_count_whatever_it_is():
    values = torch.tensor([1.0, math.nan, math.inf, 4.0])
    assert sum_and_count(values, torch.tensor([True, False, False, True])).tolist() == [5, 2]
    assert math.isnan(sum_and_count(values)[0])


def test_any_type_and_shape():
    assert sum_and_count(torch.tensor([[True, False], [True, True]])).tolist() == [3, 4]
    assert sum_and_count(torch.full((1000,), 0.1, dtype=torch.bfloat16)).tolist() == [
        pytest.approx(1000 * float(torch.tensor(0.1, dtype=torch.bfloat16))),
        1000,
    ]
    tracked = torch.ones(3, requires_grad=True)
    assert not sum_and_count(tracked * 2).requires_grad


def test_counts_stay_whole_beyond_float32():
    total = {"loss": torch.tensor([0.0, 2.0**24], dtype=torch.float64)}
    add_sums(total, {"loss": sum_and_count(torch.ones(1))})
    assert total["loss"].tolist() == [1, 2**24 + 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), pairs, max_size=3), max_size=5))
def test_means_over_batches_are_means_over_samples(batches):
    total, samples = {}, {}
    for batch in batches:
        sums = {}
        for name, found in batch.items():
            values, mask = torch.tensor([v for v, _ in found]), torch.tensor([k for _, k in found], dtype=torch.bool)
            sums[name] = sum_and_count(values, mask)
            samples.setdefault(name, []).extend(value for value, kept in found if kept)
        before = {name: pair.clone() for name, pair in sums.items()}
        add_sums(total, sums)
        assert all(torch.equal(pair, before[name]) for name, pair in sums.items())  # only the total changes
    result = compute_means(total)
    assert result.keys() == samples.keys()
    for name, values in samples.items():
        if values:
            assert result[name] == pytest.approx(math.fsum(values) / len(values), abs=1e-6, rel=1e-9)
        else:
            assert math.isnan(result[name])


def test_a_total_is_not_its_first_batch():
    first = {"loss": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    total = {}
    add_sums(total, first)
    add_sums(total, {"loss": torch.tensor([2.0, 1.0], dtype=torch.float64)})
    assert first["loss"].tolist() == [1, 1]
    assert total["loss"].tolist() == [3, 2]
    assert compute_means({}) == {}


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_hits_are_a_loop_over_ranks(classes, k, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(classes, generator=generator) for _ in range(6)]).float()  # no ties
    labels = torch.randint(classes, (6,), generator=generator)
    found = find_hits(logits, labels, k)
    assert (found.shape, found.dtype) == ((6,), torch.bool)
    for row, label, hit in zip(logits.tolist(), labels.tolist(), found.tolist(), strict=True):
        rank = sum(other > row[label] for other in row)
        assert hit == (rank < k)


def test_hits_worked_by_hand():
    logits = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.3, 0.3001, 0.0]])
    labels = torch.tensor([1, 1, 2])
    assert find_hits(logits, labels).tolist() == [True, False, False]
    assert find_hits(logits, labels, 2).tolist() == [True, True, False]
    assert find_hits(logits, labels, 3).tolist() == find_hits(logits, labels, 9).tolist() == [True] * 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(-1, 4), st.booleans(), st.booleans()), max_size=20), max_size=4))
def test_a_mean_over_classes_leaves_out_those_that_were_not_seen(batches):
    total = {"plain": torch.zeros(2, dtype=torch.float64), "classes": torch.zeros(2, 5, dtype=torch.float64)}
    for batch in batches:
        classes = torch.tensor([c for c, _, _ in batch], dtype=torch.long)
        hits, mask = (torch.tensor([row[at] for row in batch], dtype=torch.bool) for at in (1, 2))
        add_sums(total, {"plain": sum_and_count(hits, mask), "classes": sum_by_class(hits, classes, 5, mask)})
    rows = [(c, hit) for batch in batches for c, hit, kept in batch if kept]
    means = [[hit for c, hit in rows if c == one] for one in range(5)]
    expected = [sum(hits) / len(hits) for hits in means if hits]
    found = compute_means(total)
    assert found["classes"] == pytest.approx(sum(expected) / len(expected) if expected else math.nan, nan_ok=True)
    assert found["plain"] == pytest.approx(sum(h for _, h in rows) / len(rows) if rows else math.nan, nan_ok=True)
