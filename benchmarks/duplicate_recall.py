"""How many changed copies `vitrail data check --against` finds: python benchmarks/duplicate_recall.py DATA.

Takes 200 images of a data set, changes each in several ways, and searches the whole data set for them. Prints how many
were found, and how many pairs with other images: these are false alarms, or real repeats inside the data set.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from vitrail import open_data
from vitrail.data.check.near_duplicates import find_near_duplicates, join_pairs, make_thumbnail
from vitrail.data.transforms.decode import decode_to_pillow

COPIES = 200
Change = Callable[[Image.Image, np.random.Generator], Image.Image]


def recompress(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return Image.open(file).convert("RGB")


def crop(image: Image.Image, random: np.random.Generator, share: float) -> Image.Image:
    """Return the image without a share of both sides, at a random place."""
    width, height = round(image.width * (1 - share)), round(image.height * (1 - share))
    left, top = (int(random.integers(0, room + 1)) for room in (image.width - width, image.height - height))
    return image.crop((left, top, left + width, top + height))


def scale(image: Image.Image, factor: float) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)


def brighten(image: Image.Image, factor: float) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(factor)


CHANGES: dict[str, Change] = {
    "recompressed at quality 60": lambda image, random: recompress(image),
    "resized to 75%": lambda image, random: scale(image, 0.75),
    "10% brighter": lambda image, random: brighten(image, 1.1),
    "10% darker": lambda image, random: brighten(image, 0.9),
    "without colours": lambda image, random: image.convert("L").convert("RGB"),
    "mirrored": lambda image, random: ImageOps.mirror(image),
    "5% of both sides cut off": lambda image, random: crop(image, random, 0.05),
    "mirrored, 5% cut off, brighter, resized to 70%, recompressed": lambda image, random: recompress(
        scale(brighten(crop(ImageOps.mirror(image), random, 0.05), 1.1), 0.7)
    ),
    "10% of both sides cut off": lambda image, random: crop(image, random, 0.1),
    "10% of both sides cut off at a corner": lambda image, random: image.crop(
        (0, 0, round(image.width * 0.9), round(image.height * 0.9))
    ),
    "resized to 50%, recompressed": lambda image, random: recompress(scale(image, 0.5)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--split")
    parser.add_argument("--labels-from")
    options = parser.parse_args()
    source = open_data(options.data, options.split, labels_from=options.labels_from)
    images = [decode_to_pillow(source.read(index).content) for index in range(len(source))]
    thumbnails = np.stack([make_thumbnail(image) for image in images])
    random = np.random.default_rng(0)
    chosen = random.permutation(len(images))[:COPIES]
    print(f"| change | found of {COPIES} | pairs with others |\n|---|---|---|")
    for name, change in CHANGES.items():
        copies = np.stack([make_thumbnail(change(images[index], random)) for index in chosen])
        pairs = join_pairs([found for _, found in find_near_duplicates(thumbnails, copies)])
        is_own = pairs.first == chosen[pairs.second]
        print(f"| {name} | {is_own.sum()} | {(~is_own).sum()} |", flush=True)


if __name__ == "__main__":
    main()
