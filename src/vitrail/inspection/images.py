"""Which images a report shows, which it measures on, and how a model sees them.

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

from vitrail.data.open import open_data, list_splits, choose_test_split
from vitrail.data.sources.folder import IMAGE_SUFFIXES, walk_files
from vitrail.data.sources.source import Source, read_file, make_printable
from vitrail.data.transforms.decode import decode_image, to_channels
from vitrail.data.transforms.preprocess import resize_and_crop, normalise
from vitrail.errors import DataError, NotApplicableError
from vitrail.inference.class_names import translate_wnid
from vitrail.model.base import ImageModel

MOST, SHOWN = 128, 8
"""Images that are measured on, as in the paper; and of these, images that are shown."""
MOST_PIXELS = 400_000
"""Of an image that is kept. Larger ones are made smaller first: so many of a camera's would fill the memory. Whoever
knows that a model sees more asks for more."""
DATA_SUFFIXES = (".csv", ".parquet", ".tar")
PHOTOGRAPHS = "the two photographs inside scikit-learn"
SQUARES = ((1.0, 1, 2), (0.6, 2, 3), (0.45, 2, 4))
"""Crops of a photograph: their side as a share of its shorter one, and how many are spread down and across."""


@dataclass(frozen=True)
class Picked:
    """Images as they were decoded, and where they come from."""

    shown: list[tuple[str, Tensor]]
    """Name and (C, height, width) uint8 pixels, as decoded; those of large images made smaller."""
    measured: list[Tensor]
    """Pixels likewise."""
    shown_from: str
    """In words: "8 of the 1,000 images of photos/"."""
    measured_on: str
    broken: tuple[str, ...]
    """What could not be read, and why."""


def from_folder(place: str, channels: int, most: int = MOST, show: int = SHOWN, pixels: int = MOST_PIXELS) -> Picked:
    """Images that a person names: a folder with images anywhere below it, an image file, or any DATA.

    Args:
        place: where they are. Of data that comes in parts, the part to test on is taken.
        channels: what the model takes.
        most: of many, so many are measured on, evenly spread.
        show: of these, so many are shown, evenly spread, among them the first.
        pixels: larger images are made smaller to about so many; twice what the model sees is enough.
    """
    path = Path(place).expanduser()
    if place == "digits" or place.startswith("hf:"):
        return _from_data(place, channels, most, show, pixels)
    try:
        if path.is_file() and path.name.lower().endswith(IMAGE_SUFFIXES):
            picked = _from_files([str(path)], path.parent, _called(place), channels, most, show, pixels)
            return replace(picked, shown_from=_called(place), measured_on=_called(place))
        below = sorted(walk_files(path)) if path.is_dir() else [str(path)] if path.is_file() else []
    except OSError as error:
        raise DataError(f"{make_printable(place)} cannot be read: {error.strerror}") from None
    if images := [name for name in below if name.lower().endswith(IMAGE_SUFFIXES)]:
        return _from_files(images, path, _called(place), channels, most, show, pixels)
    if any(name.lower().endswith(DATA_SUFFIXES) for name in below):
        return _from_data(place, channels, most, show, pixels)
    wrong = "holds no images" if path.is_dir() else "is no image" if path.is_file() else "does not exist"
    raise DataError(
        f"{make_printable(place)} {wrong}: give a folder with images ({', '.join(IMAGE_SUFFIXES)}), one image, or a data set"
    )


def from_source(
    source: Source, name: str, channels: int, most: int = MOST, show: int = SHOWN, pixels: int = MOST_PIXELS
) -> Picked:
    """Images of a data set, which is called `name`; otherwise as `from_folder`."""
    return _picked(len(source), partial(_sample, source, channels), source.called, name, most, show, pixels)


def photographs(channels: int, most: int = MOST) -> Picked:
    """What is always there: two photographs inside scikit-learn, measured on in crops, the same every time."""
    from sklearn.datasets import load_sample_images

    _check_channels(channels)
    found = load_sample_images()
    photos = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in found.images]
    crops = [crop for photo in photos for crop in _squares(photo)]
    measured = [crops[index] for index in spread(len(crops), most)]
    return Picked(
        shown=[(Path(name).name, photo) for name, photo in zip(found.filenames, photos, strict=True)],
        measured=measured,
        shown_from=PHOTOGRAPHS,
        measured_on=f"{_some(len(measured), 'crop')} of {PHOTOGRAPHS}: give --images for numbers that mean more",
        broken=(),
    )


def batch(pixels: Sequence[Tensor], model: ImageModel) -> Tensor:
    """uint8 pixels of any size → (B, C, height, width) as the model takes them: fitted, normalised, on its device."""
    like, preprocessing = next(model.parameters()), model.preprocessing
    images = like.new_empty(len(pixels), model.in_channels, *preprocessing.image_size)
    for place, each in zip(images, pixels, strict=True):  # one by one: all at once would take thrice the memory
        place.copy_(normalise(resize_and_crop(to_channels(each, model.in_channels), preprocessing), preprocessing, like.dtype))
    return images


def seen(pixels: Tensor, model: ImageModel) -> NDArray[np.uint8]:
    """uint8 pixels of any size → (height, width, 1 or 3): what the model sees, before it is normalised.

    Of other numbers of channels the first three are taken, or the first.
    """
    image = resize_and_crop(to_channels(pixels, model.in_channels), model.preprocessing)
    image = image[: 3 if len(image) >= 3 else 1]
    return np.ascontiguousarray(image.permute(1, 2, 0).numpy())


def spread(count: int, most: int) -> list[int]:
    """At most so many of the numbers 0, 1, …, count − 1, evenly spread, the first among them."""
    return [number * count // most for number in range(most)] if count > most else list(range(count))


def _from_data(place: str, channels: int, most: int, show: int, pixels: int) -> Picked:
    split = choose_test_split(place) or ("train" if "train" in list_splits(place) else None)
    name = f"{_called(place)} ({split})" if split else _called(place)
    return from_source(open_data(place, split), name, channels, most, show, pixels)


def _from_files(
    files: Sequence[str], root: Path, name: str, channels: int, most: int, show: int, pixels: int
) -> Picked:
    _check_channels(channels)

    def called(index: int) -> str:
        return make_printable(Path(files[index]).relative_to(root).as_posix())

    def read(index: int) -> tuple[str, Tensor]:
        return called(index), decode_image(read_file(Path(files[index])))

    return _picked(len(files), read, called, name, most, show, pixels)


def _picked(
    count: int,
    read: Callable[[int], tuple[str, Tensor]],
    called: Callable[[int], str],
    name: str,
    most: int,
    show: int,
    pixels: int,
) -> Picked:
    """Of so many images, those that can be read; `read` gives the name of one and its pixels."""
    found, broken = list[tuple[str, Tensor]](), list[str]()
    for index in spread(count, most):
        try:
            told, image = read(index)
            found.append((told, _small_enough(image, pixels)))
        except DataError as error:
            broken.append(f"{called(index)}: {error}")
    if not found:
        told = f"; the first, {broken[0]}" if broken else ""
        raise DataError(f"none of {_some(count, 'image')} of {name} can be read{told}: give others by --images")
    shown_ones = [found[place] for place in spread(len(found), show)]
    return Picked(
        shown=shown_ones,
        measured=[image for _, image in found],
        shown_from=_of(len(shown_ones), count, name),
        measured_on=_of(len(found), count, name),
        broken=tuple(broken),
    )


def _sample(source: Source, channels: int, index: int) -> tuple[str, Tensor]:
    """Its name with its label, and its pixels; a DataError where a model of so many channels cannot see it."""
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


def _small_enough(image: Tensor, pixels: int) -> Tensor:
    height, width = image.shape[1:]
    scale = (pixels / (height * width)) ** 0.5
    if scale >= 1:
        return image
    size = [max(int(side * scale), 1) for side in (height, width)]
    return F.interpolate(image[None], size=size, mode="bilinear", antialias=True)[0]


def _squares(photo: Tensor) -> Iterator[Tensor]:
    """Squares of several sizes, spread over a photograph from edge to edge."""
    height, width = photo.shape[1:]
    for share, down, across in SQUARES:
        side = int(share * min(height, width))
        for top in np.linspace(0, height - side, down).astype(int).tolist():
            for left in np.linspace(0, width - side, across).astype(int).tolist():
                yield photo[:, top : top + side, left : left + side]


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise NotApplicableError(
            f"image files have one channel or three, and this model takes {channels}: what it sees must come from data "
            "that holds pixels of so many channels"
        )


def _called(place: str) -> str:
    """The last part of a path, for the report may go to strangers; other names as they are."""
    return place if place.startswith("hf:") else make_printable(Path(place).expanduser().resolve().name)


def _of(some: int, count: int, name: str) -> str:
    return f"{some:,} of the {count:,} images of {name}" if some < count else f"{_some(count, 'image')} of {name}"


def _some(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
