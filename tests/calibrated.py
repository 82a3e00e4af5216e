"""A small model that can be relied on: calibrated on images of coloured noise, of which each class has its own."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

import vitrail
from samples import randomise
from vitrail.evaluation.calibrate import CalibrationResult
from vitrail.model.base import ImageModel

CLASSES = ("red", "green", "blue")
SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32}
Pixels = np.ndarray


def make_model(labels: tuple[str, ...] = CLASSES) -> ImageModel:
    model = randomise(vitrail.create_model("Ti/4", num_classes=len(labels), **SMALL), seed=3, scale=0.3)
    model.labels = labels
    return model


def draw_noise(count: int, seed: int = 0) -> list[tuple[Pixels, str]]:
    """Return images of noise with more of one colour, and the name of that colour."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(3, size=count)
    pixels = rng.integers(0, 200, (count, 16, 16, 3), dtype=np.uint8)
    pixels[np.arange(count), :, :, colours] |= 0x80
    return [(image, CLASSES[colour]) for image, colour in zip(pixels, colours, strict=True)]


def draw_plain(count: int) -> list[tuple[Pixels, str]]:
    """Return plain images, which look like no noise."""
    return [(np.full((16, 16, 3), 255 * number // count, np.uint8), "plain") for number in range(count)]


@cache
def calibrate_once(unlike: bool = False) -> CalibrationResult:
    torch.manual_seed(0)
    return vitrail.calibrate(
        make_model(),
        draw_noise(1000),
        unlike=draw_plain(60) if unlike else None,
        device="cpu",
        on_event=lambda kind, values: None,
    )


def calibrated_model() -> ImageModel:
    """Return a copy that a test may change."""
    return vitrail.model.create.copy_model(calibrate_once().model)
