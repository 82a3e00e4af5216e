"""Several random views of every image of a batch, made on the batch's device, for objectives that compare views.

Two global views show most of an image, the local ones a small part of it at a smaller size. Everything random is a
function of a key, the number of the sample and the number of the view: neither the other images of the batch nor the
number of ranks change a view.

Shapes: B images, C channels, V views of one size. Views are stacked view by view: row v · B + b is view v of image b.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vitrail.config import Config
from vitrail.data.transforms import batch_operations
from vitrail.data.transforms.augment import BOX_ATTEMPTS, Probability
from vitrail.data.transforms.batch_augment import centre_box, place_boxes
from vitrail.data.transforms.batch_operations import per_image
from vitrail.objectives.noise import draw_uniform
from vitrail.system.device import float64_device

GLOBAL_VIEWS = 2
RATIO = (3 / 4, 4 / 3)
"""Width / height of a crop."""

Strength = Annotated[float, Field(ge=0, le=1)]
Area = tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]]


class Views(Config):
    """Which views of an image are compared. The colours of images without three channels stay as they are."""

    global_area: Area = (0.3, 1.0)
    """Smallest and largest share of the image that a global view covers."""
    local_area: Area = (0.05, 0.3)
    """Smallest and largest share of the image that a local view covers."""
    local_count: Annotated[int, Field(ge=0)] = 6
    """Number of local views of an image, besides the two global ones."""
    local_scale: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Side of a local view as a share of the model's image size, rounded to whole patches."""
    source_scale: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Side of the images that views are cut from, as a multiple of the model's image size. More keeps the detail of
    large images in small crops."""
    flip: Probability = 0.5
    """Probability of mirroring a view left to right."""
    jitter: Probability = 0.8
    """Probability of changing the colours of a view."""
    brightness: Strength = 0.4
    """How far the factor of brightness may differ from 1."""
    contrast: Strength = 0.4
    """How far the factor of contrast may differ from 1."""
    saturation: Strength = 0.2
    """How far the factor of saturation may differ from 1."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """How far the hue may move, as a share of the colour circle."""
    grey: Probability = 0.2
    """Probability of a view without colours."""
    blur: Probability = 0.5
    """Probability of a blurred view."""
    blur_radius: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]] = (0.1, 2.0)
    """Smallest and largest deviation of the blur, in pixels of the view."""
    solarize: Probability = 0.2
    """Probability of inverting the bright values of the second global view."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("global_area", "local_area", "blur_radius"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} = {(low, high)}: give the smaller value first")
        return self


class ViewParameters(NamedTuple):
    """All random parameters of N = V · B views."""

    boxes: Tensor
    """(N, 4) int64: top, left, height and width of the crop."""
    mirrored: Tensor
    """(N,) bool."""
    factors: Tensor
    """(N, 3) float32: of brightness, contrast and saturation; 1 changes nothing."""
    order: Tensor
    """(N, 3) int64: which of the three is applied first, second and third."""
    hue: Tensor
    """(N,) float32: how far the hue moves, in turns."""
    is_grey: Tensor
    """(N,) bool."""
    radii: Tensor
    """(N,) float32: deviation of the blur in pixels; 0 for none."""
    is_solarized: Tensor
    """(N,) bool."""


COLUMNS = 2 * BOX_ATTEMPTS + 15
"""Random numbers of a view."""


def draw_views(
    samples: Tensor, key: int, views: Views, old_size: tuple[int, int], *, is_global: bool
) -> ViewParameters:
    """Draw the parameters of all global or all local views.

    Args:
        samples: (B,) int64 sample numbers; parameters are on their device.
        key: use one for global views and another for local ones.
        old_size: height and width of the images.
        is_global: which of the two kinds.
    """
    count = GLOBAL_VIEWS if is_global else views.local_count
    uniform = draw_uniform(key, samples, count * COLUMNS).unflatten(1, (count, COLUMNS))
    uniform = uniform.transpose(0, 1).flatten(0, 1)
    number = torch.arange(count, device=samples.device).repeat_interleave(len(samples))
    sizes, rest = uniform.split([2 * BOX_ATTEMPTS, 15], dim=1)
    area = views.global_area if is_global else views.local_area
    sizes = sizes.unflatten(1, (2, BOX_ATTEMPTS)).transpose(0, 1)
    boxes, fits = place_boxes(sizes, rest[:, :2], *old_size, area, RATIO)
    strength = torch.stack(
        [torch.full_like(rest[:, 0], s) for s in (views.brightness, views.contrast, views.saturation)]
    )
    strength = strength.t() * (rest[:, 2:3] < views.jitter)
    low, high = views.blur_radius
    radii = low + (high - low) * rest[:, 13]
    return ViewParameters(
        boxes=torch.where(fits[:, None], boxes, centre_box(*old_size, RATIO, samples.device)),
        mirrored=rest[:, 3] < views.flip,
        factors=1 + strength * (2 * rest[:, 4:7] - 1),
        order=rest[:, 7:10].argsort(dim=1, stable=True),
        hue=torch.where(rest[:, 2] < views.jitter, views.hue * (2 * rest[:, 10] - 1), 0),
        is_grey=rest[:, 11] < views.grey,
        radii=torch.where(rest[:, 12] < views.blur, radii, 0),
        is_solarized=(rest[:, 14] < views.solarize) & (number == 1) & is_global,
    )


def apply_views(images: Tensor, drawn: ViewParameters, size: tuple[int, int]) -> Tensor:
    """Crop and change (B, C, height, width) uint8 images to (V · B, C, *size) uint8 views; pure arithmetic."""
    images = images.repeat(len(drawn.boxes) // len(images), 1, 1, 1)
    images = batch_operations.crop_and_resize(images, drawn.boxes, size, drawn.mirrored)
    if images.shape[1] == 3:
        images = batch_operations.jitter(images, drawn.factors, drawn.order)
        images = batch_operations.shift_hue(images, drawn.hue)
        grey = batch_operations.luma(images).to(torch.uint8)
        images = torch.where(per_image(drawn.is_grey), grey, images)
    images = batch_operations.gaussian_blur(images, drawn.radii)
    return torch.where(per_image(drawn.is_solarized), batch_operations.solarize(images), images)


@torch.no_grad()
def make_views(
    images: Tensor, samples: Tensor, key: int, views: Views, size: tuple[int, int], *, is_global: bool
) -> Tensor:
    """Return (V · B, C, *size) uint8: all global or all local views of (B, C, height, width) uint8 images.

    The arguments are those of `draw_views`. Crops are computed in float64, on the CPU if the device has none.
    """
    place = images.device
    images, samples = images.to(float64_device(place)), samples.to(float64_device(place))
    with torch.autocast(images.device.type, enabled=False):  # products of bytes must be exact
        drawn = draw_views(samples, key, views, (images.shape[2], images.shape[3]), is_global=is_global)
        return apply_views(images, drawn, size).to(place)
