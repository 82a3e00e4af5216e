"""Augmentations of batches against those of single images, with the same parameters; and what chance decides."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vitrail.data.transforms import augment, batch_operations
from vitrail.data.transforms.augment import OPERATIONS, Augmentation, draw_crop_box
from vitrail.data.transforms.batch_augment import (
    AugmentationParameters,
    apply_parameters,
    augment_batch,
    draw_boxes,
    draw_parameters,
)

RARE = 1e-3
"""With the seeds fixed, a distribution that fits passes always; a wrong one has p-values far below this."""
MAGNITUDES = [0.0, 3.0, 9.0, 10.0, 14.0, 19.0, 30.0]
EVERYTHING = Augmentation(flip=0.7, shift=0.1, three_augment=True, rand_augment=(2, 9.0), color_jitter=0.2, erasing=0.6)
FUNCTIONS = ("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize-add", "cutout")
ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")
GEOMETRY = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")


def pictures(count: int = 12, height: int = 24, width: int = 31) -> torch.Tensor:
    """Waves, noise, dark, bright, flat, of two values only: what histograms and means find hard."""
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    found = []
    for number in range(count):
        waves = np.stack([np.sin(x / (3 + number) + c * y / 5) for c in range(3)])
        noise = generator.normal(0, 0.3, waves.shape)
        low, high = ((0, 255), (30, 180), (120, 140), (0, 40), (200, 255), (90, 90))[number % 6]
        image = low + (high - low) * ((waves + noise).clip(-1, 1) + 1) / 2
        found.append(np.where(image > 127, 220, 17) if number == 7 else image.astype(int))
    return torch.from_numpy(np.stack(found).astype(np.uint8))


IMAGES = pictures()


def pillow(image: torch.Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def tensor(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Against single images -------------------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(2, 40), st.integers(2, 40)),
    st.tuples(st.integers(2, 40), st.integers(2, 40)),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_a_crop_is_interpolates_to_the_bit(size, new_size, seed):
    """Up to four times smaller; beyond, the weights of a pixel have fewer bits than there."""
    rng = random.Random(seed)
    images = torch.randint(0, 256, (3, 3, *size), dtype=torch.uint8, generator=generator(seed % 97))
    boxes = [draw_crop_box(*size, rng, (0.01, 1.0), (0.3, 3.0)) for _ in images]
    mirrored = torch.tensor([True, False, True])
    found = batch_operations.crop_and_resize(images, torch.tensor(boxes), new_size, mirrored)
    for image, (top, left, height, width), flipped, ours in zip(images, boxes, mirrored, found, strict=True):
        part = image[None, :, top : top + height, left : left + width]
        expected = F.interpolate(part, size=new_size, mode="bilinear", antialias=True)[0]
        difference = (ours.flip(2) if flipped else ours).int() - expected.int()
        exact = height <= 4 * new_size[0] and width <= 4 * new_size[1]
        assert difference.abs().max() <= (0 if exact else 1)


class Chosen(random.Random):
    """Gives what a batch has drawn: the sign of a geometric operation, the centre of a cutout."""

    def __init__(self, sign: float, centre: tuple[int, int]) -> None:
        self.sign, self.places = sign, [centre[1], centre[0]]

    def random(self) -> float:
        return 0.0 if self.sign < 0 else 0.9

    def randrange(self, stop: int) -> int:
        return self.places.pop(0)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_those_of_single_images(name, magnitude):
    count, _, height, width = IMAGES.shape
    drawn = draw_parameters(
        count, Augmentation(rand_augment=(1, magnitude)), generator(1), (height, width), (height, width)
    )
    numbers = torch.full((count, 1), list(OPERATIONS).index(name))
    found = batch_operations.rand_augment(
        IMAGES, numbers, drawn.rand_augment.signs, drawn.rand_augment.centres, magnitude
    )
    assert found.dtype == torch.uint8
    assert found.shape == IMAGES.shape
    chances = zip(drawn.rand_augment.signs[:, 0].tolist(), drawn.rand_augment.centres[:, 0].tolist(), strict=True)
    expected = [
        tensor(OPERATIONS[name](pillow(image), magnitude, Chosen(*chance)))
        for image, chance in zip(IMAGES, chances, strict=True)
    ]
    difference = (found.int() - torch.stack(expected).int()).abs()
    if name in GEOMETRY:
        # No sampling point of these magnitudes is within rounding of the border, where either answer is right.
        assert difference.max() <= 1
        # Where a value is a whole number either side may come out just below it, and lose its fraction.
        assert (difference > 0).float().mean() < 0.02
    else:
        assert difference.max() == 0
    if magnitude == 9.0:
        assert (found != IMAGES).any()


def test_every_operation_has_been_named():
    assert {*FUNCTIONS, *ENHANCEMENTS, *GEOMETRY} == set(OPERATIONS)


def test_each_image_has_an_operation_of_its_own_and_rounds_follow_each_other():
    """Without geometry, so that all is exact."""
    names = [name for name in OPERATIONS if name not in GEOMETRY]
    pairs = list(itertools.product(names, names))
    images = IMAGES[torch.arange(len(pairs)) % len(IMAGES)]
    numbers = torch.tensor([[list(OPERATIONS).index(name) for name in pair] for pair in pairs])
    centres = torch.stack((numbers + 3, numbers + 7), dim=2)
    found = batch_operations.rand_augment(images, numbers, torch.ones(numbers.shape), centres, 9.0)
    for image, pair, centre, ours in zip(images, pairs, centres.tolist(), found, strict=True):
        picture = pillow(image)
        for name, place in zip(pair, centre, strict=True):
            picture = OPERATIONS[name](picture, 9.0, Chosen(1.0, tuple(place)))
        assert torch.equal(ours, tensor(picture)), pair


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_jitter_is_pillows_enhancements(order):
    factors = torch.rand(len(IMAGES), 3, generator=generator(2)) * 2
    found = batch_operations.jitter(IMAGES, factors, torch.tensor(order).expand(len(IMAGES), 3))
    enhancers = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for image, factor, ours in zip(IMAGES, factors.tolist(), found, strict=True):
        picture = pillow(image)
        for step in order:
            picture = enhancers[step](picture).enhance(factor[step])
        assert torch.equal(ours, tensor(picture))


def test_three_augment_is_pillows():
    images = IMAGES.repeat(20, 1, 1, 1)
    kinds = torch.arange(len(images)) % 3
    radii = torch.linspace(0.1, 2.0, len(images))
    found = batch_operations.three_augment(images, kinds, radii)
    for image, kind, radius, ours in zip(images, kinds.tolist(), radii.tolist(), found, strict=True):
        picture = pillow(image)
        ways = (
            lambda p, _: p.convert("L").convert("RGB"),
            lambda p, _: ImageOps.solarize(p, 128),
            lambda p, r: p.filter(ImageFilter.GaussianBlur(r)),
        )
        assert torch.equal(ours, tensor(ways[kind](picture, radius)))


class Fixed:
    """A source of chance that gives what it was given."""

    def __init__(self, *numbers):
        self.numbers = list(numbers)

    def randint(self, low, high):
        number = self.numbers.pop(0)
        assert low <= number <= high
        return number


def test_a_shift_is_that_of_single_images():
    places = list(itertools.product((-24, -5, 0, 3, 24), (-31, -1, 0, 7, 31)))[:12]
    places[:3] = [(0, 31), (5, -2), (24, 31)]
    down, right = torch.tensor(places).unbind(1)
    found = batch_operations.shift(IMAGES, down, right)
    for image, place, ours in zip(IMAGES, places, found, strict=True):
        assert torch.equal(ours, augment.shift(image, Fixed(*place), 1.0))


def test_steps_come_in_the_order_of_the_fields():
    draws = draw_parameters(len(IMAGES), EVERYTHING, generator(3), (24, 31), (16, 20))
    expected = batch_operations.crop_and_resize(IMAGES, draws.boxes, (16, 20), draws.mirrored)
    expected = batch_operations.shift(expected, *draws.shift)
    three, rand, jitter, erasing = draws[3:]
    expected = batch_operations.three_augment(expected, three.kinds, three.radii)
    expected = batch_operations.jitter(expected, three.jitter.factors, three.jitter.order)
    expected = batch_operations.rand_augment(expected, rand.operations, rand.signs, rand.centres, 9.0)
    expected = batch_operations.jitter(expected, jitter.factors, jitter.order)
    for image, (top, left, height, width), noise in zip(expected, erasing.boxes.tolist(), erasing.noise, strict=True):
        inside = (slice(None), slice(top, top + height), slice(left, left + width))
        image[inside] = noise[inside]
    assert torch.equal(apply_parameters(IMAGES, draws, 9.0, (16, 20)), expected)
    assert torch.equal(augment_batch(IMAGES, EVERYTHING, generator(3), (16, 20)), expected)
    assert 0 < (erasing.boxes[:, 2] > 0).sum() < len(IMAGES)


# ---- What chance decides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(64, 64), (50, 375)])
def test_boxes_are_distributed_as_those_of_single_images(size):
    rng, (area, ratio) = random.Random(1), ((0.05, 1.0), (3 / 4, 4 / 3))
    theirs = np.array([draw_crop_box(*size, rng, area, ratio) for _ in range(4000)])
    ours = draw_parameters(4000, Augmentation(crop_area=area, crop_ratio=ratio), generator(1), size, size).boxes.numpy()
    for of in (lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3]):
        assert stats.ks_2samp(of(ours), of(theirs)).pvalue > RARE


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 999), st.floats(0.001, 1), st.floats(0.05, 20))
@settings(max_examples=100, deadline=None)
def test_boxes_lie_in_the_image(height, width, seed, low, ratio):
    options = Augmentation(crop_area=(low, 1.0), crop_ratio=(ratio, ratio * 1.5))
    top, left, box_height, box_width = draw_parameters(
        64, options, generator(seed), (height, width), (8, 8)
    ).boxes.unbind(1)
    assert min(top.min(), left.min()) >= 0
    assert min(box_height.min(), box_width.min()) >= 1
    assert (top + box_height).max() <= height
    assert (left + box_width).max() <= width


def test_images_without_room_give_the_centre():
    options = Augmentation(crop_area=(0.9, 1.0))
    boxes = draw_parameters(5, options, generator(), (2000, 10), (8, 8)).boxes
    assert boxes.tolist() == [list(draw_crop_box(2000, 10, random.Random(0), area=(0.9, 1.0)))] * 5


def test_chances_are_as_likely_as_they_should_be():
    count = 6000
    draws = draw_parameters(count, EVERYTHING, generator(4), (24, 31), (16, 20))
    three, rand, jitter, erasing = draws[3:]
    for moved, most in zip(draws.shift, (2, 2), strict=True):  # a tenth of 16 and of 20 pixels
        assert stats.chisquare(np.bincount(moved + most, minlength=5)).pvalue > RARE
    assert stats.binomtest(int(draws.mirrored.sum()), count, 0.7).pvalue > RARE
    assert stats.chisquare(np.bincount(three.kinds)).pvalue > RARE
    assert stats.kstest(three.radii.numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > RARE
    assert stats.kstest(three.jitter.factors.flatten().numpy(), stats.uniform(0.7, 0.6).cdf).pvalue > RARE
    assert stats.kstest(jitter.factors.flatten().numpy(), stats.uniform(0.8, 0.4).cdf).pvalue > RARE
    for order in (jitter.order, three.jitter.order):
        codes = (order * torch.tensor([9, 3, 1])).sum(dim=1)
        counts = [int((codes == 9 * a + 3 * b + c).sum()) for a, b, c in itertools.permutations(range(3))]
        assert sum(counts) == count
        assert stats.chisquare(counts).pvalue > RARE
    assert stats.chisquare(np.bincount(rand.operations.flatten(), minlength=16)).pvalue > RARE
    same = int((rand.operations[:, 0] == rand.operations[:, 1]).sum())
    assert stats.binomtest(same, count, 1 / 16).pvalue > RARE
    assert stats.binomtest(int((rand.signs > 0).sum()), 2 * count).pvalue > RARE
    assert set(rand.signs.unique().tolist()) == {-1.0, 1.0}
    for side, values in zip((16, 20), rand.centres.unbind(dim=2), strict=True):
        assert stats.chisquare(np.bincount(values.flatten(), minlength=side)).pvalue > RARE
    assert stats.chisquare(np.bincount(erasing.noise[:200].flatten(), minlength=256)).pvalue > RARE


def test_erasing_is_distributed_as_for_single_images():
    rng, image = random.Random(4), torch.zeros(3, 40, 50, dtype=torch.uint8)
    theirs = []
    for _ in range(1500):
        rows, columns = np.nonzero(augment.random_erasing(image, rng, rate=1.0).any(0).numpy())
        theirs.append((rows.min(), columns.min(), np.ptp(rows) + 1, np.ptp(columns) + 1))
    draws = draw_parameters(3000, Augmentation(erasing=1.0), generator(4), (40, 50), (40, 50))
    ours, theirs = draws.erasing.boxes.numpy(), np.array(theirs)
    for of in (lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3]):
        assert stats.ks_2samp(of(ours), of(theirs)).pvalue > RARE
    some = draw_parameters(3000, Augmentation(erasing=0.3), generator(4), (40, 50), (40, 50)).erasing.boxes
    assert stats.binomtest(int((some[:, 2] > 0).sum()), 3000, 0.3).pvalue > RARE


def test_a_color_jitter_above_one_keeps_factors_from_zero_on():
    factors = draw_parameters(500, Augmentation(color_jitter=1.5), generator(), (8, 8), (8, 8)).color_jitter.factors
    assert 0 <= factors.min() < 0.1
    assert 2.4 < factors.max() <= 2.5


def test_what_is_off_draws_nothing():
    ours, theirs = generator(), generator()
    draws = draw_parameters(7, Augmentation(flip=0), ours, (24, 31), (8, 8))
    draw_boxes(7, theirs, 24, 31, (0.05, 1.0), (3 / 4, 4 / 3))
    assert draws[1:] == (None,) * (len(AugmentationParameters._fields) - 1)
    assert torch.equal(ours.get_state(), theirs.get_state())


# ---- All together ----------------------------------------------------------------------------------------------------

CONFIGS = st.builds(
    Augmentation,
    flip=st.sampled_from([0, 0.5, 1]),
    shift=st.sampled_from([0, 0.125, 1]),
    three_augment=st.booleans(),
    rand_augment=st.none() | st.tuples(st.integers(1, 3), st.floats(0, 40)),
    color_jitter=st.sampled_from([0.0, 0.4, 3.0]),
    erasing=st.sampled_from([0, 0.5, 1]),
)


@given(CONFIGS, st.tuples(*[st.integers(1, 12)] * 4), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_any_augmentation_of_any_size_is_pure(config, sizes, seed):
    height, width, *new = sizes
    images = torch.randint(0, 256, (5, 3, height, width), dtype=torch.uint8, generator=generator(1))
    before, state = images.clone(), torch.get_rng_state()
    found = augment_batch(images, config, generator(seed), tuple(new))
    assert found.shape == (5, 3, *new)
    assert found.dtype == torch.uint8
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(augment_batch(images, config, generator(seed), tuple(new)), found)


def test_an_image_does_not_depend_on_those_beside_it():
    draws = draw_parameters(len(IMAGES), EVERYTHING, generator(5), (24, 31), (16, 16))
    whole = apply_parameters(IMAGES, draws, 9.0, (16, 16))
    for start, stop in ((0, 1), (1, 7), (7, 12)):
        assert torch.equal(
            apply_parameters(IMAGES[start:stop], draws.select_rows(start, stop), 9.0, (16, 16)), whole[start:stop]
        )


@pytest.mark.slow
def test_applying_is_one_graph_for_torch_compile():
    """Nothing that Python decides by a value: with `fullgraph` that would be an error."""
    compiled = torch.compile(apply_parameters, backend="eager", fullgraph=True)
    draws = draw_parameters(len(IMAGES), EVERYTHING, generator(6), (24, 31), (16, 16))
    assert torch.equal(compiled(IMAGES, draws, 9.0, (16, 16)), apply_parameters(IMAGES, draws, 9.0, (16, 16)))


class Counter(TorchDispatchMode):
    """Counts what would be kernels on an accelerator, and refuses what would make it wait."""

    VIEWS = ("view", "expand", "unsqueeze", "slice", "select", "unbind", "transpose", "permute", "alias", "empty", "t.")
    WAITS = ("_local_scalar_dense", "nonzero", "item", "masked_select", "bincount", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert not name.startswith(self.WAITS), name
        self.kernels += not name.removeprefix("_").startswith(self.VIEWS)
        return func(*args, **(kwargs or {}))


def test_a_few_hundred_kernels_that_never_wait():
    config = Augmentation(rand_augment=(2, 9.0), erasing=0.25)
    with Counter() as counter:
        augment_batch(IMAGES, config, generator(), (32, 32))
    assert 100 < counter.kernels < 500
