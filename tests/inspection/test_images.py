"""Which images are shown and measured on, and that a model sees them as it would anywhere else."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pictures import make_folder, make_tar, picture
from PIL import Image

import vitrail
from vitrail.data.open import open_data
from vitrail.data.sources.list_source import ListSource
from vitrail.data.transforms.decode import decode_image
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import DataError, NotApplicableError
from vitrail.inference.prepare import fit_pixels
from vitrail.inspection import image_choice
from vitrail.inspection.findings import Absent
from vitrail.inspection.image_choice import choose_from_source, choose_images, choose_photographs
from vitrail.inspection.images import (
    fit_images,
    normalise_batch,
    pick_from_folder,
    pick_photographs,
    prepare_batch,
    render_input,
    spread_evenly,
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def tiny(channels: int = 3, **others):
    small = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}
    return vitrail.create_model("Ti/4", in_channels=channels, **(small | others))


def same(some, others) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def flat(root, count: int, first: int = 0):
    root.mkdir(parents=True)
    for number in range(count):
        (root / f"{number:03}.png").write_bytes(picture(first + number))
    return root


@given(st.integers(0, 2000), st.integers(1, 200))
def test_some_of_many_are_evenly_spread(count, most):
    found = spread_evenly(count, most)
    assert len(found) == min(count, most)
    if found:
        gaps = np.diff([*found, count])
        assert found[0] == 0
        assert gaps.min() >= 1
        assert gaps.max() - gaps.min() <= 1


def test_a_folder_of_many_images(tmp_path):
    root = flat(tmp_path / "photos", 10)
    picked = pick_from_folder(str(root), 3, most=5, show=2)
    assert same(picked.measured, [decode_image(picture(number)) for number in (0, 2, 4, 6, 8)])
    assert [name for name, _ in picked.shown] == ["000.png", "004.png"]
    assert same([pixels for _, pixels in picked.shown], [decode_image(picture(number)) for number in (0, 4)])
    assert picked.measured_on == f"5 of the 10 images of {root.name}"
    assert picked.shown_from == f"2 of the 10 images of {root.name}"
    assert picked.broken == ()
    few = pick_from_folder(str(root), 3)
    assert (len(few.measured), len(few.shown)) == (10, 8)
    assert few.measured_on == f"10 images of {root.name}"


def test_images_may_lie_at_any_depth(tmp_path):
    root = flat(tmp_path / "photos", 1)
    make_folder(root, {"cats/old": 1, "cats/new": 1, "dogs": 1, ".hidden": 1}, first=50)
    (root / ".hidden.png").write_bytes(picture(90))
    (root / "notes.txt").write_text("no image")
    (root / "dogs" / "0001.JPG").write_bytes(picture(91, "JPEG"))
    if sys.platform != "win32":
        (root / "dogs" / "round").symlink_to(root)
    names = [name for name, _ in pick_from_folder(str(root), 3).shown]
    assert names == ["000.png", "cats/new/0000.png", "cats/old/0000.png", "dogs/0000.png", "dogs/0001.JPG"]


def test_what_is_broken_is_left_out_and_named(tmp_path):
    root = flat(tmp_path / "photos", 4)
    (root / "000.png").write_bytes(b"no image")
    (root / "002.png").write_bytes(b"")
    picked = pick_from_folder(str(root), 3)
    assert [name for name, _ in picked.shown] == ["001.png", "003.png"]
    assert picked.broken == ("000.png: not an image of a known kind", "002.png: empty")
    assert picked.measured_on == f"2 of the 4 images of {root.name}"
    for number in (1, 3):
        (root / f"00{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"4 images .*photos.*000\.png"):
        pick_from_folder(str(root), 3)


def test_a_single_file(tmp_path):
    path = flat(tmp_path / "photos", 3) / "001.png"
    picked = pick_from_folder(str(path), 3)
    assert [name for name, _ in picked.shown] == ["001.png"]
    assert same(picked.measured, [decode_image(picture(1))])
    assert (picked.shown_from, picked.measured_on) == ("001.png", "001.png")


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    flat(tmp_path / "photos", 2)
    assert len(pick_from_folder("~/photos", 3).measured) == 2


def test_data_sets_are_understood(tmp_path):
    digits = pick_from_folder("digits", 1, most=4, show=2)
    source = open_data("digits")
    assert same(digits.measured, [source.read(index).content for index in spread_evenly(len(source), 4)])
    assert [name for name, _ in digits.shown] == [
        f"digits:{index} (label: {source.read(index).label})" for index in (0, 898)
    ]
    assert digits.measured_on == "4 of the 1,797 images of digits"
    for part, first in (("train", 0), ("val", 20)):
        make_tar(tmp_path / "shards" / f"{part}-000.tar", [0, 1, 0], first)
    (tmp_path / "shards" / "classes.txt").write_text("cat\nn01440764\n")
    picked = pick_from_folder(str(tmp_path / "shards"), 3)
    assert same(picked.measured, [decode_image(picture(number)) for number in (20, 21, 22)])
    assert [name.rsplit(" (")[1] for name, _ in picked.shown] == ["label: cat)", "label: tench)", "label: cat)"]
    assert picked.measured_on == "3 images of shards (val)"
    (tmp_path / "shards" / "val-000.tar").unlink()
    assert pick_from_folder(str(tmp_path / "shards"), 3).shown_from == "3 images of shards (train)"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "does not exist: give a folder with images"),
        (lambda path: path.mkdir(), "holds no images: give a folder with images"),
        (lambda path: path.write_text("no image"), "is no image: give a folder with images"),
    ],
)
def test_where_there_are_none_it_says_what_to_do(tmp_path, make, told):
    make(tmp_path / "place")
    with pytest.raises(DataError, match=told):
        pick_from_folder(str(tmp_path / "place"), 3)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the super-user may read everything")
def test_a_locked_folder_is_told(tmp_path):
    root = flat(tmp_path / "photos", 1)
    (root / "locked").mkdir(mode=0)
    with pytest.raises(DataError, match="locked"):
        pick_from_folder(str(root), 3)


def fit(samples, model=None, **options):
    """Fit the images of a choice, or of a list of (image, label) pairs, to one model."""
    choice = choose_from_source(ListSource(samples), "a list") if isinstance(samples, list) else samples
    (picked,) = fit_images(choice, [model or tiny()], **options)
    return picked


def test_names_tell_labels_where_they_are_known():
    samples = [(picture(0), 1), (picture(1), -1), (picture(2), 7), (b"broken", 0)]
    picked = fit(choose_from_source(ListSource(samples, ["cat", "dog"]), "a list"))
    assert [name for name, _ in picked.shown] == ["sample 0 (label: dog)", "sample 1", "sample 2"]
    assert picked.broken == ("sample 3: not an image of a known kind",)
    assert picked.measured_on == "3 of the 4 images of a list"
    without = fit([("/some/where.png", 0)] * 2 + samples[:1])
    assert [name for name, _ in without.shown] == ["sample 2"]
    assert without.broken[0].startswith("/some/where.png: cannot be read")


def test_files_are_called_by_their_own_name(tmp_path):
    source = open_data(make_folder(tmp_path / "photos", {"cat": 1, "dog": 1}))
    names = [name for name, _ in fit(choose_from_source(source, "photos")).shown]
    assert names == ["0000.png (label: cat)", "0000.png (label: dog)"]


def test_lists_of_images_in_any_form(tmp_path):
    path = tmp_path / "one.png"
    path.write_bytes(picture(0))
    pixels = decode_image(picture(0))
    forms = [path, str(path), path.read_bytes(), Image.open(path), pixels.permute(1, 2, 0).numpy(), pixels]
    picked = fit(choose_images(forms))
    assert [name for name, _ in picked.shown] == ["one.png", "one.png", *(f"sample {number}" for number in range(2, 6))]
    assert all(torch.equal(each, picked.measured[0]) for each in picked.measured)
    assert picked.broken == ()
    assert picked.measured_on == "6 images of a list"
    assert same(fit(choose_images(pixels)).measured, picked.measured[:1]), "one image is a list of one"
    pairs = [(path, "cat"), (pixels, "dog")]
    assert [name for name, _ in fit(choose_images(pairs)).shown] == ["one.png (label: cat)", "sample 1 (label: dog)"]
    assert fit(choose_images({"train": pairs * 2, "val": pairs})).measured_on == "2 images of a list (val)"
    assert same(fit(choose_images(ListSource([(pixels, 0)]))).measured, picked.measured[:1])
    with pytest.raises(DataError, match="empty"):
        choose_images([])


def test_large_images_are_made_smaller(tmp_path):
    large = np.arange(60 * 40, dtype=np.int32).reshape(60, 40).astype(np.uint8)
    (tmp_path / "photos").mkdir()
    Image.fromarray(large).save(tmp_path / "photos" / "0.png")
    Image.fromarray(large[:10, :10]).save(tmp_path / "photos" / "1.png")
    picked = pick_from_folder(str(tmp_path / "photos"), 3, pixels=100)
    assert same([pixels for _, pixels in picked.shown], picked.measured)
    assert [tuple(pixels.shape) for pixels in picked.measured] == [(3, 12, 8), (3, 10, 10)]
    assert np.array_equal(picked.measured[1][0].numpy(), large[:10, :10])


def test_only_what_the_models_see_is_kept():
    """A crop that is a view would keep the whole photograph in memory."""
    photos = [(torch.zeros(3, 300, 1200, dtype=torch.uint8), 0), (torch.zeros(3, 16, 16, dtype=torch.uint8), 0)]
    covering = tiny()
    covering.preprocessing = covering.preprocessing.model_copy(update={"resize": "cover", "crop_fraction": 0.5})
    for picked in fit_images(choose_from_source(ListSource(photos), "a list"), [tiny(), covering]):
        assert {pixels.untyped_storage().nbytes() for pixels in picked.measured} == {3 * 16 * 16}


def test_each_image_is_read_once_for_all_models():
    reads = []
    source = ListSource([(picture(number, size=(50, 30)), 0) for number in range(4)])
    choice = choose_from_source(source, "a list")
    counted = replace(choice, read=lambda index: reads.append(index) or choice.read(index))
    one, other = fit_images(counted, [tiny(), tiny(1, image_size=24)])
    assert reads == [0, 1, 2, 3]
    assert [tuple(images.measured[0].shape) for images in (one, other)] == [(3, 16, 16), (1, 24, 24)]


def test_progress_counts_the_images_that_are_read():
    told = []
    fit([(picture(0), 0), (b"broken", 0)], progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]


def test_the_photographs_are_the_same_every_time():
    first, second = pick_photographs(3), pick_photographs(3)
    assert [name for name, _ in first.shown] == ["china.jpg", "flower.jpg"]
    assert {tuple(pixels.shape) for _, pixels in first.shown} == {(3, 427, 640)}
    assert len(first.measured) == 32
    assert same(first.measured, second.measured)
    assert all(crop.shape[1] == crop.shape[2] >= 192 for crop in first.measured)
    assert len({crop.shape[1] for crop in first.measured}) == 3
    distinct = {crop.numpy().tobytes() for crop in first.measured}
    assert len(distinct) == 32
    assert first.measured_on.startswith("32 crops of the two photographs inside scikit-learn")
    assert first.shown_from == "the two photographs inside scikit-learn"
    few = pick_photographs(3, most=4)
    assert same(few.measured, first.measured[::8])
    assert few.measured_on.startswith("4 crops of ")


def test_the_crops_cover_a_photograph():
    numbered = torch.arange(42 * 64).view(1, 42, 64)
    assert torch.cat([crop.flatten() for crop in image_choice._crop_squares(numbered)]).unique().numel() == 42 * 64


def test_a_model_sees_what_prepare_gives_it():
    model = tiny(image_size=(16, 24)).double()
    model.preprocessing = model.preprocessing.model_copy(
        update={"resize": "cover", "crop_fraction": 0.8, "interpolation": "bicubic", "mean": (0.1, 0.2, 0.3)}
    )
    pixels = [decode_image(picture(number, size=(40 + number, 30))) for number in range(3)]
    ready = prepare_batch(pixels, model)
    assert ready.dtype == torch.float64
    assert torch.equal(ready, torch.stack([prepare(each, model.preprocessing) for each in pixels]).double())
    assert model(ready).shape == (3, 5)
    assert prepare_batch([], model).shape == (0, 3, 16, 24)
    assert not ready.requires_grad
    assert torch.equal(ready, normalise_batch([fit_pixels(each, model.preprocessing) for each in pixels], model))
    for each, image in zip(pixels, ready, strict=True):
        shown = render_input(fit_pixels(each, model.preprocessing))
        assert (shown.shape, shown.dtype) == ((16, 24, 3), np.uint8)
        expected = (shown / 255 - np.array([0.1, 0.2, 0.3])) / 0.5
        assert np.abs(expected - image.permute(1, 2, 0).numpy()).max() < 1e-6


@pytest.mark.parametrize(
    "picked", [lambda: pick_photographs(1, 4), lambda: pick_from_folder("digits", 1, 4)], ids=["photos", "digits"]
)
def test_grey_models_see_grey_and_others_see_grey_thrice(picked):
    found = picked()
    pixels = [each for _, each in found.shown] + found.measured
    for channels in (1, 3):
        model = tiny(channels)
        assert model(prepare_batch(pixels, model)).shape == (len(pixels), 5)
        assert render_input(fit_pixels(pixels[0], model.preprocessing)).shape == (16, 16, channels)
    assert torch.equal(
        prepare_batch(pixels, tiny(1)), torch.stack([prepare(each, tiny(1).preprocessing) for each in pixels])
    )


def test_other_channels_come_from_data_of_as_many(tmp_path):
    folder = flat(tmp_path / "photos", 1)
    for ask in (lambda: pick_photographs(4), lambda: pick_from_folder(str(folder), 4)):
        with pytest.raises(NotApplicableError, match="takes 4"):
            ask()
    for choice in (choose_photographs(), choose_images(folder), choose_images([picture(0)])):
        assert "takes 4" in fit(choice, tiny(4)).why
    pixels = torch.randint(0, 256, (4, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    picked = fit([(pixels, 0), (pixels[:3], 0)], tiny(4))
    assert same(picked.measured, [pixels])
    assert picked.broken == ("sample 1: 3 channels, and the model takes 4",)
    assert np.array_equal(render_input(pixels), pixels[:3].permute(1, 2, 0).numpy())
    assert render_input(pixels[:2]).shape == (16, 16, 1)
    three, four = fit_images(choose_photographs(), [tiny(3), tiny(4)], most=4)
    assert len(three.measured) == 4, "though the other model can use none of them"
    assert isinstance(four, Absent)
