"""Augmentations against Pillow, torchvision, plain formulas, and the distributions they promise."""

from __future__ import annotations

import importlib
import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy import stats

import peers
import vitrail
from vitrail.data.transforms import augment as module
from vitrail.data.transforms.augment import (
    OPERATIONS,
    Augmentation,
    augment_image,
    color_jitter,
    draw_crop_box,
    flip,
    rand_augment,
    random_erasing,
    shift,
    three_augment,
)

assert peers.torchvision  # imported there in a way that works without CUDA; its transforms can follow
v2 = importlib.import_module("torchvision.transforms.v2.functional")
transforms = importlib.import_module("torchvision.transforms")

RARE = 1e-3
"""With the seeds fixed, a distribution that fits passes always; a wrong one has p-values far below this."""


def pixels(height: int = 37, width: int = 53) -> np.ndarray:
    """Smooth and noisy parts, each channel with a range of its own, so that no operation is the identity."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([np.sin(x / 7 + y / 11), np.cos(x / 5 - y / 9), np.sin(y / 6)], axis=-1)
    noise = np.random.default_rng(0).normal(0, 0.2, waves.shape)
    scaled = np.array([110, 120, 130]) + np.array([50, 65, 80]) * (waves + noise).clip(-1.2, 1.2)
    return scaled.clip(12, 240).astype(np.uint8)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).permute(2, 0, 1).contiguous()


def array(image: torch.Tensor | Image.Image) -> np.ndarray:
    return image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.array(image)


PIXELS = pixels()
PICTURE = Image.fromarray(PIXELS)
IMAGE = tensor(PIXELS)
GREY = (128, 128, 128)


class Recorder(random.Random):
    """Notes what `uniform` gave."""

    def uniform(self, a: float, b: float) -> float:
        value = super().uniform(a, b)
        self.__dict__.setdefault("drawn", []).append(((a, b), value))
        return value


# ---- Boxes -----------------------------------------------------------------------------------------------------------

SIDES = st.one_of(st.integers(1, 30), st.integers(1, 20_000))


@given(height=SIDES, width=SIDES, seed=st.integers(0, 2**32), low=st.floats(0.001, 1), ratio=st.floats(0.05, 20))
@settings(max_examples=600, deadline=None)
def test_a_crop_lies_in_the_image(height, width, seed, low, ratio):
    for options in ({}, {"area": (low, 1.0), "ratio": (ratio, ratio * 1.5)}):
        top, left, box_height, box_width = draw_crop_box(height, width, random.Random(seed), **options)
        assert min(top, left) >= 0
        assert min(box_height, box_width) >= 1
        assert top + box_height <= height
        assert left + box_width <= width


@pytest.mark.parametrize(
    ("size", "box"),
    [((1, 1), (0, 0, 1, 1)), ((20_000, 10), (9_993, 0, 13, 10)), ((10, 20_000), (0, 9_993, 10, 13))],
)
def test_images_without_room_give_the_centre(size, box):
    assert draw_crop_box(*size, random.Random(0), area=(0.9, 1.0)) == box


@pytest.mark.parametrize("size", [(500, 375), (300, 900), (90, 400)])
def test_crops_are_distributed_as_torchvisions(size):
    rng, image = random.Random(1), torch.empty(3, *size)
    ours = np.array([draw_crop_box(*size, rng) for _ in range(4000)])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        draw = transforms.RandomResizedCrop.get_params
        theirs = np.array([draw(image, [0.05, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)])
    area, ratio = lambda box: box[:, 2] * box[:, 3], lambda box: np.log(box[:, 3] / box[:, 2])
    for of in (area, ratio, lambda box: box[:, 0], lambda box: box[:, 1]):
        assert stats.ks_2samp(of(ours), of(theirs)).pvalue > RARE


def test_a_crop_that_always_fits_has_uniform_area_and_log_uniform_ratio():
    # In a square, three quarters of the area fit at any ratio up to 4/3, so that no draw is refused.
    rng = random.Random(2)
    boxes = np.array([draw_crop_box(4000, 4000, rng, area=(0.05, 0.75)) for _ in range(5000)])
    area = boxes[:, 2] * boxes[:, 3] / 4000**2
    ratio = np.log(boxes[:, 3] / boxes[:, 2])
    assert stats.kstest(area, stats.uniform(0.05, 0.70).cdf).pvalue > RARE
    assert stats.kstest(ratio, stats.uniform(math.log(3 / 4), math.log(16 / 9)).cdf).pvalue > RARE
    assert stats.spearmanr(area, ratio).pvalue > RARE
    for start, side in ((boxes[:, 0], boxes[:, 2]), (boxes[:, 1], boxes[:, 3])):
        assert stats.kstest(start / (4000 - side), stats.uniform.cdf).pvalue > RARE


def test_draws_that_do_not_fit_are_drawn_again():
    # Plain rejection in numpy, of areas and ratios together.
    generator = np.random.default_rng(3)
    area = generator.uniform(0.05, 1, 20_000)
    ratio = np.exp(generator.uniform(math.log(3 / 4), math.log(4 / 3), 20_000))
    fits = (area * ratio <= 1) & (area / ratio <= 1)
    rng = random.Random(3)
    boxes = np.array([draw_crop_box(3000, 3000, rng) for _ in range(4000)])
    drawn = boxes[:, 2] * boxes[:, 3] / 3000**2
    assert stats.ks_2samp(drawn, area[fits]).pvalue > RARE
    assert stats.ks_2samp(boxes[:, 3] / boxes[:, 2], ratio[fits]).pvalue > RARE
    assert stats.ks_2samp(drawn, area).pvalue < RARE  # refusing does change the distribution: the test can tell


# ---- Flip and erasing ------------------------------------------------------------------------------------------------


def test_flip_mirrors_at_its_rate():
    rng = random.Random(0)
    flipped = [torch.equal(flip(IMAGE, rng, 0.3), tensor(PIXELS[:, ::-1])) for _ in range(2000)]
    assert stats.binomtest(sum(flipped), 2000, 0.3).pvalue > RARE
    assert torch.equal(flip(IMAGE, rng, 0.0), IMAGE)
    assert torch.equal(flip(IMAGE, rng, 1.0), tensor(PIXELS[:, ::-1]))


def test_a_shift_is_a_crop_out_of_the_image_with_a_border():
    bordered = np.full((37 + 2 * 5, 53 + 2 * 7, 3), 128, dtype=np.uint8)
    bordered[5:-5, 7:-7] = PIXELS
    crops = {bordered[y : y + 37, x : x + 53].tobytes(): (y, x) for y in range(11) for x in range(15)}
    rng = random.Random(0)
    places = [crops[shift(IMAGE, rng, 0.125).permute(1, 2, 0).numpy().tobytes()] for _ in range(2000)]
    for values, count in zip(zip(*places, strict=True), (11, 15), strict=True):
        assert stats.chisquare(np.bincount(values, minlength=count)).pvalue > RARE


def erased_box(before: torch.Tensor, after: torch.Tensor) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((before != after).any(0).numpy())
    return rows.min(), columns.min(), rows.max() - rows.min() + 1, columns.max() - columns.min() + 1


def test_erasing_is_distributed_as_torchvisions():
    rng, image = random.Random(4), torch.zeros(3, 90, 120, dtype=torch.uint8)
    ours = np.array([erased_box(image, random_erasing(image, rng, rate=1.0)) for _ in range(1500)])
    with torch.random.fork_rng():
        torch.manual_seed(4)
        draw = transforms.RandomErasing.get_params
        theirs = np.array([draw(image, (0.02, 1 / 3), (0.3, 3.3), [0.0])[:4] for _ in range(3000)])
    for of in (lambda b: b[:, 0], lambda b: b[:, 1], lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3]):
        # Their ratio is height / width and ours width / height; a log-uniform one is nearly the same either way.
        assert stats.ks_2samp(of(ours), of(theirs)).pvalue > RARE


def test_erasing_fills_a_rectangle_with_uniform_noise_and_nothing_else():
    after = random_erasing(IMAGE, random.Random(0), rate=1.0, area=(0.3, 0.3))
    top, left, height, width = erased_box(IMAGE, after)
    assert height * width == pytest.approx(0.3 * 37 * 53, rel=0.05)
    outside = torch.ones(37, 53, dtype=torch.bool)
    outside[top : top + height, left : left + width] = False
    assert torch.equal(after[:, outside], IMAGE[:, outside])
    flat = torch.zeros(3, 300, 300, dtype=torch.uint8)
    top, left, height, width = erased_box(flat, after := random_erasing(flat, random.Random(1), 1.0, (0.3, 0.3)))
    noise = after[:, top : top + height, left : left + width]
    assert stats.chisquare(np.bincount(noise.flatten().numpy(), minlength=256)).pvalue > RARE
    assert abs(np.corrcoef(noise.flatten(1).numpy()) - np.eye(3)).max() < 0.05  # the channels are drawn apart


def test_erasing_happens_at_its_rate():
    rng = random.Random(5)
    hits = sum(not torch.equal(random_erasing(IMAGE, rng, rate=0.25), IMAGE) for _ in range(2000))
    assert stats.binomtest(hits, 2000, 0.25).pvalue > RARE


# ---- The operations of RandAugment -----------------------------------------------------------------------------------

MAGNITUDES = [0.0, 3.0, 7.5, 10.0, 14.0, 20.0, 40.0]


def apply(name: str, magnitude: float, seed: int = 0) -> np.ndarray:
    return array(OPERATIONS[name](PICTURE, magnitude, random.Random(seed)))


def luma(values: np.ndarray) -> np.ndarray:
    """ITU-R 601, in 16-bit fixed point as Pillow has it."""
    return (values.astype(np.int64) @ np.array([19595, 38470, 7471]) + 32768) >> 16


def blend(degenerate: np.ndarray | int, factor: float) -> np.ndarray:
    mixed = degenerate + factor * (PIXELS.astype(np.float64) - degenerate)
    return mixed.clip(0, 255)


def smoothed() -> np.ndarray:
    """Centre 5, neighbours 1, over 13; the border stays."""
    wide = PIXELS.astype(np.float64)
    shifted = [wide[y : y + 35, x : x + 51] for y in range(3) for x in range(3)]
    result = wide.copy()
    result[1:-1, 1:-1] = np.floor((sum(shifted) + 4 * wide[1:-1, 1:-1]) / 13 + 0.5)
    return result


PILLOW = {
    "autocontrast": lambda m: ImageOps.autocontrast(PICTURE),
    "equalize": lambda m: ImageOps.equalize(PICTURE),
    "invert": lambda m: ImageOps.invert(PICTURE),
    "posterize": lambda m: ImageOps.posterize(PICTURE, {0: 1, 3: 1, 7.5: 3, 10: 4, 14: 5, 20: 8, 40: 8}[m]),
    "solarize": lambda m: ImageOps.solarize(PICTURE, {0: 0, 3: 76, 7.5: 192, 10: 256, 14: 358, 20: 512, 40: 1024}[m]),
    "color": lambda m: ImageEnhance.Color(PICTURE).enhance(0.1 + 0.18 * m),
    "contrast": lambda m: ImageEnhance.Contrast(PICTURE).enhance(0.1 + 0.18 * m),
    "brightness": lambda m: ImageEnhance.Brightness(PICTURE).enhance(0.1 + 0.18 * m),
    "sharpness": lambda m: ImageEnhance.Sharpness(PICTURE).enhance(0.1 + 0.18 * m),
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", PILLOW)
def test_colour_operations_are_pillows_with_the_parameters_of_the_reference(name, magnitude):
    difference = apply(name, magnitude).astype(int) - np.array(PILLOW[name](magnitude))
    # The same factor written in another order of operations may differ in its last bit, and a value by one.
    assert abs(difference).max() <= (1 if name in ("color", "contrast", "brightness", "sharpness") else 0)


FORMULAS = {
    "invert": lambda m: 255 - PIXELS,
    "posterize": lambda m: PIXELS & (0xFF << (8 - min(8, max(1, math.floor(0.4 * m)))) & 0xFF),
    "solarize": lambda m: np.where(math.floor(25.6 * m) > PIXELS, PIXELS, 255 - PIXELS),
    "solarize-add": lambda m: np.where(PIXELS < 128, (PIXELS.astype(int) + math.floor(11 * m)).clip(0, 255), PIXELS),
    "brightness": lambda m: blend(0, 0.1 + 0.18 * m),
    "contrast": lambda m: blend(math.floor(luma(PIXELS).mean() + 0.5), 0.1 + 0.18 * m),
    "color": lambda m: blend(luma(PIXELS)[:, :, None], 0.1 + 0.18 * m),
    "sharpness": lambda m: blend(smoothed(), 0.1 + 0.18 * m),
}


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize("name", FORMULAS)
def test_colour_operations_are_their_formulas(name, magnitude):
    expected = np.asarray(FORMULAS[name](magnitude), dtype=np.float64)
    # Blends end in a fraction that Pillow cuts off.
    difference = expected - apply(name, magnitude)
    assert difference.min() > -1e-3
    assert difference.max() < 1
    if name in ("invert", "posterize", "solarize", "solarize-add"):
        assert not difference.any()


def test_histogram_operations_are_torchvisions():
    assert np.array_equal(apply("equalize", 10), array(v2.equalize(IMAGE)))
    stretched, theirs = apply("autocontrast", 10).astype(int), array(v2.autocontrast(IMAGE))
    assert abs(stretched - theirs).max() <= 1
    assert stretched.min(axis=(0, 1)).tolist() == [0, 0, 0]
    assert stretched.max(axis=(0, 1)).tolist() == [255, 255, 255]


@pytest.mark.parametrize("magnitude", [0.0, 3.0, 7.5])
@pytest.mark.parametrize("name", ["brightness", "contrast", "color", "sharpness"])
def test_enhancements_are_torchvisions(name, magnitude):
    theirs = getattr(v2, f"adjust_{'saturation' if name == 'color' else name}")(IMAGE, 0.1 + 0.18 * magnitude)
    assert abs(apply(name, magnitude).astype(int) - array(theirs)).max() <= 2


def resampled(matrix: tuple[float, ...], source: np.ndarray = PIXELS) -> np.ndarray:
    """Bilinear sampling of `source` at matrix · (x, y, 1), pixel centres at halves, grey where that is outside."""
    height, width, _ = source.shape
    y, x = np.mgrid[:height, :width] + 0.5
    u, v = matrix[0] * x + matrix[1] * y + matrix[2], matrix[3] * x + matrix[4] * y + matrix[5]
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    left, top = np.floor(u - 0.5), np.floor(v - 0.5)
    result = np.zeros(source.shape)
    for dy, dx in itertools.product((0, 1), (0, 1)):
        weight = (1 - abs(u - 0.5 - left - dx)) * (1 - abs(v - 0.5 - top - dy))
        rows = (top + dy).clip(0, height - 1).astype(int)
        columns = (left + dx).clip(0, width - 1).astype(int)
        result += weight[:, :, None] * source[rows, columns]
    return np.where(inside[:, :, None], result, 128)


def rotation(degrees: float) -> tuple[float, ...]:
    """About the middle of the picture of 53 × 37."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (
        *(cosine, -sine, 26.5 - 26.5 * cosine + 18.5 * sine),
        *(sine, cosine, 18.5 - 26.5 * sine - 18.5 * cosine),
    )


GEOMETRY = {
    "rotate": lambda m: rotation(3 * m),
    "shear-x": lambda m: (1, 0.03 * m, 0, 0, 1, 0),
    "shear-y": lambda m: (1, 0, 0, 0.03 * m, 1, 0),
    "translate-x": lambda m: (1, 0, 53 * m / 22.4, 0, 1, 0),
    "translate-y": lambda m: (1, 0, 0, 0, 1, 37 * m / 22.4),
}


@pytest.mark.parametrize("magnitude", [0.0, 2.0, 5.0, 10.0, 15.0, 20.0])
@pytest.mark.parametrize("name", GEOMETRY)
def test_geometric_operations_go_either_way_by_the_amount_of_the_reference(name, magnitude):
    ways = [resampled(GEOMETRY[name](sign * magnitude)) for sign in (1, -1)]
    seen = [0, 0]
    for seed in range(40):
        ours = apply(name, magnitude, seed)
        # Where a sampling point is within rounding of the border either answer is right: one pixel in a thousand.
        fits = [np.mean(abs(ours - way).max(axis=2) >= 1.01) < 0.001 for way in ways]
        assert any(fits)
        seen[fits.index(True)] += 1
    if magnitude:
        assert min(seen) >= 8  # of 40; p is about 1e-4


@pytest.mark.parametrize(("magnitude", "half"), [(0.0, 0), (3.0, 2), (10.0, 7), (20.0, 13)])
def test_cutout_is_a_grey_square_about_any_pixel(magnitude, half):
    dark = Image.new("RGB", (53, 37))
    boxes = []
    for seed in range(2500 if half == 2 else 50):
        cut = np.array(OPERATIONS["cutout"](dark, magnitude, random.Random(seed))).any(axis=2)
        assert set(np.unique(cut)) <= {False, True}
        rows, columns = cut.any(axis=1), cut.any(axis=0)
        assert np.array_equal(cut, rows[:, None] & columns[None])
        boxes.append(
            [(np.flatnonzero(side).min(), np.flatnonzero(side).max() + 1) for side in (rows, columns)] if half else []
        )
    if not half:
        return
    for axis, side in enumerate((37, 53)):
        possible = {(max(0, centre - half), min(side, centre + half)) for centre in range(side)}
        drawn = [box[axis] for box in boxes]
        assert set(drawn) <= possible
        if half == 2:
            counts = [drawn.count(box) for box in sorted(possible)]
            assert len(possible) == side  # each centre can be told from its box
            assert stats.chisquare(counts).pvalue > RARE
    grey = OPERATIONS["cutout"](dark, 10.0, random.Random(0)).getcolors()
    assert {color for _, color in grey} == {(0, 0, 0), GREY}


def test_the_table_has_the_sixteen_operations_of_the_reference():
    assert len(OPERATIONS) == 16
    assert set(OPERATIONS) == {*PILLOW, *FORMULAS, *GEOMETRY, "cutout"}


def test_each_operation_is_drawn_as_often_as_the_others(monkeypatch):
    drawn = []

    def note(name):
        return lambda picture, magnitude, rng: drawn.append((name, magnitude)) or picture

    monkeypatch.setattr(module, "OPERATIONS", {name: note(name) for name in OPERATIONS})
    rng = random.Random(6)
    for _ in range(2400):
        rand_augment(IMAGE[:, :2, :2], rng, operations=3, magnitude=7.0)
    assert len(drawn) == 7200
    assert {magnitude for _, magnitude in drawn} == {7.0}
    names = [name for name, _ in drawn]
    assert stats.chisquare([names.count(name) for name in OPERATIONS]).pvalue > RARE
    # The operations of one image are drawn apart from each other.
    pairs = [(first, second) for first, second in zip(names[::3], names[1::3], strict=True)]
    assert stats.binomtest(sum(first == second for first, second in pairs), 2400, 1 / 16).pvalue > RARE


def test_operations_follow_each_other(monkeypatch):
    for steps, expected in ((1, 255 - PIXELS), (2, PIXELS), (3, 255 - PIXELS)):
        monkeypatch.setattr(module, "OPERATIONS", {"invert": OPERATIONS["invert"]})
        assert np.array_equal(array(rand_augment(IMAGE, random.Random(0), steps)), expected)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (2, 3), (64, 64)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_takes_every_size(name, size):
    picture = Image.fromarray(pixels(*size))
    for magnitude in (0.0, 10.0, 30.0):
        result = OPERATIONS[name](picture, magnitude, random.Random(0))
        assert (result.size, result.mode) == (picture.size, "RGB")


# ---- Colour jitter and 3-Augment -------------------------------------------------------------------------------------

ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
ORDERS = list(itertools.permutations(range(3)))


def jittered(picture: Image.Image, factors: list[float], order: tuple[int, ...]) -> np.ndarray:
    for step in order:
        picture = ENHANCERS[step](picture).enhance(factors[step])
    return np.array(picture)


def test_colour_jitter_is_pillows_enhancements_in_any_order():
    seen = set()
    for seed in range(100):
        rng = Recorder(seed)
        ours = array(color_jitter(IMAGE, rng, 0.2, 0.4, 1.3))
        ranges, factors = zip(*rng.drawn, strict=True)
        assert np.ravel(ranges).tolist() == [0.8, 1.2, 0.6, 1.4, 0.0, 2.3]
        fits = [order for order in ORDERS if np.array_equal(ours, jittered(PICTURE, factors, order))]
        assert fits
        seen |= set(fits) if len(fits) == 1 else set()
    assert seen == set(ORDERS)


def test_colour_jitter_factors_are_uniform():
    rng, flat = random.Random(7), torch.full((3, 1, 1), 180, dtype=torch.uint8)
    values = [color_jitter(flat, rng, 0.4, 0.0, 0.0)[0, 0, 0].item() for _ in range(1500)]
    smear = np.random.default_rng(0).uniform(0, 1, 1500)  # undoes the rounding to whole values
    assert stats.kstest((values + smear) / 180, stats.uniform(0.6, 0.8).cdf).pvalue > RARE


def test_three_augment_is_one_of_three_and_a_jitter():
    seen = {"grey": 0, "solarize": 0, "blur": 0}
    for seed in range(600):
        rng = Recorder(seed)
        ours = array(three_augment(IMAGE, rng))
        *blur, _, _, _ = rng.drawn
        assert np.allclose([span for span, _ in rng.drawn[-3:]], (0.7, 1.3))
        kinds = {"grey": PICTURE.convert("L").convert("RGB"), "solarize": ImageOps.solarize(PICTURE, 128)}
        if blur:
            [(span, radius)] = blur
            assert span == (0.1, 2.0)
            kinds = {"blur": PICTURE.filter(ImageFilter.GaussianBlur(radius))}
        factors = [factor for _, factor in rng.drawn[-3:]]
        [kind] = {
            kind
            for (kind, picture), order in itertools.product(kinds.items(), ORDERS)
            if np.array_equal(ours, jittered(picture, factors, order))
        }
        seen[kind] += 1
    assert stats.chisquare(list(seen.values())).pvalue > RARE


# ---- All together ----------------------------------------------------------------------------------------------------

EVERYTHING = Augmentation(flip=0.7, shift=0.2, three_augment=True, rand_augment=(2, 9.0), color_jitter=0.2, erasing=0.6)
FUNCTIONS = {
    "flip": flip,
    "shift": shift,
    "rand_augment": rand_augment,
    "color_jitter": color_jitter,
    "random_erasing": lambda image, rng: random_erasing(image, rng, rate=0.9),
    "three_augment": three_augment,
    "augment": lambda image, rng: augment_image(image, EVERYTHING, rng),
}


def global_states() -> tuple[bytes, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (the global state is what must not move)
    return repr((random.getstate(), name, rest)).encode(), keys.tobytes(), torch.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_augmentations_are_pure(name):
    function = FUNCTIONS[name]
    tall = torch.zeros(3, 80, 60, dtype=torch.uint8)
    layouts = {
        "contiguous": IMAGE,
        "channels last": torch.from_numpy(PIXELS.copy()).permute(2, 0, 1),
        "crop of a larger one": tall[:, 3:40, 5:58].copy_(IMAGE),
        "transposed": IMAGE.transpose(1, 2).contiguous().transpose(1, 2),
    }
    before = global_states()
    for seed in range(25):
        results = [function(layout, random.Random(seed)) for layout in layouts.values()]
        for result in results:
            assert result.dtype == torch.uint8
            assert torch.equal(result, results[0])
            assert result.shape == (3, 37, 53)
    assert global_states() == before
    for layout, image in layouts.items():
        assert torch.equal(image, tensor(PIXELS)), layout
    assert len({function(IMAGE, random.Random(seed)).numpy().tobytes() for seed in range(25)}) > 1


def test_augment_is_its_parts_in_order():
    for seed in range(30):
        rng = random.Random(seed)
        expected = three_augment(shift(flip(IMAGE, rng, 0.7), rng, 0.2), rng)
        expected = color_jitter(rand_augment(expected, rng, 2, 9.0), rng, 0.2, 0.2, 0.2)
        expected = random_erasing(expected, rng, 0.6)
        assert torch.equal(augment_image(IMAGE, EVERYTHING, random.Random(seed)), expected)


def test_what_is_off_draws_nothing():
    rng = random.Random(0)
    before = rng.getstate()
    assert torch.equal(augment_image(IMAGE, Augmentation(flip=0), rng), IMAGE)
    assert rng.getstate() == before
    rng = random.Random(0)
    assert torch.equal(
        augment_image(IMAGE, Augmentation(flip=0, rand_augment=(2, 9)), random.Random(0)),
        rand_augment(IMAGE, rng, 2, 9),
    )


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"crop_area": (0.0, 1.0)}, r"crop_area = \(0.0, 1.0\): give \(least, greatest\) shares with 0 < least"),
        ({"crop_area": (0.5, 1.5)}, "crop_area"),
        ({"crop_area": (0.8, 0.5)}, "crop_area"),
        ({"crop_area": (math.nan, 0.5)}, "crop_area"),
        ({"crop_ratio": (0.0, 1.0)}, r"crop_ratio = \(0.0, 1.0\): give"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio"),
        ({"crop_ratio": (1.0, math.inf)}, "crop_ratio"),
        ({"flip": 1.5}, "flip = 1.5: input should be less than or equal to 1"),
        ({"erasing": -0.1}, "erasing = -0.1"),
        ({"rand_augment": (0, 10.0)}, r"rand_augment = \(0, 10.0\): give \(operations, magnitude\)"),
        ({"rand_augment": (2, -1.0)}, "rand_augment"),
        ({"rand_augment": (2, math.nan)}, "rand_augment"),
        ({"color_jitter": -0.4}, "color_jitter = -0.4: give a number from 0 up"),
        ({"colour_jitter": 0.4}, "did you mean 'color_jitter'"),
    ],
)
def test_impossible_augmentations_are_refused_in_a_sentence(wrong, sentence):
    with pytest.raises(vitrail.ConfigError, match=sentence):
        Augmentation(**wrong)


def test_bounds_themselves_are_allowed():
    Augmentation(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=1, erasing=1, rand_augment=(1, 0.0), color_jitter=2)
