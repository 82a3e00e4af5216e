"""Near duplicates: changed copies are found, unrelated images are not, and what says nothing matches nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from natural import CHANGES, natural
from PIL import Image

from vitrail.data.check import near_duplicates
from vitrail.data.check.near_duplicates import NearPairs, find_near_duplicates, join_pairs, make_thumbnail

COUNT = 40


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    return np.stack([make_thumbnail(image) for image in images])


def find(first: np.ndarray, second: np.ndarray) -> NearPairs:
    return join_pairs([pairs for _, pairs in find_near_duplicates(first, second)])


@pytest.fixture(scope="module")
def originals() -> list[Image.Image]:
    return [natural(seed) for seed in range(COUNT)]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_copies_are_found_and_nothing_else(originals, change):
    copies = thumbnails([CHANGES[change](image) for image in originals])
    found = find(thumbnails(originals), copies)
    assert found.first.tolist() == found.second.tolist(), "pairs of unrelated images"
    missed = set(range(COUNT)) - set(found.first.tolist())
    assert len(missed) <= (2 if change in ("cropped", "all") else 0)
    assert set(found.is_mirrored.tolist()) == {change in ("mirrored", "all")}
    assert (found.similarity > 0.8).all()


def test_unrelated_images_are_not_found():
    first, second = (thumbnails([natural(seed) for seed in seeds]) for seeds in (range(100, 220), range(300, 420)))
    assert len(find(first, second).first) == 0


def test_images_that_say_nothing_match_nothing():
    """Not even themselves: black, white, grey, faint noise, and images of a few pixels."""
    rng = np.random.default_rng(0)
    faint = [Image.fromarray(rng.integers(126, 130, (60, 60, 3), dtype=np.uint8)) for _ in range(5)]
    uniform = [Image.new("RGB", (50, 40), colour) for colour in ("black", "white", "grey", "red")]
    tiny = [natural(seed, 15, 40) for seed in range(3)]
    nothing = thumbnails([*faint, *uniform, *tiny])
    assert near_duplicates.find_flat(nothing).all()
    assert len(find(nothing, nothing).first) == 0


def test_the_same_light_or_the_same_frame_is_no_duplicate():
    """A gradient of brightness, or a white frame, with other content."""
    slope = np.linspace(0, 120, 96)[:, None, None]
    lit, framed = [], []
    for seed in range(30):
        detail = np.asarray(natural(seed, 96, 96), np.float64)
        lit.append(Image.fromarray((slope + 0.2 * detail).clip(0, 255).astype(np.uint8)))
        frame = np.full((96, 96, 3), 255, np.uint8)
        frame[14:-14, 14:-14] = 0.5 * detail[14:-14, 14:-14]
        framed.append(Image.fromarray(frame))
    for images in (lit, framed):
        found = find(thumbnails(images[:15]), thumbnails(images[15:]))
        assert len(found.first) == 0
        again = find(thumbnails(images), thumbnails(images))
        assert again.first.tolist() == again.second.tolist() == list(range(30)), "but each is its own"


def test_every_pair_is_compared_once_however_many_there_are(originals, monkeypatch):
    first, second = thumbnails(originals), thumbnails([*originals[::-1], *originals])
    whole = find(first, second)
    assert len(whole.first) == 2 * COUNT
    monkeypatch.setattr(near_duplicates, "ROWS", 7)
    monkeypatch.setattr(near_duplicates, "PAIRS", 3)
    steps = list(find_near_duplicates(first, second))
    assert [done for done, _ in steps] == [7] * 5 + [5]
    parts = join_pairs([pairs for _, pairs in steps])
    assert np.array_equal(parts.first, whole.first)
    assert np.array_equal(parts.second, whole.second)
    assert np.allclose(parts.similarity, whole.similarity, atol=1e-4)


def test_nothing_against_something(originals):
    some, none = thumbnails(originals[:3]), np.empty((0, near_duplicates.SIDE**2), np.uint8)
    assert len(find(some, none).first) == 0
    assert not [pairs for _, pairs in find_near_duplicates(none, some) if len(pairs.first)]


def test_threads_of_torch_stay_as_they_are(originals):
    before = torch.get_num_threads()
    find(thumbnails(originals[:2]), thumbnails(originals[:2]))
    assert torch.get_num_threads() == before


def test_a_symmetric_image_is_found_once_and_as_it_is_nearer():
    left = np.asarray(natural(5, 60, 96), np.int64)
    whole = np.concatenate([left, left[:, ::-1]], axis=1)
    whole[20:60, 10:40] += 12  # it is not quite symmetric
    image = thumbnails([Image.fromarray(whole.clip(0, 255).astype(np.uint8))])
    steps = [pairs for _, pairs in find_near_duplicates(image, image)]
    assert join_pairs(steps).is_mirrored.tolist() == [False]
    assert join_pairs(steps).similarity[0] == pytest.approx(1, abs=1e-3)
