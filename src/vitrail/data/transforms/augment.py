"""Training augmentations: crop box, flip, shift, RandAugment, 3-Augment, colour jitter, random erasing.

Each is a pure function of a uint8 image (3, height, width), of any strides, and an explicit `random.Random`, and
returns a uint8 image of the same shape. No global random state is used, so the same seed gives the same bytes in any
process. A function may return its input unchanged, but never writes into it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Annotated, Self

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from pydantic import Field, model_validator
from torch import Tensor

from vitrail.config import Config

Probability = Annotated[float, Field(ge=0, le=1)]
"""A probability."""

GREY = (128, 128, 128)
"""Fills the pixels that a geometric operation leaves empty, as in the RandAugment reference."""


class Augmentation(Config):
    """How training images are augmented. After the crop, the steps are applied in the order of the fields.

    Raises:
        ConfigError: a value is out of its range, or an unknown field is given.
    """

    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest share of the image that the random crop covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest width / height of the random crop."""
    flip: Probability = 0.5
    """Probability of mirroring the image left to right."""
    shift: Probability = 0.0
    """How far the image may move in each direction, as a share of its side; empty pixels become grey. For an uncropped
    32-pixel image, 0.125 equals the usual padding by four pixels and random crop of 32."""
    three_augment: bool = False
    """DeiT III's 3-Augment, which includes its own colour jitter."""
    rand_augment: tuple[int, float] | None = None
    """RandAugment as (operations, magnitude). Magnitudes are 0 to 10; AugReg goes up to (2, 20)."""
    color_jitter: float = 0.0
    """How far the factors of brightness, contrast and saturation may differ from 1."""
    erasing: Probability = 0.0
    """Probability of overwriting a rectangle with noise."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Each comparison is written so that NaN fails it.
        low, high = self.crop_area
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_area = {self.crop_area}: give (least, greatest) shares with 0 < least ≤ greatest ≤ 1"
            )
        low, high = self.crop_ratio
        if not 0 < low <= high < math.inf:
            raise ValueError(f"crop_ratio = {self.crop_ratio}: give (least, greatest) width / height, both above 0")
        if self.rand_augment is not None:
            operations, magnitude = self.rand_augment
            if operations < 1 or not 0 <= magnitude < math.inf:
                raise ValueError(
                    f"rand_augment = {self.rand_augment}: give (operations, magnitude), at least 1 and 0; "
                    "leave it out to have none"
                )
        if not 0 <= self.color_jitter < math.inf:
            raise ValueError(f"color_jitter = {self.color_jitter}: give a number from 0 up, most often below 1")
        return self


def augment_image(image: Tensor, config: Augmentation, rng: random.Random) -> Tensor:
    """Apply all steps of `config` after the crop to a (3, height, width) uint8 image.

    Steps that are off draw nothing from `rng`.
    """
    if config.flip:
        image = flip(image, rng, config.flip)
    if config.shift:
        image = shift(image, rng, config.shift)
    if config.three_augment:
        image = three_augment(image, rng)
    if config.rand_augment is not None:
        image = rand_augment(image, rng, *config.rand_augment)
    if config.color_jitter:
        image = color_jitter(image, rng, config.color_jitter, config.color_jitter, config.color_jitter)
    if config.erasing:
        image = random_erasing(image, rng, config.erasing)
    return image


# ---- Boxes -----------------------------------------------------------------------------------------------------------

BOX_ATTEMPTS = 10
"""How often a box size is drawn until one fits."""


def draw_crop_box(
    height: int,
    width: int,
    rng: random.Random,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """Draw an Inception crop, with uniform share of the area and log-uniform width / height.

    Returns:
        (top, left, height, width). If no drawn box fits a very long image, the largest centre crop within `ratio`.
    """
    size = _draw_size(height, width, rng, area, ratio)
    if size is not None:
        return _place_box(height, width, *size, rng)
    low, high = ratio
    box_height = min(height, max(1, round(width / low)))
    box_width = min(width, max(1, round(height * high)))
    return (height - box_height) // 2, (width - box_width) // 2, box_height, box_width


def _draw_size(
    height: int, width: int, rng: random.Random, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int] | None:
    """Return height and width of a random box that fits, or None if no attempt did."""
    for _ in range(BOX_ATTEMPTS):
        pixels = height * width * rng.uniform(*area)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        box_height, box_width = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
        if 1 <= box_height <= height and 1 <= box_width <= width:
            return box_height, box_width
    return None


def _place_box(
    height: int, width: int, box_height: int, box_width: int, rng: random.Random
) -> tuple[int, int, int, int]:
    return rng.randint(0, height - box_height), rng.randint(0, width - box_width), box_height, box_width


# ---- On tensors ------------------------------------------------------------------------------------------------------


def flip(image: Tensor, rng: random.Random, rate: float = 0.5) -> Tensor:
    """Mirror an image left to right with probability `rate`."""
    return image.flip(2) if rng.random() < rate else image


def shift(image: Tensor, rng: random.Random, share: float = 0.125) -> Tensor:
    """Move an image by a random number of whole pixels, up to `share` of each side; empty pixels become grey."""
    _, height, width = image.shape
    down, right = (rng.randint(-most, most) for most in (max_shift(height, share), max_shift(width, share)))
    moved = torch.full_like(image, GREY[0], memory_format=torch.contiguous_format)
    moved[:, max(0, down) : height + down, max(0, right) : width + right] = image[
        :, max(0, -down) : height - down, max(0, -right) : width - right
    ]
    return moved


def max_shift(side: int, share: float) -> int:
    """Return the most pixels that an image with this side may move."""
    return round(side * share)


def random_erasing(
    image: Tensor,
    rng: random.Random,
    rate: float = 0.25,
    area: tuple[float, float] = (0.02, 1 / 3),
    ratio: tuple[float, float] = (0.3, 3.3),
) -> Tensor:
    """Overwrite a rectangle with noise, with probability `rate`; its area and shape are drawn like a crop's."""
    if rng.random() >= rate:
        return image
    _, image_height, image_width = image.shape
    size = _draw_size(image_height, image_width, rng, area, ratio)
    if size is None:
        return image
    top, left, height, width = _place_box(image_height, image_width, *size, rng)
    noise = torch.frombuffer(bytearray(rng.randbytes(3 * height * width)), dtype=torch.uint8)
    erased = image.clone()
    erased[:, top : top + height, left : left + width] = noise.view(3, height, width)
    return erased


# ---- On Pillow images ------------------------------------------------------------------------------------------------


def rand_augment(image: Tensor, rng: random.Random, operations: int = 2, magnitude: float = 10.0) -> Tensor:
    """Apply RandAugment as in AugReg: `operations` random ones of OPERATIONS, all at `magnitude`."""
    picture = _to_pillow(image)
    names = list(OPERATIONS)
    for _ in range(operations):
        picture = OPERATIONS[rng.choice(names)](picture, magnitude, rng)
    return _to_tensor(picture)


def color_jitter(
    image: Tensor, rng: random.Random, brightness: float = 0.4, contrast: float = 0.4, saturation: float = 0.4
) -> Tensor:
    """Change brightness, contrast and saturation in random order, by factors uniform in [max(0, 1 − x), 1 + x]."""
    return _to_tensor(_jitter(_to_pillow(image), rng, brightness, contrast, saturation))


def three_augment(image: Tensor, rng: random.Random) -> Tensor:
    """Apply DeiT III's 3-Augment: greyscale, solarize or Gaussian blur at random, then a colour jitter of 0.3."""
    picture = _to_pillow(image)
    match rng.randrange(3):
        case 0:
            picture = picture.convert("L").convert("RGB")
        case 1:
            picture = ImageOps.solarize(picture, 128)
        case _:
            picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.1, 2.0)))
    return _to_tensor(_jitter(picture, rng, 0.3, 0.3, 0.3))


def _jitter(
    picture: Image.Image, rng: random.Random, brightness: float, contrast: float, saturation: float
) -> Image.Image:
    strengths = (
        (ImageEnhance.Brightness, brightness),
        (ImageEnhance.Contrast, contrast),
        (ImageEnhance.Color, saturation),
    )
    steps = [(enhancer, rng.uniform(max(0.0, 1 - strength), 1 + strength)) for enhancer, strength in strengths]
    rng.shuffle(steps)
    for enhancer, factor in steps:
        picture = enhancer(picture).enhance(factor)
    return picture


def _to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


# ---- The operations of RandAugment -----------------------------------------------------------------------------------

Operation = Callable[[Image.Image, float, random.Random], Image.Image]
"""Takes a picture, a magnitude (0 to 10 or more) and a random generator; returns a picture of the same size."""

REFERENCE_SIDE = 224
"""The reference gives distances in pixels of a 224-pixel image; here they are scaled to the image."""


def _choose_sign(value: float, rng: random.Random) -> float:
    return -value if rng.random() < 0.5 else value


def _affine(picture: Image.Image, matrix: tuple[float, float, float, float, float, float]) -> Image.Image:
    """Transform by a `matrix` from new to old coordinates; the origin is the upper left corner."""
    return picture.transform(
        picture.size, Image.Transform.AFFINE, matrix, resample=Image.Resampling.BILINEAR, fillcolor=GREY
    )


def _autocontrast(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return ImageOps.autocontrast(picture)


def _equalize(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return ImageOps.equalize(picture)


def _invert(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return ImageOps.invert(picture)


def _rotate(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    degrees = _choose_sign(magnitude / 10 * 30, rng)
    return picture.rotate(degrees, resample=Image.Resampling.BILINEAR, fillcolor=GREY)


def _posterize(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    # As in the reference, a larger magnitude keeps more bits and so changes less. Below 2.5 the reference keeps no
    # bits and the image becomes black; here one bit is kept. There are eight bits.
    return ImageOps.posterize(picture, min(8, max(1, int(magnitude / 10 * 4))))


def _solarize(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    # As in the reference: from magnitude 10 on, no value reaches the threshold and nothing happens.
    return ImageOps.solarize(picture, int(magnitude / 10 * 256))


def _solarize_add(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    added = int(magnitude / 10 * 110)
    return picture.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Return an operation with a factor from 0.1 to 1.9; 1 leaves the picture unchanged."""

    def operation(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
        return enhancer(picture).enhance(magnitude / 10 * 1.8 + 0.1)

    return operation


def _shear_x(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return _affine(picture, (1, _choose_sign(magnitude / 10 * 0.3, rng), 0, 0, 1, 0))


def _shear_y(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return _affine(picture, (1, 0, 0, _choose_sign(magnitude / 10 * 0.3, rng), 1, 0))


def _translate_x(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return _affine(picture, (1, 0, _choose_sign(_translation(picture.width, magnitude), rng), 0, 1, 0))


def _translate_y(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    return _affine(picture, (1, 0, 0, 0, 1, _choose_sign(_translation(picture.height, magnitude), rng)))


def _translation(side: int, magnitude: float) -> float:
    return magnitude / 10 * 100 / REFERENCE_SIDE * side


def _cutout(picture: Image.Image, magnitude: float, rng: random.Random) -> Image.Image:
    half = round(magnitude / 10 * 40 / REFERENCE_SIDE * min(picture.size))
    x, y = rng.randrange(picture.width), rng.randrange(picture.height)
    cut = picture.copy()
    cut.paste(GREY, (max(0, x - half), max(0, y - half), min(picture.width, x + half), min(picture.height, y + half)))
    return cut


OPERATIONS: dict[str, Operation] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "invert": _invert,
    "rotate": _rotate,
    "posterize": _posterize,
    "solarize": _solarize,
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "cutout": _cutout,
    "solarize-add": _solarize_add,
}
"""The sixteen operations of the RandAugment reference, in its order."""
