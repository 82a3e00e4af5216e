"""The order of samples: permutations that are computed, not stored."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.order import Order, derive_seed, permute


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_permuted_is_a_permutation_and_its_inverse_undoes_it(count, key):
    everything = np.arange(count)
    found = permute(everything, count, key)
    assert np.array_equal(np.sort(found), everything)
    assert np.array_equal(permute(found, count, key, inverse=True), everything)


@given(
    count=st.integers(1, 700),
    block=st.integers(1, 90),
    window=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_every_epoch_holds_every_sample_once(count, block, window, seed, epoch):
    epochs, indices = Order(count, seed, block, window)(np.arange(epoch * count, (epoch + 1) * count))
    assert set(epochs.tolist()) == {epoch}
    assert np.array_equal(np.sort(indices), np.arange(count))


@given(count=st.integers(1, 500), block=st.integers(1, 50), start=st.integers(0, 2000), length=st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_a_stretch_is_the_same_however_it_is_cut(count, block, start, length):
    """Also across the end of an epoch."""
    order, positions = Order(count, 3, block, 4 * block), np.arange(start, start + length)
    together = np.stack(order(positions))
    alone = np.concatenate([np.stack(order(positions[i : i + 1])) for i in range(length)], axis=1)
    assert np.array_equal(together, alone)


@pytest.mark.slow
def test_all_permutations_of_few_are_equally_likely():
    found = Counter(tuple(permute(np.arange(4), 4, key).tolist()) for key in range(24_000))
    assert len(found) == 24
    assert stats.chisquare(list(found.values())).pvalue > 1e-4


@pytest.mark.slow
def test_each_place_gets_each_sample_equally_often():
    """Over epochs, with and without blocks, on a number that no block divides."""
    for block, window in ((1, 1), (4, 16)):
        order, count = Order(50, 1, block, window), 50
        seen = np.zeros((count, count))
        for epoch in range(1500):
            _, indices = order(np.arange(epoch * count, (epoch + 1) * count))
            seen[np.arange(count), indices] += 1
        # The short last block makes places near the end a little unlike; a tenth is far beyond that and chance.
        assert np.abs(seen.mean(axis=0) - 30).max() < 1e-9
        assert stats.chisquare(seen[3]).pvalue > 1e-6


def test_seeds_and_epochs_differ():
    orders = {
        (seed, epoch): Order(1000, seed)(np.arange(epoch * 1000, (epoch + 1) * 1000))[1]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    for first, second in pairwise(orders.values()):
        assert (first == second).mean() < 0.02


def test_blocks_are_read_in_strides():
    """Within a window samples come from few blocks, however many there are."""
    order = Order(10**9, 0, block=64, window=4096)
    _, indices = order(np.arange(40_960, 45_056))
    assert len(np.unique(indices // 64)) == 64
    assert len(np.unique(indices)) == 4096
    batch = order(np.arange(40_960, 40_960 + 256))[1]
    assert len(np.unique(batch // 64)) > 50  # and yet a batch is not made of neighbours


@pytest.mark.parametrize("count", [10, 10**12])
def test_memory_does_not_grow_with_the_number_of_samples(count):
    positions = np.arange(1000)
    tracemalloc.start()
    Order(count, 0)(positions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000


def test_mixed_depends_on_every_value_and_their_order():
    found = {derive_seed(*values) for values in [(), (0,), (0, 0), (1, 0), (0, 1), (2**40, 1), (1, 2**40), (-1,)]}
    assert len(found) == 8
    assert all(0 <= value < 2**64 for value in found)
    flips = [bin(derive_seed(7, 1) ^ derive_seed(7, 1 ^ (1 << bit))).count("1") for bit in range(64)]
    assert 26 < np.mean(flips) < 38
