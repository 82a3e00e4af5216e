"""Pictures with the statistics of photographs, and the changes that make near duplicates of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps


def natural(seed: int, width: int = 120, height: int = 96) -> Image.Image:
    """Coloured noise whose strength falls with the frequency, as in photographs; no other's twin."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]) + 0.5 / width
    spectra = np.fft.rfft2(rng.normal(size=(4, height, width))) / frequency
    planes = np.fft.irfft2(spectra, s=(height, width))
    planes = planes[:1] + 0.5 * planes[1:]  # the colours of a photograph mostly agree
    values = 128 + 50 * planes / planes.std()
    return Image.fromarray(values.clip(0, 255).astype(np.uint8).transpose(1, 2, 0))


def recompress(image: Image.Image, quality: int = 60) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def crop(image: Image.Image, share: float = 0.05) -> Image.Image:
    """Without a share of both sides, more of it at the left and top."""
    left, top = round(image.width * share * 0.7), round(image.height * share * 0.7)
    return image.crop((left, top, left + round(image.width * (1 - share)), top + round(image.height * (1 - share))))


def scale(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "recompressed": recompress,
    "smaller": lambda image: scale(image, 0.75),
    "larger": lambda image: scale(image, 2.0),
    "cropped": crop,
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.9),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": ImageOps.mirror,
    "all": lambda image: recompress(scale(crop(ImageOps.mirror(image)), 0.8)),
}


def save_natural(folder: Path, seeds: range, change: Callable[[Image.Image], Image.Image] | None = None) -> Path:
    """A class folder of PNGs named after their seeds."""
    folder.mkdir(parents=True)
    for seed in seeds:
        image = natural(seed)
        (change(image) if change else image).save(folder / f"{seed:03}.png")
    return folder
