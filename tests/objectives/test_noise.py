"""Noise: against the same hash in Python's whole numbers, and as random as it claims to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.data.order import derive_seed
from vitrail.objectives.noise import draw_integers, draw_uniform, draw_words

SAMPLES, COLUMNS = 1000, 500
WORD = (1 << 64) - 1
RARE = 1e-4


def scrambled(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & WORD
    return value ^ value >> 31


def word(key: int, sample: int, column: int) -> int:
    """Unsigned, without torch."""
    start = scrambled((sample & WORD) ^ derive_seed(key))
    return scrambled(scrambled((start + (column + 1) * 0x9E3779B97F4A7C15) & WORD))


KEYS = st.integers(-(2**63), 2**64 - 1)
NUMBERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5)


@given(key=KEYS, samples=NUMBERS, count=st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_words_are_those_of_whole_numbers_without_end(key, samples, count):
    expected = [[word(key, sample, column) for column in range(count)] for sample in samples]
    numbers = torch.tensor(samples)
    assert [[value & WORD for value in row] for row in draw_words(key, numbers, count).tolist()] == expected
    assert draw_uniform(key, numbers, count).tolist() == [[(value >> 40) / 2**24 for value in row] for row in expected]
    below = 1 + key % 1000
    assert draw_integers(key, numbers, count, below).tolist() == [
        [(value >> 32) * below >> 32 for value in row] for row in expected
    ]


def test_a_checkpoint_of_an_older_version_finds_the_same_noise():
    found = draw_words(7, torch.tensor([0, 1, -1]), 2)
    assert found.tolist() == [
        [2016455300437792279, -327918969232452952],
        [1613066426726188855, 6632122437171863153],
        [-1231915093332136247, -4709767395475141227],
    ]


@given(key=KEYS, samples=NUMBERS, count=st.integers(2, 6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_however_it_is_cut(key, samples, count, data):
    """Fewer columns, fewer samples, another order: the number of a place is its own."""
    numbers = torch.tensor(samples)
    whole = draw_uniform(key, numbers, count)
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))))
    assert torch.equal(draw_uniform(key, numbers[order], count), whole[order])
    assert torch.equal(draw_uniform(key, numbers, count - 1), whole[:, :-1])
    assert torch.equal(torch.cat([draw_uniform(key, number[None], count) for number in numbers]), whole)


def test_range_and_type():
    drawn = draw_uniform(3, torch.arange(SAMPLES), COLUMNS)
    assert drawn.dtype == torch.float32
    assert 0 <= drawn.min() < 1e-4
    assert 1 - 1e-4 < drawn.max() < 1
    assert draw_integers(3, torch.arange(10), 20, 0).eq(0).all()
    assert draw_integers(3, torch.arange(10), 20, 1).eq(0).all()


# Kinds of sample numbers and keys that are anything but random themselves.
KINDS = {
    "counted": (0, torch.arange(SAMPLES)),
    "far": (1, torch.arange(SAMPLES) + 2**40),
    "strides": (2**63, torch.arange(SAMPLES) * 2**20),
    "negative": (WORD, -torch.arange(1, SAMPLES + 1)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_uniform(kind):
    key, samples = KINDS[kind]
    drawn = draw_uniform(key, samples, COLUMNS).double().numpy()
    draws = drawn.size
    assert abs(drawn.mean() - 1 / 2) < 4 * np.sqrt(1 / 12 / draws)
    assert abs(drawn.var() - 1 / 12) < 4 * np.sqrt(1 / 180 / draws)  # E[(x − 1/2)⁴] − 1/144 = 1/180
    for bits in (drawn, drawn * 2**12 % 1):  # the upper half of the 24 bits, and the lower
        counts = np.bincount((bits * 256).astype(np.int64).ravel(), minlength=256)
        assert stats.chisquare(counts).pvalue > RARE
    # Every row and every column by itself, too: none is much lower or higher than chance allows.
    assert np.abs(drawn.mean(axis=1) - 1 / 2).max() < 5 * np.sqrt(1 / 12 / COLUMNS)
    assert np.abs(drawn.mean(axis=0) - 1 / 2).max() < 5 * np.sqrt(1 / 12 / SAMPLES)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_know_nothing_of_each_other(kind):
    key, samples = KINDS[kind]
    drawn = draw_uniform(key, samples, COLUMNS).double().numpy()
    neighbours = {
        "columns": (drawn[:, :-1], drawn[:, 1:]),
        "samples": (drawn[:-1], drawn[1:]),
        "keys": (drawn, draw_uniform(key + 1, samples, COLUMNS).double().numpy()),
        "samples of neighbouring keys": (drawn[1:], draw_uniform(key + 1, samples, COLUMNS).double().numpy()[:-1]),
    }
    for name, (first, second) in neighbours.items():
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(first.size), name
        pairs = (first * 16).astype(np.int64) * 16 + (second * 16).astype(np.int64)
        assert stats.chisquare(np.bincount(pairs.ravel(), minlength=256)).pvalue > RARE, name


def test_one_changed_bit_changes_half_of_all():
    """Of the sample's number or the key, whichever bit it is."""
    start = draw_words(5, torch.tensor([12345]), 50)
    for bit in range(63):
        for other in (
            draw_words(5, torch.tensor([12345 ^ 1 << bit]), 50),
            draw_words(5 ^ 1 << bit, torch.tensor([12345]), 50),
        ):
            flipped = sum(bin(value & WORD).count("1") for value in (start ^ other).view(-1).tolist())
            assert abs(flipped - 1600) < 5 * np.sqrt(800)  # 3,200 coins


def test_integers_are_equally_likely():
    for below in (2, 3, 7, 195):
        drawn = draw_integers(9, torch.arange(SAMPLES), 100, below)
        assert stats.chisquare(np.bincount(drawn.view(-1).numpy(), minlength=below)).pvalue > RARE
        assert drawn.max() == below - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_bits():
    for key, samples in KINDS.values():
        assert torch.equal(draw_words(key, samples.cuda(), COLUMNS).cpu(), draw_words(key, samples, COLUMNS))
        assert torch.equal(draw_uniform(key, samples.cuda(), COLUMNS).cpu(), draw_uniform(key, samples, COLUMNS))
        assert torch.equal(
            draw_integers(key, samples.cuda(), COLUMNS, 195).cpu(), draw_integers(key, samples, COLUMNS, 195)
        )
