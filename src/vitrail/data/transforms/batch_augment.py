"""Training augmentations of whole batches on their device; each image has its own random parameters.

`draw_parameters` draws everything random for the batch of all ranks, of which each rank takes its rows.
`apply_parameters` is pure arithmetic, which torch.compile can compile as one graph.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.data.transforms import batch_operations
from vitrail.data.transforms.augment import BOX_ATTEMPTS, OPERATIONS, Augmentation, max_shift

ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)
"""Area and width / height of the rectangle that random erasing overwrites, as for single images."""
BLUR_RADII = (0.1, 2.0)
THREE_JITTER = 0.3


class JitterParameters(NamedTuple):
    """Parameters for brightness, contrast and saturation."""

    factors: Tensor
    """(B, 3) float32: one factor for each."""
    order: Tensor
    """(B, 3) int64: which is applied first, second and third."""


class ShiftParameters(NamedTuple):
    """How far each image moves, in pixels."""

    down: Tensor
    """(B,) int64; negative is up."""
    right: Tensor
    """(B,) int64; negative is left."""


class ThreeAugmentParameters(NamedTuple):
    """Parameters for 3-Augment."""

    kinds: Tensor
    """(B,) int64: 0 grey, 1 solarize, 2 blur."""
    radii: Tensor
    """(B,) float32: radius of the blur."""
    jitter: JitterParameters


class RandAugmentParameters(NamedTuple):
    """Parameters for RandAugment."""

    operations: Tensor
    """(B, rounds) int64: numbers in OPERATIONS."""
    signs: Tensor
    """(B, rounds) float32: 1 or −1, the direction of geometric operations."""
    centres: Tensor
    """(B, rounds, 2) int64: y and x of the centres of cutouts."""


class ErasingParameters(NamedTuple):
    """Parameters for random erasing."""

    boxes: Tensor
    """(B, 4) int64: the rectangle as (top, left, height, width); its size is 0 if nothing is erased."""
    noise: Tensor
    """(B, 3, height, width) uint8: what replaces it."""


class AugmentationParameters(NamedTuple):
    """All random parameters of B images. A step that is off has None."""

    boxes: Tensor
    """(B, 4) int64: top, left, height and width of the crop."""
    mirrored: Tensor | None = None
    """(B,) bool: whether the image is mirrored left to right."""
    shift: ShiftParameters | None = None
    three_augment: ThreeAugmentParameters | None = None
    rand_augment: RandAugmentParameters | None = None
    color_jitter: JitterParameters | None = None
    erasing: ErasingParameters | None = None

    def select_rows(self, start: int, stop: int) -> AugmentationParameters:
        """Return the parameters of the images from `start` to `stop`."""
        rows: AugmentationParameters = _select_rows(self, start, stop)
        return rows


def _select_rows(parameters: Any, start: int, stop: int) -> Any:
    if parameters is None or isinstance(parameters, Tensor):
        return None if parameters is None else parameters[start:stop]
    return type(parameters)(*(_select_rows(part, start, stop) for part in parameters))


def augment_batch(
    images: Tensor, config: Augmentation, generator: torch.Generator, image_size: tuple[int, int]
) -> Tensor:
    """Crop and augment images (B, 3, height, width) uint8 to (B, 3, *image_size) uint8.

    The generator must be on the images' device. Each step does what `transforms.augment` does to one image, to the
    byte; only rotation, shear and translation may differ by 1.
    """
    height, width = images.shape[2:]
    draws = draw_parameters(len(images), config, generator, (height, width), image_size)
    return apply_parameters(images, draws, get_magnitude(config), image_size)


def get_magnitude(config: Augmentation) -> float:
    """Return the magnitude of RandAugment; 0 if it is off."""
    return 0.0 if config.rand_augment is None else config.rand_augment[1]


def apply_parameters(
    images: Tensor, draws: AugmentationParameters, magnitude: float, image_size: tuple[int, int]
) -> Tensor:
    """Apply drawn parameters to (B, 3, height, width) uint8 images, in the order of Augmentation's fields.

    Returns:
        (B, 3, *image_size) uint8.
    """
    images = batch_operations.crop_and_resize(images, draws.boxes, image_size, draws.mirrored)
    if draws.shift is not None:
        images = batch_operations.shift(images, *draws.shift)
    if draws.three_augment is not None:
        kinds, radii, jitter = draws.three_augment
        images = batch_operations.jitter(batch_operations.three_augment(images, kinds, radii), *jitter)
    if draws.rand_augment is not None:
        images = batch_operations.rand_augment(images, *draws.rand_augment, magnitude)
    if draws.color_jitter is not None:
        images = batch_operations.jitter(images, *draws.color_jitter)
    if draws.erasing is not None:
        boxes, noise = draws.erasing
        images = torch.where(batch_operations.mask_rectangles(boxes, *image_size), noise, images)
    return images


def draw_parameters(
    count: int,
    config: Augmentation,
    generator: torch.Generator,
    old_size: tuple[int, int],
    new_size: tuple[int, int],
) -> AugmentationParameters:
    """Draw the parameters of `count` images on the generator's device. Steps that are off draw nothing."""
    uniform = partial(torch.rand, generator=generator, device=generator.device, dtype=torch.float32)
    drawn, fits = draw_boxes(count, generator, *old_size, config.crop_area, config.crop_ratio)
    draws = AugmentationParameters(
        torch.where(fits[:, None], drawn, centre_box(*old_size, config.crop_ratio, generator.device))
    )
    if config.flip:
        draws = draws._replace(mirrored=uniform(count) < config.flip)
    if config.shift:
        most = [max_shift(side, config.shift) for side in new_size]
        draws = draws._replace(
            shift=ShiftParameters(*(_to_integers(uniform(count), 2 * side + 1) - side for side in most))
        )
    if config.three_augment:
        low, high = BLUR_RADII
        kinds, radii = _to_integers(uniform(count), 3), low + (high - low) * uniform(count)
        draws = draws._replace(
            three_augment=ThreeAugmentParameters(kinds, radii, _draw_jitter(count, generator, THREE_JITTER))
        )
    if config.rand_augment is not None:
        rounds = config.rand_augment[0]
        operations = _to_integers(uniform(count, rounds), len(OPERATIONS))
        signs = torch.where(uniform(count, rounds) < 0.5, -1.0, 1.0)
        y, x = _to_integers(uniform(count, rounds), new_size[0]), _to_integers(uniform(count, rounds), new_size[1])
        draws = draws._replace(rand_augment=RandAugmentParameters(operations, signs, torch.stack((y, x), dim=2)))
    if config.color_jitter:
        draws = draws._replace(color_jitter=_draw_jitter(count, generator, config.color_jitter))
    if config.erasing:
        erases = uniform(count) < config.erasing
        boxes, fits = draw_boxes(count, generator, *new_size, ERASED_AREA, ERASED_RATIO)
        shape = (count, 3, *new_size)
        noise = torch.randint(256, shape, generator=generator, device=generator.device, dtype=torch.uint8)
        draws = draws._replace(erasing=ErasingParameters(boxes * (erases & fits)[:, None], noise))
    return draws


def draw_boxes(
    count: int,
    generator: torch.Generator,
    height: int,
    width: int,
    area: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Draw boxes with uniform share of the area and log-uniform width / height; take the first of ten that fits.

    Returns:
        (count, 4) as (top, left, height, width), and (count,) bool: whether any fits. If not, the box is meaningless.
    """
    device = generator.device
    sizes = torch.rand(2, count, BOX_ATTEMPTS, generator=generator, device=device, dtype=torch.float32)
    places = torch.rand(count, 2, generator=generator, device=device, dtype=torch.float32)
    return place_boxes(sizes, places, height, width, area, ratio)


def place_boxes(
    sizes: Tensor, places: Tensor, height: int, width: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the boxes of `draw_boxes` for uniform numbers in [0, 1).

    Args:
        sizes: (2, count, attempts): the area and the shape of each attempt.
        places: (count, 2): top and left.
        height, width: of the image.
        area, ratio: smallest and largest share of the area, and width / height.
    """
    attempts = sizes.shape[2]
    pixels = height * width * area[0] + height * width * (area[1] - area[0]) * sizes[0]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    aspects = (low + (high - low) * sizes[1]).exp()
    sides = torch.stack((pixels / aspects, pixels * aspects), dim=2).sqrt().round()
    fits = (sides.amin(dim=2) >= 1) & (sides[:, :, 0] <= height) & (sides[:, :, 1] <= width)
    first = torch.where(fits, torch.arange(attempts, device=sizes.device), attempts - 1).amin(dim=1)
    size = sides.gather(1, first[:, None, None].expand(-1, -1, 2))[:, 0].long()
    room = torch.stack((height - size[:, 0], width - size[:, 1]), dim=1).clamp(min=0)
    return torch.cat((_to_integers(places, room + 1), size), dim=1), fits.any(dim=1)


def centre_box(height: int, width: int, ratio: tuple[float, float], device: torch.device) -> Tensor:
    """Return (4,): the largest centre crop whose shape is within `ratio`."""
    box_height = min(height, max(1, round(width / ratio[0])))
    box_width = min(width, max(1, round(height * ratio[1])))
    box = ((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)
    # Filled on the device number by number, because a copy would make the device wait.
    return torch.stack([torch.full((), value, device=device) for value in box])


def _draw_jitter(count: int, generator: torch.Generator, strength: float) -> JitterParameters:
    """Draw factors uniform in [max(0, 1 − strength), 1 + strength], and uniform orders."""
    uniform = torch.rand(2, count, 3, generator=generator, device=generator.device, dtype=torch.float32)
    low = max(0.0, 1 - strength)
    return JitterParameters(low + (1 + strength - low) * uniform[0], uniform[1].argsort(dim=1, stable=True))


def _to_integers(uniform: Tensor, below: int | Tensor) -> Tensor:
    """Turn uniform numbers in [0, 1) into uniform integers from 0 to `below` − 1."""
    # The product may be rounded up to `below`.
    return (uniform * below).long().clamp(max=below - 1)
