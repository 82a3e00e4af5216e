"""Choose the images that a report shows and measures on, and prepare them for a model.

Shapes: C channels, height × width pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.open import choose_test_split, list_splits, open_data
from vitrail.data.sources.folder import IMAGE_SUFFIXES, walk_files
from vitrail.data.sources.source import Source, make_printable, read_file
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.data.transforms.preprocess import normalise, resize_and_crop
from vitrail.errors import DataError, NotApplicableError
from vitrail.inference.class_names import translate_wnid
from vitrail.model.base import ImageModel

MOST, SHOWN = 128, 8
"""The number of images to measure on, as in the paper, and how many of them are shown."""
MOST_PIXELS = 400_000
"""Larger images are made smaller, because many of a camera's images would fill the memory."""
DATA_SUFFIXES = (".csv", ".parquet", ".tar")
PHOTOGRAPHS = "the two photographs inside scikit-learn"
SQUARES = ((1.0, 1, 2), (0.6, 2, 3), (0.45, 2, 4))
"""Crops of a photograph: the side as a share of its shorter side, and the number of crops down and across."""


@dataclass(frozen=True)
class InspectionImages:
    """Decoded images, and where they come from."""

    shown: list[tuple[str, Tensor]]
    """Name and pixels of each shown image, (C, height, width) uint8; large images are made smaller."""
    measured: list[Tensor]
    """Pixels of each measured image."""
    shown_from: str
    """The shown images in words: "8 of the 1,000 images of photos/"."""
    measured_on: str
    broken: tuple[str, ...]
    """Names of images that could not be read, each with the reason."""


def pick_from_folder(
    place: str, channels: int, most: int = MOST, show: int = SHOWN, pixels: int = MOST_PIXELS
) -> InspectionImages:
    """Pick images from a folder with images at any depth, an image file, or a data set.

    Args:
        place: the folder, file or data set. Of a data set with splits, the test split is taken.
        channels: the number of channels that the model takes.
        most: at most so many images are measured on, evenly spread.
        show: at most so many of these are shown, evenly spread and with the first.
        pixels: larger images are made smaller to about so many pixels; twice the model's own number is enough.

    Raises:
        DataError: if there are no images that can be read.
        NotApplicableError: if image files do not have the model's number of channels.
    """
    path = Path(place).expanduser()
    if place == "digits" or place.startswith("hf:"):
        return _pick_from_data(place, channels, most, show, pixels)
    try:
        if path.is_file() and path.name.lower().endswith(IMAGE_SUFFIXES):
            picked = _pick_from_files([str(path)], path.parent, _public_name(place), channels, most, show, pixels)
            return replace(picked, shown_from=_public_name(place), measured_on=_public_name(place))
        below = sorted(walk_files(path)) if path.is_dir() else [str(path)] if path.is_file() else []
    except OSError as error:
        raise DataError(f"{make_printable(place)} cannot be read: {error.strerror}") from None
    if images := [name for name in below if name.lower().endswith(IMAGE_SUFFIXES)]:
        return _pick_from_files(images, path, _public_name(place), channels, most, show, pixels)
    if any(name.lower().endswith(DATA_SUFFIXES) for name in below):
        return _pick_from_data(place, channels, most, show, pixels)
    problem = "holds no images" if path.is_dir() else "is no image" if path.is_file() else "does not exist"
    allowed = f"a folder with images ({', '.join(IMAGE_SUFFIXES)}), one image, or a data set"
    raise DataError(f"{make_printable(place)} {problem}: give {allowed}")


def pick_from_source(
    source: Source, name: str, channels: int, most: int = MOST, show: int = SHOWN, pixels: int = MOST_PIXELS
) -> InspectionImages:
    """Pick images of an open data set; `name` is its name in the report. Otherwise like `pick_from_folder`."""
    return _pick_images(
        len(source), partial(_read_sample, source, channels), source.display_name, name, most, show, pixels
    )


def pick_photographs(channels: int, most: int = MOST) -> InspectionImages:
    """Pick two photographs that come with scikit-learn, and crops of them to measure on: the same every time."""
    from sklearn.datasets import load_sample_images

    _check_channels(channels)
    sample = load_sample_images()
    photos = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in sample.images]
    crops = [crop for photo in photos for crop in _crop_squares(photo)]
    measured = [crops[index] for index in spread_evenly(len(crops), most)]
    return InspectionImages(
        shown=[(Path(name).name, photo) for name, photo in zip(sample.filenames, photos, strict=True)],
        measured=measured,
        shown_from=PHOTOGRAPHS,
        measured_on=f"{_count(len(measured), 'crop')} of {PHOTOGRAPHS}: give --images for numbers that mean more",
        broken=(),
    )


def prepare_batch(pixels: Sequence[Tensor], model: ImageModel) -> Tensor:
    """Turn uint8 pixels of any sizes into input for the model, (B, C, height, width), on its device."""
    like, preprocessing = next(model.parameters()), model.preprocessing
    images = like.new_empty(len(pixels), model.in_channels, *preprocessing.image_size)
    for place, each in zip(images, pixels, strict=True):  # one by one: all at once would take three times the memory
        place.copy_(
            normalise(resize_and_crop(to_channels(each, model.in_channels), preprocessing), preprocessing, like.dtype)
        )
    return images


def render_input(pixels: Tensor, model: ImageModel) -> NDArray[np.uint8]:
    """Return the crop that the model sees, before it is normalised: (height, width, 1 or 3) uint8.

    Of two channels the first is taken, of more than three the first three.
    """
    image = resize_and_crop(to_channels(pixels, model.in_channels), model.preprocessing)
    image = image[: 3 if len(image) >= 3 else 1]
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def spread_evenly(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0, 1, …, count − 1, evenly spread and with the first."""
    return [number * count // most for number in range(most)] if count > most else list(range(count))


def _pick_from_data(place: str, channels: int, most: int, show: int, pixels: int) -> InspectionImages:
    split = choose_test_split(place) or ("train" if "train" in list_splits(place) else None)
    name = f"{_public_name(place)} ({split})" if split else _public_name(place)
    return pick_from_source(open_data(place, split), name, channels, most, show, pixels)


def _pick_from_files(
    files: Sequence[str], root: Path, name: str, channels: int, most: int, show: int, pixels: int
) -> InspectionImages:
    _check_channels(channels)

    def name_image(index: int) -> str:
        return make_printable(Path(files[index]).relative_to(root).as_posix())

    def read(index: int) -> tuple[str, Tensor]:
        return name_image(index), decode_image(read_file(Path(files[index])))

    return _pick_images(len(files), read, name_image, name, most, show, pixels)


def _pick_images(
    count: int,
    read: Callable[[int], tuple[str, Tensor]],
    name_image: Callable[[int], str],
    name: str,
    most: int,
    show: int,
    pixels: int,
) -> InspectionImages:
    """Pick images by their numbers, without those that cannot be read; `read` returns the name and pixels of one."""
    images, broken = list[tuple[str, Tensor]](), list[str]()
    for index in spread_evenly(count, most):
        try:
            title, image = read(index)
            images.append((title, _shrink(image, pixels)))
        except DataError as error:
            broken.append(f"{name_image(index)}: {error}")
    if not images:
        example = f"; the first, {broken[0]}" if broken else ""
        raise DataError(f"none of {_count(count, 'image')} of {name} can be read{example}: give others by --images")
    shown_ones = [images[place] for place in spread_evenly(len(images), show)]
    return InspectionImages(
        shown=shown_ones,
        measured=[image for _, image in images],
        shown_from=_count_of(len(shown_ones), count, name),
        measured_on=_count_of(len(images), count, name),
        broken=tuple(broken),
    )


def _read_sample(source: Source, channels: int, index: int) -> tuple[str, Tensor]:
    """Return name and label of a sample, and its pixels; raise a DataError if the channels do not suit the model."""
    sample = source.read(index)
    if isinstance(sample.content, Tensor):
        pixels = sample.content
    else:
        _check_channels(channels)
        pixels = decode_image(sample.content)
    to_channels(pixels[:, :1, :1], channels)
    name = make_printable(source.display_name(index).rsplit("/", 1)[-1])
    known = 0 <= sample.label < len(source.classes)
    return f"{name} (label: {translate_wnid(source.classes[sample.label])})" if known else name, pixels


def _shrink(image: Tensor, pixels: int) -> Tensor:
    height, width = image.shape[1:]
    scale = (pixels / (height * width)) ** 0.5
    if scale >= 1:
        return image
    size = [max(int(side * scale), 1) for side in (height, width)]
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]


def _crop_squares(photo: Tensor) -> Iterator[Tensor]:
    """Yield squares of several sizes, spread over a photograph from edge to edge."""
    height, width = photo.shape[1:]
    for share, down, across in SQUARES:
        side = int(share * min(height, width))
        for top in np.linspace(0, height - side, down).astype(int).tolist():
            for left in np.linspace(0, width - side, across).astype(int).tolist():
                yield photo[:, top : top + side, left : left + side]


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise NotApplicableError(
            f"image files have one channel or three, but this model takes {channels}: give data with pixels of "
            f"{channels} channels"
        )


def _public_name(place: str) -> str:
    """Return the last part of a path, because strangers may read the report; other names stay as they are."""
    return place if place.startswith("hf:") else make_printable(Path(place).expanduser().resolve().name)


def _count_of(some: int, count: int, name: str) -> str:
    return f"{some:,} of the {count:,} images of {name}" if some < count else f"{_count(count, 'image')} of {name}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
