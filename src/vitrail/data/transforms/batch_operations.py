"""The arithmetic of augmentation on whole batches: what `transforms.augment` does to one image, done to many at once.

Shapes: B images, (B, 3, height, width) uint8; a parameter is (B,), one per image. Nothing is random here, and Python
reads no value of a tensor, so an accelerator never waits and torch.compile can compile everything as one graph.

Colours, tables, blur and crop equal those of Pillow and torch to the bit. Rotation, shear and translation differ by at
most 1 from Pillow, which computes them in double precision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.transforms.augment import GREY, OPERATIONS, REFERENCE_SIDE
from vitrail.data.transforms.decode import LUMA

OPERATION_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
"""The number of each RandAugment operation."""
FILL = GREY[0]
ROUNDING_MARGIN = 2**-20
"""Added before truncation: rounding may leave a value just below a whole number."""

_GEOMETRIC = ("rotate", "shear-x", "shear-y", "translate-x", "translate-y")


def per_image(values: Tensor) -> Tensor:
    """Reshape (B,) to (B, 1, 1, 1), to broadcast against images."""
    return values[:, None, None, None]


# ---- Crop ------------------------------------------------------------------------------------------------------------


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int], mirrored: Tensor | None = None) -> Tensor:
    """Crop each image to its box, (B, 4) as (top, left, height, width), and resize it with antialias.

    The result equals `F.interpolate` on uint8, to the bit if a box is at most four times as large as `size`: rows
    first, rounded, then columns, each as a product with integer weights. Images with `mirrored` (B,) are mirrored.
    """
    count, channels, height, width = images.shape
    top, left, box_height, box_width = boxes.double().unbind(dim=1)
    weights, unit = _resize_weights(left, box_width, width, size[1], mirrored)
    rows = images.flatten(1, 2).float() @ weights.transpose(1, 2)
    rows = _divide_rounding(rows, unit).view(count, channels, height, size[1])
    weights, unit = _resize_weights(top, box_height, height, size[0])
    return _divide_rounding(weights[:, None] @ rows, unit[:, :, :, None]).to(torch.uint8)


def _resize_weights(
    start: Tensor, length: Tensor, side: int, size: int, mirrored: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weight of each of `side` pixels in each of `size` new ones (B, size, side), and their sum (B, 1, 1).

    All are integers in float32. A weighted sum of pixels stays below 2²⁴, where float32 is exact.
    """
    scale = length / size
    places = torch.arange(0.5, size, dtype=torch.float64, device=start.device)
    if mirrored is not None:
        places = torch.where(mirrored[:, None], size - places, places)
    centres = (scale[:, None] * places)[:, :, None]
    pixels = (torch.arange(0.5, side, dtype=torch.float64, device=start.device) - start[:, None])[:, None]
    distances = (pixels - centres) * scale.clamp(min=1).reciprocal()[:, None, None]
    inside = (pixels > 0) & (pixels < length[:, None, None])
    weights = torch.where(inside, 1 - distances.abs(), 0).clamp(min=0)
    weights = weights / weights.sum(dim=2, keepdim=True)
    # Use as many bits (14, 15 or 16) as keep the rounded largest weight below 2¹⁵.
    largest = weights.amax(dim=(1, 2), keepdim=True)
    unit = (1 << 14) * (1 + (largest < 1 - 2**-16) + 2 * (largest < 0.5 - 2**-17))
    return (weights * unit + 0.5).floor().float(), unit.float()


def _divide_rounding(sums: Tensor, unit: Tensor) -> Tensor:
    """Divide and round in float32; the unit is a power of two, so the division is exact."""
    return ((sums + unit / 2) / unit).floor().clamp(max=255)


def shift(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Move each image by whole pixels (B,); empty pixels become grey."""
    for offsets, dim in ((down, 2), (right, 3)):
        side = images.shape[dim]
        places = torch.arange(side, device=images.device) - offsets[:, None]
        shape = [len(images), 1, 1, 1]
        shape[dim] = side
        inside = ((places >= 0) & (places < side)).view(shape)
        taken = images.gather(dim, places.clamp(0, side - 1).view(shape).expand_as(images))
        images = torch.where(inside, taken, FILL)
    return images


# ---- Colours ---------------------------------------------------------------------------------------------------------


def blend(degenerate: Tensor | float, images: Tensor, factors: Tensor | float) -> Tensor:
    """Blend from `degenerate` (factor 0) to the image (factor 1) and beyond; truncate as Pillow does."""
    return ((images.float() - degenerate) * factors + degenerate).clamp(0, 255).to(torch.uint8)


def luma(images: Tensor) -> Tensor:
    """Return the grey values (B, 1, height, width) int32, as Pillow computes them."""
    red, green, blue = images.int().unbind(dim=1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2] + 0x8000 >> 16)[:, None]


def mean_luma(grey: Tensor) -> Tensor:
    """Return (B, 1, 1, 1) int64: the rounded mean of each image's grey values."""
    pixels = grey.shape[2] * grey.shape[3]
    return (2 * grey.sum(dim=(1, 2, 3), keepdim=True) + pixels) // (2 * pixels)


def smooth(images: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH: five times each pixel plus its eight neighbours, over 13; the border is unchanged."""
    if min(images.shape[2:]) < 3:
        return images
    values = images.short()
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    sums = rows[:, :, :, :-2] + rows[:, :, :, 1:-1] + rows[:, :, :, 2:] + 4 * values[:, :, 1:-1, 1:-1]
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = ((2 * sums + 13) // 26).to(torch.uint8)
    return result


def jitter(images: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change brightness, contrast and saturation by `factors` (B, 3), in the order (B, 3)."""
    for kind in order.unbind(dim=1):
        grey = luma(images)
        degenerate = torch.where(per_image(kind == 1), mean_luma(grey), torch.where(per_image(kind == 2), grey, 0))
        images = blend(degenerate, images, per_image(factors.gather(1, kind[:, None])[:, 0]))
    return images


def shift_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Move the hue of each image (B, 3, height, width) by `turns` (B,) of the colour circle; grey stays grey.

    Each pixel keeps its largest and smallest value, as in a conversion to HSV and back.
    """
    colours = images.float()
    high, low = colours.amax(dim=1, keepdim=True), colours.amin(dim=1, keepdim=True)
    red, green, blue = colours.split(1, dim=1)
    spread = high - low
    # The hue in sixths of the circle: red is 0, green 2, blue 4.
    side = torch.where(high == red, green - blue, torch.where(high == green, blue - red, red - green))
    start = torch.where(high == red, 0.0, torch.where(high == green, 2.0, 4.0))
    hue = start + side / spread.clamp(min=1) + 6 * per_image(turns)
    distances = torch.cat([(hue + shift) % 6 for shift in (5, 3, 1)], dim=1)
    shares = torch.minimum(distances, 4 - distances).clamp(0, 1)
    return (high - spread * shares).round().clamp(0, 255).to(torch.uint8)


def solarize(images: Tensor) -> Tensor:
    """Invert the values from 128 on."""
    return torch.where(images < 128, images, 255 - images)


def gaussian_blur(images: Tensor, radii: Tensor) -> Tensor:
    """Blur each image (B, C, height, width) by a Gaussian whose deviation is `radii` (B,) pixels; 0 changes nothing.

    Two products with matrices of weights: far less memory traffic than `blur`, and any radius. At the border the
    weights of the pixels that exist are scaled up to 1.
    """
    rows, columns = (_blur_weights(side, radii) for side in images.shape[2:])
    blurred = rows[:, None] @ images.float() @ columns[:, None].transpose(2, 3)
    return blurred.round().clamp(0, 255).to(torch.uint8)


def _blur_weights(side: int, radii: Tensor) -> Tensor:
    """Return (B, side, side): the weight of each pixel in each blurred one."""
    places = torch.arange(side, dtype=torch.float32, device=radii.device)
    distances = (places - places[:, None]) / radii.clamp(min=0.05)[:, None, None]
    return (-distances.square() / 2).softmax(dim=2)


# ---- Tables ----------------------------------------------------------------------------------------------------------


def histograms(values: Tensor) -> Tensor:
    """Count how often each value of (B, 3, pixels) int64 occurs in each channel: (B, 3, 256) int32."""
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=values.device)
    return counts.scatter_add(2, values, torch.ones(1, 1, 1, dtype=torch.int32, device=values.device).expand_as(values))


def autocontrast_tables(values: Tensor) -> Tensor:
    """Return (B, 3, 256) uint8 tables that stretch the values of each channel to 0 … 255."""
    low, high = values.amin(dim=2, keepdim=True), values.amax(dim=2, keepdim=True)
    # In double precision and in Pillow's order, because a result may fall just below a whole number.
    spread = (high - low).double()
    scale = torch.full_like(spread, 255) / spread  # number / tensor would multiply by the reciprocal
    ramp = torch.arange(256, dtype=torch.float64, device=values.device)
    # A channel with one value divides by 0; it is left unchanged.
    return torch.where(high > low, ramp * scale - low * scale, ramp).clamp(0, 255).to(torch.uint8)


def equalize_tables(values: Tensor) -> Tensor:
    """Return (B, 3, 256) uint8 tables that make the values of each channel about equally frequent."""
    counts = histograms(values)
    sums = counts.cumsum(dim=2)
    step = (sums[:, :, -1:] - counts.gather(2, values.amax(dim=2, keepdim=True))) // 255
    divisor = step.clamp(min=1)
    levels = ((divisor // 2 + sums - counts) // divisor).clamp(max=255)
    return torch.where(step > 0, levels, torch.arange(256, device=values.device)).to(torch.uint8)


def _fixed_tables(magnitude: float, device: torch.device) -> Tensor:
    """Return (operations, 256) uint8: the tables that do not depend on the image; identity for other operations."""
    bits = min(8, max(1, int(magnitude / 10 * 4)))
    threshold, added = int(magnitude / 10 * 256), int(magnitude / 10 * 110)
    ramp = torch.arange(256, device=device)
    tables_by_name = {
        "invert": 255 - ramp,
        "posterize": ramp & (0xFF << (8 - bits) & 0xFF),
        "solarize": torch.where(ramp < threshold, ramp, 255 - ramp),
        "brightness": blend(0.0, ramp, _enhance_factor(magnitude)),
        "solarize-add": torch.where(ramp < 128, (ramp + added).clamp(max=255), ramp),
    }
    return torch.stack([tables_by_name.get(name, ramp) for name in OPERATIONS]).to(torch.uint8)


def _apply_tables(images: Tensor, grey: Tensor, operation: Tensor, fixed: Tensor, magnitude: float) -> Tensor:
    """Replace each value by the table of the image's operation."""
    values = images.flatten(2).long()
    ramp = torch.arange(256, device=images.device)
    tables_by_name = {
        "autocontrast": autocontrast_tables(values),
        "equalize": equalize_tables(values),
        "contrast": blend(mean_luma(grey)[:, :, 0], ramp, _enhance_factor(magnitude)),
    }
    tables = fixed[operation][:, None]
    for name, table in tables_by_name.items():
        tables = torch.where((operation == OPERATION_NUMBERS[name])[:, None, None], table, tables)
    return tables.gather(2, values).view_as(images)


def _enhance_factor(magnitude: float) -> float:
    return magnitude / 10 * 1.8 + 0.1


# ---- Geometry --------------------------------------------------------------------------------------------------------


def build_affine_matrices(
    operations: Tensor, signs: Tensor, magnitude: float, height: int, width: int
) -> tuple[Tensor, Tensor]:
    """Return the affine matrices (…, 2, 3) float64 of geometric operations, and (…) bool: whether they move anything.

    A matrix maps (x, y) in the new image to (a x + b y + c, d x + e y + f) in the old one; the origin is the upper
    left corner. Operations move by `magnitude` in the direction of `signs`, 1 or −1.
    """
    signs = signs.double()
    rotates, shears_x, shears_y, moves_x, moves_y = ((operations == OPERATION_NUMBERS[n]) * signs for n in _GEOMETRIC)
    angle, shear = math.radians(magnitude / 10 * 30), magnitude / 10 * 0.3
    shift = magnitude / 10 * 100 / REFERENCE_SIDE
    cosine, sine = (
        round(math.cos(angle), 15),
        round(math.sin(angle), 15),
    )  # so that a quarter turn is exact, as in Pillow
    x, y = width / 2, height / 2
    turned, turning = rotates.abs() * (cosine - 1), rotates * sine
    shears_y = shears_y * shear
    changes = (
        (turned, shears_x * shear - turning, turning * y - turned * x + moves_x * (shift * width)),
        (shears_y + turning, turned, moves_y * (shift * height) - turned * y - turning * x),
    )
    matrix = torch.stack([value for row in changes for value in row], dim=-1)
    moves = (matrix != 0).any(dim=-1)
    return matrix.unflatten(-1, (2, 3)) + torch.eye(2, 3, dtype=torch.float64, device=matrix.device), moves


def warp_affine(images: Tensor, matrix: Tensor) -> Tensor:
    """Sample each image bilinearly by its matrix, (B, 2, 3) float64; outside of the image is grey.

    The precision is double, as in Pillow; this is little work even where double precision is slow.
    """
    height, width = images.shape[2:]
    x = torch.arange(0.5, width, dtype=torch.float64, device=images.device)[:, None]
    y = torch.arange(0.5, height, dtype=torch.float64, device=images.device)[:, None, None]
    by_x, by_y, constant = matrix[:, None, None].unbind(dim=-1)
    u, v = (by_x * x + by_y * y + constant).unbind(dim=-1)
    outside = (u < 0) | (u >= width) | (v < 0) | (v >= height)
    grid = torch.stack((u * (2 / width) - 1, v * (2 / height) - 1), dim=-1)
    sampled = F.grid_sample(images.double(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return torch.where(outside[:, None], FILL, sampled + ROUNDING_MARGIN).to(torch.uint8)


def mask_rectangles(boxes: Tensor, height: int, width: int) -> Tensor:
    """Return (…, 1, height, width) bool: the pixels inside boxes (…, 4) given as (top, left, height, width).

    Boxes may extend beyond the image.
    """
    top, left, box_height, box_width = (value[..., None] for value in boxes.unbind(dim=-1))
    y, x = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    rows, columns = (y >= top) & (y < top + box_height), (x >= left) & (x < left + box_width)
    return rows[..., None, :, None] & columns[..., None, None, :]


# ---- RandAugment and 3-Augment ---------------------------------------------------------------------------------------


def rand_augment(images: Tensor, operations: Tensor, signs: Tensor, centres: Tensor, magnitude: float) -> Tensor:
    """Apply RandAugment.

    Args:
        images: (B, 3, height, width) uint8.
        operations: (B, rounds) int64, numbers in OPERATIONS.
        signs: (B, rounds), 1 or −1, the direction of geometric operations.
        centres: (B, rounds, 2) int64, (y, x) of cutouts.
        magnitude: from 0 to 10, or more.
    """
    height, width = images.shape[2:]
    fixed = _fixed_tables(magnitude, images.device)
    matrix, moves = build_affine_matrices(operations, signs, magnitude, height, width)
    half = round(magnitude / 10 * 40 / REFERENCE_SIDE * min(height, width))
    boxes = torch.cat((centres - half, torch.full_like(centres, 2 * half)), dim=2)
    cut = mask_rectangles(boxes, height, width) & (operations == OPERATION_NUMBERS["cutout"])[:, :, None, None, None]
    sharpens, colours = operations == OPERATION_NUMBERS["sharpness"], operations == OPERATION_NUMBERS["color"]
    blends = sharpens | colours
    for number in range(operations.shape[1]):
        grey = luma(images)
        # Each image has one operation in a round; the results of all others are discarded.
        changed = _apply_tables(images, grey, operations[:, number], fixed, magnitude)
        degenerate = torch.where(per_image(sharpens[:, number]), smooth(images), grey)
        changed = torch.where(
            per_image(blends[:, number]), blend(degenerate, images, _enhance_factor(magnitude)), changed
        )
        changed = torch.where(per_image(moves[:, number]), warp_affine(images, matrix[:, number]), changed)
        images = torch.where(cut[:, number], FILL, changed)
    return images


def three_augment(images: Tensor, kind: Tensor, radii: Tensor) -> Tensor:
    """Apply the first step of 3-Augment, by `kind`: grey (0), solarize (1), or blur (2) by `radii`."""
    changed = torch.where(per_image(kind == 0), luma(images).to(torch.uint8), solarize(images))
    return torch.where(per_image(kind == 2), blur(images, radii), changed)


def blur(images: Tensor, radii: Tensor) -> Tensor:
    """Apply Pillow's Gaussian blur, for radii up to 2: three box blurs along rows, then three along columns.

    A box of fractional radius has whole pixels inside and fractions of the two at its ends, in 24 bits.
    """
    radius = _box_radii(radii)
    wide = per_image(radius >= 1)
    whole = ((1 << 24) / (radius * 2 + 1)).long()
    part = per_image(((1 << 24) - (2 * radius.floor().long() + 1) * whole) // 2)
    whole = per_image(whole)
    values = images.long()
    for _ in range(2):
        ends = torch.arange(-2, values.shape[3] + 2, device=images.device).clamp(0, values.shape[3] - 1)
        for _ in range(3):
            padded = values[:, :, :, ends]
            near = padded[:, :, :, 1:-3] + padded[:, :, :, 3:-1]
            far = padded[:, :, :, :-4] + padded[:, :, :, 4:]
            inner = torch.where(wide, values + near, values)
            values = inner * whole + torch.where(wide, far, near) * part + (1 << 23) >> 24
        values = values.transpose(2, 3)
    return values.to(torch.uint8)


def _box_radii(radii: Tensor) -> Tensor:
    """Return the radius of a box that, applied three times, has the variance of the Gaussian."""
    variance = radii * radii / 3
    whole = (((12 * variance + 1).sqrt() - 1) / 2).floor()
    return whole + (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) * (whole + 1)))
