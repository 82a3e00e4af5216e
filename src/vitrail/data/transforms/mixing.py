"""Mixup and CutMix, on whole batches and on their device.

Shapes: B images, C channels, height × width pixels, K classes.

A row of targets mixed from one-hot rows sums to exactly 1, although both shares are rounded. Let u be the spacing of
floats just below 1, and g the spacing near the smaller share. The error is at most u/2 for the larger share and g/2
for the smaller. The error of the sum is a multiple of g, so at most u/2, and the sum rounds to 1 (ties go to even).
"""

from __future__ import annotations

import math
import random
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitrail.config import Config
from vitrail.data.transforms.augment import Probability
from vitrail.errors import InputError
from vitrail.system.device import send_to_device

Alpha = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Both parameters of a Beta distribution; 0 means off."""


class Mixing(Config):
    """How the images of a batch, and their targets, are mixed with each other."""

    mixup: Alpha = 0.0
    """α of Mixup: the share of an image that stays is drawn from Beta(α, α), once per batch. 0 is off."""
    cutmix: Alpha = 0.0
    """α of CutMix, with the same meaning."""
    switch: Probability = 0.5
    """Probability of CutMix if both are on."""
    rate: Probability = 1.0
    """Probability that a batch is mixed at all."""


def mix_batch(
    images: Tensor, labels: Tensor, num_classes: int, config: Mixing, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Mix a batch at random by Mixup or CutMix.

    Args:
        images: (B, C, height, width); floating point for Mixup.
        labels: (B,) from 0 to K − 1.
        num_classes: K.
        config: the strengths and probabilities.
        rng: decides everything random.

    Returns:
        The images and (B, K) float32 targets, which are one-hot if nothing is mixed.
    """
    targets = one_hot(labels, num_classes)
    if not (config.mixup or config.cutmix) or rng.random() >= config.rate:
        return images, targets
    if config.cutmix and (not config.mixup or rng.random() < config.switch):
        return cutmix(images, targets, rng, config.cutmix)
    return mixup(images, targets, rng, config.mixup)


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turn labels (B,) from 0 to K − 1 into (B, K) targets with a 1 at each label."""
    # Reading values would make an accelerator wait; there, the check inside scatter stops the program.
    if labels.device.type == "cpu":
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise InputError(f"label {wrong[0].item()} is not among the {num_classes} classes 0 to {num_classes - 1}")
    targets = torch.zeros(len(labels), num_classes, dtype=dtype, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], 1)


def mixup(images: Tensor, targets: Tensor, rng: random.Random, alpha: float) -> tuple[Tensor, Tensor]:
    """Average each image (B, C, height, width; float) and target (B, K) with those of a random partner."""
    if not images.is_floating_point():
        raise InputError(f"mixup averages images and needs them in floating point, not {images.dtype}; normalise first")
    own_share = rng.betavariate(alpha, alpha)
    partners = _draw_partners(images, rng)
    return images.lerp(images[partners], 1 - own_share), _mix_targets(targets, partners, own_share)


def cutmix(images: Tensor, targets: Tensor, rng: random.Random, alpha: float) -> tuple[Tensor, Tensor]:
    """Replace a rectangle of each image (B, C, height, width; any type) by that of a random partner.

    Targets (B, K) are mixed by the share of pixels. The rectangle is the same for the whole batch and is clipped to
    the image before its pixels are counted.
    """
    height, width = images.shape[2:]
    scale = math.sqrt(1 - rng.betavariate(alpha, alpha))
    top, bottom = _draw_span(height, scale, rng)
    left, right = _draw_span(width, scale, rng)
    pixels = height * width
    own_share = (pixels - (bottom - top) * (right - left)) / pixels
    partners = _draw_partners(images, rng)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right][partners]
    return mixed, _mix_targets(targets, partners, own_share)


def _draw_partners(images: Tensor, rng: random.Random) -> Tensor:
    order = list(range(len(images)))
    rng.shuffle(order)
    return send_to_device(torch.tensor(order), images.device)


def _mix_targets(targets: Tensor, partners: Tensor, own_share: float) -> Tensor:
    return targets * own_share + targets[partners] * (1 - own_share)


def _draw_span(side: int, scale: float, rng: random.Random) -> tuple[int, int]:
    """Return the start and end of `scale` · `side` pixels around a uniform random centre, clipped to the side."""
    length = round(side * scale)
    start = rng.randrange(side) - length // 2
    return max(0, start), min(side, start + length)
