"""Photographs for tests: crops of the two inside scikit-learn, in every format, mode, size and orientation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

ORIENTATION = 0x0112
SIZES = (
    (640, 427),
    (427, 640),
    (97, 61),
    (200, 200),
    (33, 480),
    (611, 40),
    (23, 17),
    (320, 240),
    (150, 333),
    (512, 384),
)
"""Width and height of the crops, in pixels; the larger ones are the photograph enlarged."""
FORMS: tuple[tuple[str, str, dict[str, object]], ...] = (
    (".jpg", "RGB", {"quality": 92}),
    (".jpg", "RGB", {"quality": 60, "subsampling": 0}),
    (".jpg", "RGB", {"quality": 85, "progressive": True, "orientation": 6}),
    (".jpg", "RGB", {"quality": 85, "orientation": 3}),
    (".jpg", "L", {"quality": 90}),
    (".jpg", "CMYK", {"quality": 90}),
    (".jpeg", "RGB", {"quality": 85, "orientation": 5}),
    (".png", "RGB", {}),
    (".png", "RGBA", {}),
    (".png", "P", {}),
    (".png", "L", {}),
    (".png", "LA", {}),
    (".webp", "RGB", {"quality": 80}),
    (".webp", "RGBA", {"lossless": True}),
    (".gif", "P", {}),
    (".bmp", "RGB", {}),
    (".tif", "RGB", {"compression": "tiff_lzw"}),
    (".ppm", "RGB", {}),
)
"""The ending of a file's name, Pillow's mode, and how it is saved."""


def make_photos(count: int) -> Iterator[tuple[str, Image.Image, dict[str, object]]]:
    """Yield the ending, the image and how to save it. Each combines another format with another size and crop."""
    photographs = [Image.fromarray(np.asarray(photo)) for photo in load_sample_images().images]
    generator = np.random.default_rng(0)
    for number, (suffix, mode, options) in enumerate(itertools.islice(itertools.cycle(FORMS), count)):
        photo, (width, height) = photographs[number % 2], SIZES[number % len(SIZES)]
        left, top = (int(generator.integers(0, side // 3)) for side in photo.size)
        image = photo.crop((left, top, photo.width - left // 2, photo.height - top // 2)).resize((width, height))
        if mode in ("RGBA", "LA"):
            image.putalpha(Image.linear_gradient("L").resize((width, height)))
        yield suffix, image.convert(mode), options


def write_photos(folder: Path, count: int, classes: tuple[str, ...]) -> list[Path]:
    """Write photographs into one folder for each class, in turn; return their paths in the order of a data set."""
    paths = []
    for number, (suffix, image, options) in enumerate(make_photos(count)):
        path = folder / classes[number % len(classes)] / f"photo{number:02}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = dict(options)
        if "orientation" in kept:
            exif = Image.Exif()
            exif[ORIENTATION] = kept.pop("orientation")
            kept["exif"] = exif
        image.save(path, **kept)
        paths.append(path)
    return sorted(paths)
