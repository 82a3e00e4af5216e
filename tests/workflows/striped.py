"""Folders of generated images."""

from __future__ import annotations

import numpy as np
from PIL import Image


def stripes(root, classes: int, images: int, size: int = 32):
    """Stripes at any angle and phase, with noise; classes differ in their colour."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    for number in range(classes):
        folder = root / f"colour-{number}"
        folder.mkdir(parents=True)
        colour = np.roll([90, 20, -40], number)
        for image in range(images):
            angle = rng.uniform(0, np.pi)
            wave = 0.6 + 0.4 * np.sin((x * np.cos(angle) + y * np.sin(angle)) * 0.9 + rng.uniform(0, 6.3))
            pixels = 110 + colour * wave[..., None] + rng.normal(0, 20, (size, size, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{image:02}.png")
    return root
