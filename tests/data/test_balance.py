"""Rare classes shown more often: so many times, evenly spread, and the same after a restart and on any ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.balance import balance_source, count_classes
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import add_task, open_data
from vitrail.data.order import Order
from vitrail.data.resident import ResidentLoader
from vitrail.data.sources.annotated import AnnotatedSource
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import Source
from vitrail.data.transforms.augment import Augmentation
from vitrail.errors import ConfigError
from vitrail.tasks.attributes import Attributes
from vitrail.tasks.levels import Levels
from vitrail.tasks.numbers import Numbers
from vitrail.tasks.tags import Tags

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=6)
SHARES = st.floats(0, 1)


def make_source(sizes: list[int]) -> ListSource:
    """So many paths of each class, which need not exist."""
    return ListSource([(f"{label}/{n}.jpg", label) for label, size in enumerate(sizes) for n in range(size)])


def make_pictures(sizes: list[int]) -> ListSource:
    """Images that can be told apart by their first pixel."""
    numbers = np.repeat(np.arange(len(sizes)), sizes)
    return ListSource([(np.full((8, 8, 3), place, np.uint8), int(label)) for place, label in enumerate(numbers)])


def names(source: Source) -> list[str]:
    return [source.identity(index) for index in range(len(source))]


@given(sizes=SIZES, share=SHARES)
@settings(max_examples=100, deadline=None)
def test_every_class_has_its_number_and_every_image_its_part(sizes, share):
    balanced = balance_source(make_source(sizes), share)
    assert [len(balanced)] == [sum(count_classes(balanced))]
    for size, count in zip(sizes, count_classes(balanced), strict=True):
        assert count == size + round(share * (max(sizes) - size))
    times = Counter(names(balanced))
    for label, size in enumerate(sizes):
        each = [times[f"{label}/{n}.jpg"] for n in range(size)]
        assert min(each) >= 1, "no image is left out"
        assert max(each) - min(each) <= 1, "and none is shown much more often than another"


def test_nothing_changes_without_a_share_and_for_equal_classes():
    source = make_source([20, 3])
    assert balance_source(source, 0) is source
    level = make_source([7, 7, 7])
    assert names(balance_source(level, 1)) == names(level)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(ConfigError, match="from 0"):
        balance_source(make_source([2, 1]), share)


def test_every_part_of_the_list_is_as_balanced_as_the_whole():
    sizes = [1000, 100, 10]
    shuffled = np.random.default_rng(0).permutation(sum(sizes))
    pairs = [(f"{n}.jpg", int(label)) for n, label in enumerate(np.repeat(np.arange(3), sizes)[shuffled])]
    balanced = balance_source(ListSource(pairs), 1)
    labels = balanced.labels(0, len(balanced))
    for start in range(0, 3000, 300):
        assert np.bincount(labels[start : start + 300], minlength=3).tolist() == pytest.approx([100] * 3, abs=35)


def test_the_choice_depends_on_names_and_not_on_their_order():
    sizes = [50, 30, 7]
    source = make_source(sizes)
    pairs = [(source.identity(n), int(source.labels(n, n + 1)[0])) for n in range(len(source))]
    mixed = ListSource([pairs[n] for n in np.random.default_rng(1).permutation(len(pairs))])
    assert Counter(names(balance_source(mixed, 0.6))) == Counter(names(balance_source(source, 0.6)))


def test_images_without_a_label_are_shown_once():
    class Unlabelled(ListSource):
        def labels(self, start, stop):
            labels = super().labels(start, stop).copy()
            labels[np.arange(start, stop) < 30] = -1
            return labels

    source = Unlabelled([(f"{n}.jpg", 0 if n < 38 else 1) for n in range(40)])
    times = Counter(names(balance_source(source, 1)))
    assert [times[f"{n}.jpg"] for n in range(30)] == [1] * 30
    assert [times["38.jpg"], times["39.jpg"]] == [4, 4], "eight of the other class have a label"


def test_a_task_with_strata_is_balanced_by_them():
    tags = [["cat"]] * 30 + [["dog"]] * 10
    task = Tags.learn({"tags": tags})
    images = ListSource([(f"{n}.jpg", 0) for n in range(len(tags))])
    rows = [{"tags": each} for each in tags]
    source = AnnotatedSource(images, task, rows, [f"line {n}" for n in range(len(tags))])
    balanced = balance_source(source, 1)
    assert balanced.task is source.task
    strata = balanced.strata(0, len(balanced))
    assert sorted(Counter(strata.tolist()).values()) == [30, 30]
    targets = balanced.targets(0, len(balanced))
    assert all(len(values) == 60 for values in targets.values())


# ---- The order has no state ------------------------------------------------------------------------------------------


def read(loader, batches: int) -> list[tuple[list[int], torch.Tensor]]:
    return [(batch.indices.tolist(), batch.images.clone()) for _, batch in zip(range(batches), loader, strict=False)]


OPTIONS = {"seed": 3, "augmentation": Augmentation(crop_area=(0.3, 1.0))}


@pytest.mark.parametrize(
    ("task", "cells"),
    [
        (Tags(names=("sky", "dog"), column="x"), ["sky", "sky", "dog", "", ""]),
        (Levels(names=("low", "high"), column="x"), ["low", "low", "high", "", "what"]),
        (Attributes(names=("x",), values=(("low", "high"),)), ["low", "low", "high", "", "what"]),
        (Numbers.learn({"x": [1, 1, 2]}), [1, 1, 2, "", "what"]),
    ],
)
def test_what_nothing_is_known_of_is_not_repeated(task, cells):
    pairs = [(np.full((8, 8, 3), place, np.uint8), {"x": cell}) for place, cell in enumerate(cells)]
    source = open_data(add_task(pairs, task))
    times = Counter(names(balance_source(source, 1)))
    assert [times[name] for name in names(source)] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("kind", ["read", "in memory", "on device"])
def test_restarts_and_ranks_see_the_same(kind):
    pictures = make_pictures([20, 6, 2])
    source = balance_source(InMemorySource(pictures) if kind == "in memory" else pictures, 1)
    assert len(source) == 60

    def load(**changes):
        if kind == "on device":
            return ResidentLoader(source, 12, 8, device="cpu", **OPTIONS, **changes)
        return TrainingLoader(source, 12, 8, **OPTIONS, **changes)

    whole = read(load(), 7)
    assert sorted(place for indices, _ in whole[:5] for place in indices) == list(range(60)), (
        "an epoch is the whole list"
    )
    again = read(load(position=36), 4)
    for (indices, images), (expected, pixels) in zip(again, whole[3:], strict=True):
        assert indices == expected
        assert torch.equal(images, pixels)
    parts = [read(load(rank=rank, ranks=3), 7) for rank in range(3)]
    for number, (indices, images) in enumerate(whole):
        assert [place for part in parts for place in part[number][0]] == indices
        assert torch.equal(torch.cat([part[number][1] for part in parts]), images)


def test_repetitions_of_an_image_are_augmented_each_in_its_own_way():
    rng = np.random.default_rng(0)
    pictures = ListSource([(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8), int(n == 8)) for n in range(9)])
    source = balance_source(pictures, 1)
    (batch,) = (batch for _, batch in zip(range(1), TrainingLoader(source, 16, 8, **OPTIONS), strict=False))
    rare = batch.images[batch.labels == 1].flatten(1)
    assert len(rare) == 8
    assert len({tuple(row.tolist()) for row in rare}) == 8


def test_the_order_of_a_source_that_is_read_in_blocks_stays_one_of_all_samples():
    source = make_source([40, 4])
    source.block, source.window = 8, 16
    balanced = balance_source(source, 1)
    windows = [int(index) // 16 for index in balanced.indices]
    assert windows == sorted(windows), "repetitions stay near, so that no part is read more often than once"
    assert (balanced.block, balanced.window) == (8, 16)
    _, indices = Order(len(balanced), 0, balanced.block, balanced.window)(np.arange(80))
    assert sorted(indices.tolist()) == list(range(80))
