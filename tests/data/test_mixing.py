"""Mixup and CutMix against loops over images and pixels; label mass to the last bit."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats

import vitrail
from vitrail.data.transforms.mixing import Mixing, cutmix, mix_batch, mixup, one_hot
from vitrail.data.transforms.preprocess import normalise, prepare

RARE = 1e-3
CLASSES = 8
LABELS = torch.tensor([3, 0, 7, 4, 1, 6])


def batch(height: int = 9, width: int = 14) -> torch.Tensor:
    """Six images of values that are all different, so that a pixel tells where it came from."""
    values = torch.arange(6 * 2 * height * width, dtype=torch.float32)
    return values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))].view(6, 2, height, width)


class Recorder(random.Random):
    """Notes what `betavariate` gave, or gives what it is told."""

    told: float | None = None

    def betavariate(self, alpha: float, beta: float) -> float:
        self.alphas = (alpha, beta)
        self.drawn = super().betavariate(alpha, beta) if self.told is None else self.told
        return self.drawn


def telling(value: float, seed: int = 0) -> Recorder:
    rng = Recorder(seed)
    rng.told = value
    return rng


def partners_in(targets: torch.Tensor, kept: float) -> list[int]:
    """Who each image was mixed with, read from the targets; the labels of the batch are all different."""
    partners = []
    for row, label in zip(targets.tolist(), LABELS.tolist(), strict=True):
        others = [place for place, value in enumerate(row) if value and place != label]
        partners.append(LABELS.tolist().index(others[0]) if others else LABELS.tolist().index(label))
        assert len(others) <= 1
        assert row[label] == (kept if others else 1.0)
    return partners


# ---- Targets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_one_hot(dtype, kind):
    targets = one_hot(LABELS.to(kind), CLASSES, dtype)
    assert targets.dtype == dtype
    assert targets.tolist() == [[float(place == label) for place in range(CLASSES)] for label in LABELS.tolist()]


@pytest.mark.parametrize("label", [-1, 5, 200])
def test_a_label_outside_the_classes_is_named(label):
    with pytest.raises(vitrail.InputError, match=f"label {label} "):
        one_hot(torch.tensor([0, label]), 5)


def test_labels_of_an_empty_batch():
    assert one_hot(torch.empty(0, dtype=torch.int64), 5).shape == (0, 5)


HARD = [0.0, 1.0, 0.5, 1 / 3, 2 / 3, 1e-9, 1e-30, 1 - 1e-9, 2**-24, 2**-25, 1 - 2**-25, 3 * 2**-26, 0.5 - 2**-26]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_mixed_targets_sum_to_exactly_one(dtype):
    targets, images = one_hot(LABELS, CLASSES, dtype), torch.zeros(6, 1, 1, 1)
    rng = random.Random(0)
    shares = [*HARD, *(rng.random() for _ in range(3000)), *(rng.betavariate(0.2, 0.2) for _ in range(3000))]
    for share in shares:
        _, mixed = mixup(images, targets, telling(share), 1.0)
        assert mixed.dtype == dtype
        assert (mixed.sum(1) == 1).all(), share
        assert mixed.min() >= 0


def test_two_images_of_one_class_keep_their_whole_target():
    targets = one_hot(torch.tensor([2, 2, 2]), 4)
    for seed in range(300):
        assert torch.equal(mixup(torch.zeros(3, 1, 2, 2), targets, random.Random(seed), 0.7)[1], targets)


# ---- Mixup -----------------------------------------------------------------------------------------------------------


def test_mixup_is_a_loop_over_pairs():
    images, seen = batch(), set()
    for seed in range(40):
        rng = Recorder(seed)
        mixed, targets = mixup(images, one_hot(LABELS, CLASSES), rng, 0.8)
        assert rng.alphas == (0.8, 0.8)
        kept = float(np.float32(rng.drawn))
        partners = partners_in(targets, kept)
        assert sorted(partners) == list(range(6))
        expected = torch.stack(
            [kept * images[i].double() + (1 - kept) * images[j].double() for i, j in enumerate(partners)]
        )
        torch.testing.assert_close(mixed.double(), expected, rtol=1e-6, atol=1e-4)
        seen.add(tuple(partners))
    assert len(seen) > 30  # of 720 possible orders


def test_every_partner_is_as_likely():
    targets, images, rng = one_hot(LABELS, CLASSES), torch.zeros(6, 1, 1, 1), telling(0.25)
    counts = np.zeros((6, 6))
    for _ in range(1200):
        for image, partner in enumerate(partners_in(mixup(images, targets, rng, 1.0)[1], 0.25)):
            counts[image, partner] += 1
    for row in counts:
        assert stats.chisquare(row).pvalue > RARE


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_the_share_is_beta_distributed(alpha):
    rng, shares = random.Random(1), []
    while len(shares) < 1500:
        [[first, second]] = mixup(torch.zeros(2, 1, 1, 1), torch.eye(2), rng, alpha)[1][:1].tolist()
        if second:  # not mixed with itself
            shares.append(first)
    # Being mixed with itself hides the share in half the batches, whatever it is.
    assert stats.kstest(shares, stats.beta(alpha, alpha).cdf).pvalue > RARE


def test_mixup_refuses_bytes():
    with pytest.raises(vitrail.InputError, match="uint8"):
        mixup(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.eye(2), random.Random(0), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixup_keeps_the_type_of_images_and_targets_apart(dtype):
    images, targets = mixup(batch().to(dtype), one_hot(LABELS, CLASSES), random.Random(0), 1.0)
    assert (images.dtype, targets.dtype) == (dtype, torch.float32)


# ---- CutMix ----------------------------------------------------------------------------------------------------------


@given(
    height=st.integers(1, 12), width=st.integers(1, 12), seed=st.integers(0, 10**6), share=st.none() | st.floats(0, 1)
)
@settings(max_examples=250, deadline=None)
def test_cutmix_is_a_loop_over_pixels_and_its_share_is_what_is_kept(height, width, seed, share):
    images = batch(height, width)
    rng = Recorder(seed)
    rng.told = share
    mixed, targets = cutmix(images, one_hot(LABELS, CLASSES), rng, 1.0)
    owner = {value: place // (2 * height * width) for place, value in enumerate(images.flatten().tolist())}
    kept_pixels = set()
    for image in range(6):
        taken = torch.zeros(height, width, dtype=torch.bool)
        sources = set()
        for y in range(height):
            for x in range(width):
                source = owner[mixed[image, 0, y, x].item()]
                assert torch.equal(mixed[image, :, y, x], images[source, :, y, x])
                if source != image:
                    taken[y, x] = True
                    sources.add(source)
        assert len(sources) <= 1
        rows, columns = taken.any(1), taken.any(0)
        assert torch.equal(taken, rows[:, None] & columns[None])  # a cross of lines that are all in: a rectangle …
        for line in (rows, columns):
            places = line.nonzero().flatten().tolist()
            assert all(after - before == 1 for before, after in itertools.pairwise(places))  # … without gaps
        kept = Fraction(height * width - int(taken.sum()), height * width)
        partner = sources.pop() if sources else image
        expected = torch.zeros(CLASSES)
        expected[LABELS[partner]] = float(1 - kept)
        expected[LABELS[image]] = 1.0 if partner == image else float(kept)
        assert torch.equal(targets[image], expected)
        assert targets[image].sum() == 1
        if partner != image:
            kept_pixels.add(kept)
    assert len(kept_pixels) <= 1  # one rectangle for the whole batch


def rectangles(share: float, draws: int, height: int = 40, width: int = 60) -> np.ndarray:
    """(top, bottom, left, right) of many."""
    images = torch.stack([torch.zeros(1, height, width), torch.ones(1, height, width)])
    found, rng = [], telling(share)
    while len(found) < draws:
        taken = cutmix(images, torch.eye(2), rng, 1.0)[0][0, 0]
        rows, columns = taken.any(1).nonzero(), taken.any(0).nonzero()
        if len(rows):  # not mixed with itself
            found.append((rows.min(), rows.max() + 1, columns.min(), columns.max() + 1))
    return np.array(found, dtype=int)


@pytest.mark.slow
def test_a_rectangle_has_its_area_and_a_uniform_centre():
    # A quarter of each side: 10 × 15, from 5 before the centre to 5 after it, and from 7 to 8.
    boxes = rectangles(1 - 1 / 16, 2500)
    for start, end, side, before, after in ((*boxes.T[:2], 40, 5, 5), (*boxes.T[2:], 60, 7, 8)):
        possible = [(max(0, centre - before), min(side, centre + after)) for centre in range(side)]
        counts = [int(((start == first) & (end == last)).sum()) for first, last in possible]
        assert len(set(possible)) == side
        assert sum(counts) == 2500
        assert stats.chisquare(counts).pvalue > RARE
    assert stats.spearmanr(boxes[:, 0], boxes[:, 2]).pvalue > RARE


@pytest.mark.parametrize("share", [0.0, 0.19, 0.5, 0.9])
def test_the_largest_rectangle_has_the_share_drawn(share):
    boxes = rectangles(share, 300)
    largest = ((boxes[:, 1] - boxes[:, 0]).max(), (boxes[:, 3] - boxes[:, 2]).max())
    assert largest == (round(40 * math.sqrt(1 - share)), round(60 * math.sqrt(1 - share)))


def test_cutmix_takes_bytes():
    images = (batch() % 256).to(torch.uint8)
    mixed, _ = cutmix(images, one_hot(LABELS, CLASSES), telling(0.5), 1.0)
    assert mixed.dtype == torch.uint8
    as_floats, _ = cutmix(images.float(), one_hot(LABELS, CLASSES), telling(0.5), 1.0)
    assert torch.equal(mixed.float(), as_floats)


# ---- Either, neither, or now and then --------------------------------------------------------------------------------


def kind_of(images: torch.Tensor, mixed: torch.Tensor) -> str:
    if torch.equal(images, mixed):
        return "none"
    return "cutmix" if torch.isin(mixed, images).all() else "mixup"


def frequencies(config: Mixing, draws: int = 600) -> dict[str, float]:
    rng, found = random.Random(2), []
    images = torch.rand(6, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    for _ in range(draws):
        mixed, targets = mix_batch(images, LABELS, CLASSES, config, rng)
        found.append(kind_of(images, mixed))
        if found[-1] == "none":
            assert torch.equal(targets, one_hot(LABELS, CLASSES))
        assert (targets.sum(1) == 1).all()
    return {kind: found.count(kind) / draws for kind in ("none", "mixup", "cutmix")}


# With α = 8 the share is near a half, so that a mixed batch shows it; 0.08 is four standard deviations.
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Mixing(), (1, 0, 0)),
        (Mixing(mixup=8), (0, 1, 0)),
        (Mixing(cutmix=8), (0, 0, 1)),
        (Mixing(mixup=8, cutmix=8), (0, 0.5, 0.5)),
        (Mixing(mixup=8, cutmix=8, switch=0.2), (0, 0.8, 0.2)),
        (Mixing(mixup=8, cutmix=8, switch=0), (0, 1, 0)),
        (Mixing(mixup=8, cutmix=8, switch=1), (0, 0, 1)),
        (Mixing(mixup=8, cutmix=8, rate=0.6, switch=0.5), (0.4, 0.3, 0.3)),
        (Mixing(mixup=8, rate=0), (1, 0, 0)),
        (Mixing(mixup=8, switch=1), (0, 1, 0)),
        (Mixing(cutmix=8, switch=0), (0, 0, 1)),
    ],
    ids=str,
)
def test_mix_does_what_is_asked_as_often(config, expected):
    found = frequencies(config)
    for share, wanted in zip(found.values(), expected, strict=True):
        # One permutation in 720 leaves every image alone, and a mixed batch then looks like none.
        assert share == pytest.approx(wanted, abs=0.08 if 0 < wanted < 1 else 0.01)


def test_mix_hands_each_its_own_strength():
    for config, alpha in ((Mixing(mixup=0.3, cutmix=2, switch=0), 0.3), (Mixing(mixup=0.3, cutmix=2, switch=1), 2)):
        rng = Recorder(0)
        mix_batch(batch(), LABELS, CLASSES, config, rng)
        assert rng.alphas == (alpha, alpha)


def test_nothing_is_drawn_for_what_is_off():
    rng = random.Random(0)
    before = rng.getstate()
    images, targets = mix_batch(batch(), LABELS, CLASSES, Mixing(), rng)
    assert rng.getstate() == before
    assert torch.equal(images, batch())
    assert torch.equal(targets, one_hot(LABELS, CLASSES))


@pytest.mark.parametrize("function", [mixup, cutmix])
def test_mixing_is_pure(function):
    images, targets = batch(), one_hot(LABELS, CLASSES)
    states = random.getstate(), torch.get_rng_state()
    first = function(images, targets, random.Random(3), 1.0)
    second = function(images.contiguous(memory_format=torch.channels_last), targets, random.Random(3), 1.0)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], images)
    assert torch.equal(images, batch())
    assert torch.equal(targets, one_hot(LABELS, CLASSES))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"mixup": -0.2}, "mixup = -0.2"),
        ({"cutmix": math.inf}, "cutmix = inf"),
        ({"switch": 1.1}, "switch = 1.1"),
        ({"rate": -1}, "rate = -1"),
        ({"mix_up": 0.2}, "did you mean 'mixup'"),
    ],
)
def test_impossible_mixing_is_refused(wrong, sentence):
    with pytest.raises(vitrail.ConfigError, match=sentence):
        Mixing(**wrong)


# ---- Normalisation ---------------------------------------------------------------------------------------------------

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.mark.parametrize("options", [{}, IMAGENET], ids=["paper", "ImageNet"])
def test_normalise_is_what_evaluation_does_and_what_the_formula_says(options):
    preprocessing = vitrail.Preprocessing(image_size=(16, 48), **options)
    values = np.random.default_rng(0).permuted(np.arange(16 * 48 * 3) % 256).astype(np.uint8).reshape(16, 48, 3)
    images = torch.from_numpy(values).permute(2, 0, 1)[None]
    ours = normalise(images, preprocessing)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours[0], prepare(Image.fromarray(values), preprocessing), rtol=1e-6, atol=1e-6)
    formula = (values / 255 - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    torch.testing.assert_close(ours[0].double(), torch.from_numpy(formula).permute(2, 0, 1), rtol=1e-6, atol=1e-6)
    half = normalise(images, preprocessing, torch.bfloat16)
    assert torch.equal(half, ours.bfloat16())


@pytest.mark.parametrize(
    ("images", "sentence"),
    [
        (torch.zeros(2, 3, 4, 4), r"uint8 images of shape \(…, 3, height, width\), not torch.float32"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), r"not torch.uint8 of \(2, 1, 4, 4\)"),
        (torch.zeros(4, 4, 3, dtype=torch.uint8), r"of \(4, 4, 3\)"),
    ],
)
def test_normalise_refuses_what_would_broadcast_or_scale_in_silence(images, sentence):
    with pytest.raises(vitrail.InputError, match=sentence):
        normalise(images, vitrail.Preprocessing(image_size=4))
