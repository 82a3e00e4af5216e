"""Mixup and CutMix, on whole batches and on the device they are on.

Shapes: B images, C channels, height × width pixels, K classes.

A row of targets mixed from one-hot ones sums to exactly 1, though both shares are rounded. Let u be the spacing of
floats just under 1, and g that of floats about the smaller share. The larger share is off by at most u/2 and the
smaller by g/2. Their sum is off by a multiple of g, so by u/2 at most, and that rounds to 1 (a tie goes to 1, even).
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
    """How images of a batch are mixed with each other, and their targets with them."""

    mixup: Alpha = 0.0
    """Strength of Mixup: the share kept is drawn from Beta(α, α), once for a batch. 0 is off."""
    cutmix: Alpha = 0.0
    """Strength of CutMix, in the same way."""
    switch: Probability = 0.5
    """How often it is CutMix where both are on."""
    rate: Probability = 1.0
    """How often a batch is mixed at all."""


def mix_batch(
    images: Tensor, labels: Tensor, num_classes: int, config: Mixing, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Images (B, C, height, width) and labels (B,) → images and float32 targets (B, K), one-hot where nothing mixes."""
    targets = one_hot(labels, num_classes)
    if not (config.mixup or config.cutmix) or rng.random() >= config.rate:
        return images, targets
    if config.cutmix and (not config.mixup or rng.random() < config.switch):
        return cutmix(images, targets, rng, config.cutmix)
    return mixup(images, targets, rng, config.mixup)


def one_hot(labels: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Labels (B,) from 0 to K − 1 → (B, K), a 1 at each label."""
    # Looking at values would make an accelerator wait; there, scatter's own check stops the program.
    if labels.device.type == "cpu":
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise InputError(f"label {wrong[0].item()} is not among the {num_classes} classes 0 to {num_classes - 1}")
    targets = torch.zeros(len(labels), num_classes, dtype=dtype, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], 1)


def mixup(images: Tensor, targets: Tensor, rng: random.Random, alpha: float) -> tuple[Tensor, Tensor]:
    """Each image (B, C, height, width; float) and its target (B, K) averaged with those of a partner in the batch."""
    if not images.is_floating_point():
        raise InputError(f"mixup averages images and needs them in floating point, not {images.dtype}; normalise first")
    kept = rng.betavariate(alpha, alpha)
    partners = _partners(images, rng)
    return images.lerp(images[partners], 1 - kept), _mix_targets(targets, partners, kept)


def cutmix(images: Tensor, targets: Tensor, rng: random.Random, alpha: float) -> tuple[Tensor, Tensor]:
    """Each image (B, C, height, width; any type) with a rectangle from a partner; targets (B, K) by share of pixels.

    The rectangle is the same for the whole batch. It is clipped where it leaves the image, and counted as clipped.
    """
    height, width = images.shape[2:]
    scale = math.sqrt(1 - rng.betavariate(alpha, alpha))
    top, bottom = _span(height, scale, rng)
    left, right = _span(width, scale, rng)
    pixels = height * width
    kept = (pixels - (bottom - top) * (right - left)) / pixels
    partners = _partners(images, rng)
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[:, :, top:bottom, left:right][partners]
    return mixed, _mix_targets(targets, partners, kept)


def _partners(images: Tensor, rng: random.Random) -> Tensor:
    order = list(range(len(images)))
    rng.shuffle(order)
    return send_to_device(torch.tensor(order), images.device)


def _mix_targets(targets: Tensor, partners: Tensor, kept: float) -> Tensor:
    return targets * kept + targets[partners] * (1 - kept)


def _span(side: int, scale: float, rng: random.Random) -> tuple[int, int]:
    """First and last-plus-one of `scale` · `side` pixels about a uniformly drawn centre, clipped."""
    length = round(side * scale)
    start = rng.randrange(side) - length // 2
    return max(0, start), min(side, start + length)
