"""A share of the training images: nested, of every class, and the same in any order and any place."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import make_folder, make_tar

from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import Source, hold_out, take_share
from vitrail.errors import ConfigError

SHARES = st.floats(0.001, 1)
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def make_source(sizes: list[int], order: np.random.Generator | None = None) -> ListSource:
    """So many paths of each class, which need not exist; perhaps in a random order."""
    pairs = [(f"{label}/{number}.jpg", label) for label, size in enumerate(sizes) for number in range(size)]
    return ListSource([pairs[int(place)] for place in order.permutation(len(pairs))] if order else pairs)


def names(source: Source) -> list[str]:
    return [source.identity(index) for index in range(len(source))]


def is_enough(sizes: list[int], share: float) -> bool:
    return min(sizes) * share >= 0.5


@given(sizes=SIZES, one=SHARES, other=SHARES, seed=st.integers(-(2**63), 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_shares_are_nested_and_have_their_part_of_every_class(sizes, one, other, seed):
    small, large = sorted((one, other))
    if not is_enough(sizes, small):
        return
    source = make_source(sizes)
    parts = [take_share(source, share, seed) for share in (small, large)]
    assert set(names(parts[0])) <= set(names(parts[1])) <= set(names(source))
    for share, part in zip((small, large), parts, strict=True):
        counts = Counter(part.labels(0, len(part)).tolist())
        assert all(abs(counts[label] - size * share) <= 0.5 and counts[label] for label, size in enumerate(sizes))
    assert len(set(names(parts[1]))) == len(parts[1])


@given(sizes=SIZES, share=SHARES, seed=st.integers(0, 2**32), order=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_the_order_does_not_matter(sizes, share, seed, order):
    if not is_enough(sizes, share):
        return
    mixed = make_source(sizes, np.random.default_rng(order))
    assert set(names(take_share(mixed, share, seed))) == set(names(take_share(make_source(sizes), share, seed)))
    assert names(take_share(mixed, 1, seed)) == names(mixed), "everything, in its own order"


@given(sizes=SIZES, share=st.floats(1e-6, 0.1))
@settings(max_examples=100, deadline=None)
def test_a_share_that_empties_a_class_is_refused_with_one_that_is_enough(sizes, share):
    source = make_source(sizes)
    if is_enough(sizes, share):
        assert len(set(take_share(source, share, 0).labels(0, len(source)).tolist())) == len(sizes)
        return
    with pytest.raises(ConfigError) as refused:
        take_share(source, share, 0)
    assert f"'{int(np.argmin(sizes))}'" in str(refused.value)
    (least,) = re.findall(r"give (\S+) or more", str(refused.value))
    assert take_share(source, float(least), 0)
    assert float(least) <= 0.5 / min(sizes) + 2e-6, "no more than is needed"


def test_the_seed_chooses_and_the_place_does_not(tmp_path):
    for place in ("a", "b"):
        make_folder(tmp_path / place, {"cat": 40, "dog": 20})
    first, second = (take_share(open_data(tmp_path / place), 0.25, 0) for place in ("a", "b"))
    assert names(first) == names(second)
    assert np.bincount(first.labels(0, len(first))).tolist() == [10, 5]
    assert set(names(take_share(open_data(tmp_path / "a"), 0.25, 1))) != set(names(first))


def test_a_share_is_chosen_apart_from_what_is_held_out(tmp_path):
    """With the same order for both, a share of all images would begin with those that are held out."""
    source = make_source([200])
    _, held = hold_out(source, 0.1, 0)
    part = take_share(source, 0.1, 0)
    assert set(names(part)) != set(names(held))


def test_a_class_is_named_and_images_without_a_label_are_a_group(tmp_path):
    make_folder(tmp_path / "photos", {"cat": 100, "a rare bird": 3})
    with pytest.raises(ConfigError, match=r"'a rare bird', which has 3 to train on: give 0\.166667 or more"):
        take_share(open_data(tmp_path / "photos"), 0.1, 0)
    assert len(take_share(open_data(tmp_path / "photos"), 0.166667, 0)) == 18
    unlabelled = open_data(make_tar(tmp_path / "a.tar", [0] * 5))
    assert len(take_share(unlabelled, 0.4, 0)) == 2


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan")])
def test_what_is_no_share(share):
    with pytest.raises(ConfigError, match="above 0, and at most 1"):
        take_share(make_source([5]), share, 0)
