"""Shares of data with another task than labels: strata may be single images."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import hold_out, take_share
from vitrail.tasks.tags import Tags


def tagged(tags: list[str]) -> AnnotatedSource:
    images = [(f"{index}.png", 0) for index in range(len(tags))]
    task = Tags.learn({"tags": tags})
    return AnnotatedSource(ListSource(images), task, [{"tags": each} for each in tags])


@given(count=st.integers(2, 60), share=st.floats(0.01, 0.99), seed=st.integers(0, 9))
def test_images_with_a_tag_of_their_own_are_held_out_too(count, share, seed):
    rest, out = hold_out(tagged([f"own{index}|all" for index in range(count)]), share, seed)
    assert len(out) == min(max(round(count * share), 1), count - 1)
    assert sorted([*rest.indices, *out.indices]) == list(range(count))


@pytest.mark.parametrize("seed", range(3))
def test_every_common_tag_has_its_share(seed):
    source = tagged([f"tag{index % 4}" for index in range(200)])
    _, out = hold_out(source, 0.2, seed)
    counts = np.bincount(source.strata(0, 200)[out.indices])
    assert counts.sum() == 40
    assert counts.min() >= 8


def test_smaller_shares_are_parts_of_larger_ones():
    source = tagged([f"own{index}|tag{index % 3}" for index in range(90)])
    shares = [set(take_share(source, share, 5).indices) for share in (0.05, 0.1, 0.3, 0.7, 1.0)]
    assert [len(share) for share in shares] == [4, 9, 27, 63, 90]
    assert all(small < large for small, large in itertools.pairwise(shares))
