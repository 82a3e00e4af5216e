"""ReaL labels: a hand-worked example, a loop, the published file, and files that are nothing of the kind."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.real import IMAGES, RealLabels, count_real_hits, parse_image_number, read_real_labels

PUBLISHED = Path(importlib.util.find_spec("timm").origin).parent / "data" / "_info" / "imagenet_real_labels.json"


def name(number: int) -> str:
    return f"ILSVRC2012_val_{number:08}.JPEG"


def written(folder, content, called="real.json"):
    path = folder / called
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


EXAMPLE = RealLabels({1: (), 2: (970, 795), 3: (230, 231), 4: (809,), 293: (0,)})


def test_by_hand():
    # Right by the second label, wrong, no labels (whatever the guess), right, right.
    names = [name(2), name(3), name(1), name(4), name(293)]
    assert count_real_hits(EXAMPLE, names, [795, 229, 5, 809, 0]) == (3, 4, 1)
    assert count_real_hits(EXAMPLE, names, torch.tensor([795, 229, 5, 809, 0])) == (3, 4, 1)
    assert count_real_hits(EXAMPLE, names, np.array([795, 229, 5, 809, 0])) == (3, 4, 1)
    assert count_real_hits(EXAMPLE, [name(1)], [3]) == (0, 0, 1)
    assert count_real_hits(EXAMPLE, [], []) == (0, 0, 0)


label_sets = st.lists(st.lists(st.integers(0, 999) | st.integers(0, 3), max_size=4), min_size=1, max_size=30)


@settings(deadline=None)
@given(label_sets, st.data())
def test_the_score_is_a_loop(sets, data):
    guesses = data.draw(st.lists(st.integers(0, 3), min_size=len(sets), max_size=len(sets)))
    order = data.draw(st.permutations(range(len(sets))))
    real = RealLabels({number + 1: tuple(labels) for number, labels in enumerate(sets)})
    hits = sum(guesses[n] in sets[n] for n in range(len(sets)) if sets[n])
    empty = sum(not labels for labels in sets)
    found = count_real_hits(real, [name(n + 1) for n in order], [guesses[n] for n in order])
    assert found == (hits, len(sets) - empty, empty)


@pytest.mark.parametrize(
    ("called", "number"),
    [
        ("ILSVRC2012_val_00000293.JPEG", 293),
        ("/data/val/n01440764/ILSVRC2012_val_00000293.JPEG", 293),
        (r"C:\data\val\ILSVRC2012_val_00000293.JPEG", 293),
        ("shard.tar: n01440764/ILSVRC2012_val_00000293.JPEG", 293),
        ("val-000001.tar:ILSVRC2012_val_00000293.jpg", 293),
        ("ilsvrc2012_val_00000293.png", 293),
        ("ILSVRC2012_val_00000293_n01440764.JPEG", 293),
        ("ILSVRC2012_val_00050000", 50_000),
        ("ILSVRC2012_val_000002930.JPEG", None),
        ("ILSVRC2012_val_293.JPEG", None),
        ("ILSVRC2012_test_00000293.JPEG", None),
        ("ILSVRC2012_val_00000000-00009999.tar:000000293.jpg", None),
        ("ILSVRC2012_val_00000293/photo.JPEG", None),
        ("ILSVRC2012_val_00000293_ILSVRC2012_val_00000294.JPEG", None),
        ("val.parquet:293", None),
        ("digits:3", None),
        ("sample 7", None),
        ("", None),
    ],
)
def test_the_number_in_a_name(called, number):
    assert parse_image_number(called) == number
    assert EXAMPLE.find(called) == ((0,) if number == 293 else None)


@pytest.mark.parametrize("called", ["val.parquet:2", name(5), name(0), name(60_000), "n01440764/photo.JPEG"])
def test_names_that_tell_nothing_are_an_error(called):
    with pytest.raises(DataError, match=r"ReaL .*ILSVRC2012_val_00000293\.JPEG"):
        count_real_hits(EXAMPLE, [name(2), called], [0, 0])


@pytest.mark.parametrize("guess", [1000, -1, 21_842])
def test_guesses_that_are_no_classes_of_imagenet(guess):
    with pytest.raises(ConfigError, match=f"class {guess} "):
        count_real_hits(EXAMPLE, [name(2)], [guess])


def test_as_many_guesses_as_names():
    with pytest.raises(ValueError, match="zip"):
        count_real_hits(EXAMPLE, [name(2)], [0, 1])


def test_a_list_in_the_order_of_the_names(tmp_path):
    lists = [[] for _ in range(IMAGES)]
    lists[0], lists[292], lists[-1] = [5], [0, 391], [999]
    real = read_real_labels(written(tmp_path, json.dumps(lists)))
    assert [real.find(name(n)) for n in (1, 2, 293, 50_000)] == [(5,), (), (0, 391), (999,)]
    assert real.find(name(50_001)) is None


def test_an_object_of_names(tmp_path):
    real = read_real_labels(written(tmp_path, json.dumps({name(7): [1, 2], f"val/{name(9)}": []})))
    assert real == RealLabels({7: (1, 2), 9: ()})


def test_the_published_labels():
    """46,837 images have labels, as the paper says; those of the first ones are known."""
    real = read_real_labels(PUBLISHED)
    assert [real.find(name(number)) for number in range(1, 7)] == [
        (),
        (970, 795),
        (230, 231),
        (809,),
        (516, 850),
        (57,),
    ]
    names = [name(number) for number in range(1, IMAGES + 1)]
    hits, counted, empty = count_real_hits(real, names, [max(real.find(each), default=0) for each in names])
    assert (hits, counted, empty) == (46_837, 46_837, 3_163)


HOLES = [[] for _ in range(IMAGES - 1)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is no JSON"),
        ("<html>", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("9" * 5000, "is no JSON"),
        (b"\x80\x04\x95", "UTF-8"),
        (b"\xff\xfe[\x00]\x00", "UTF-8"),
        ("3", "holds no list"),
        ("null", "holds no list"),
        ('"real"', "holds no list"),
        (json.dumps([[1]] * 3), "list of 3: .* 50,000 "),
        (json.dumps([*HOLES, [1000]]), "image 50000 "),
        (json.dumps([[-1], *HOLES]), "image 1 "),
        (json.dumps([[True], *HOLES]), "image 1 "),
        (json.dumps([[1.0], *HOLES]), "image 1 "),
        (json.dumps([["1"], *HOLES]), "image 1 "),
        (json.dumps([[[1]], *HOLES]), "image 1 "),
        (json.dumps([{}, *HOLES]), "image 1 "),
        (json.dumps([None, *HOLES]), "image 1 "),
        (json.dumps([7, *HOLES]), "image 1 "),
        (json.dumps({"cat.jpg": [1]}), r"'cat.jpg' .*ILSVRC2012_val"),
        (json.dumps({name(0): [1]}), "ILSVRC2012_val"),
        (json.dumps({name(2): 1}), "image 2 "),
        (json.dumps({"a/" + name(2): [1], name(2): [1]}), "image 2 .*twice"),
    ],
)
def test_files_that_are_no_labels(tmp_path, content, told):
    with pytest.raises(DataError, match=told) as error:
        read_real_labels(written(tmp_path, content))
    assert "real.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none_or_huge(tmp_path):
    with pytest.raises(DataError, match=r"none\.json"):
        read_real_labels(tmp_path / "none.json")
    with pytest.raises(DataError, match="not a file"):
        read_real_labels(tmp_path)
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(DataError, match=r"10,000,000,000 bytes.* 16,000,000"):
        read_real_labels(tmp_path / "huge.json")
