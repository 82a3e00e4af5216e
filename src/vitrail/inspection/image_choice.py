"""Choose the images that a report shows and measures on. They are read later, one at a time.

Shapes: C channels, height × width pixels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from vitrail.data.locate import find_local_path
from vitrail.data.open import Data, add_task, choose_test_split, list_splits, open_data
from vitrail.data.sources.image_files import IMAGE_SUFFIXES, walk_files
from vitrail.data.sources.source import Source, make_printable, read_file
from vitrail.data.task_data import TaskData, recognise_data
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import DataError
from vitrail.inference.class_names import translate_wnid
from vitrail.inference.prepare import OneImage, is_one_image
from vitrail.system.files import describe_reason, hide_folders
from vitrail.system.remote import is_address
from vitrail.system.results import format_count
from vitrail.tasks.task import Task

DATA_SUFFIXES = (".csv", ".json", ".jsonl", ".parquet", ".tar")
PHOTOGRAPHS = "the two photographs inside scikit-learn"
SQUARES = ((1.0, 1, 2), (0.6, 2, 3), (0.45, 2, 4))
"""Crops of a photograph: the side as a share of its shorter side, and the number of crops down and across."""

Images = Data | OneImage | Sequence[OneImage]
"""A folder, an image, a data set in any form, or a list of images."""


@dataclass(frozen=True)
class ImageChoice:
    """Images to choose from. They are read one at a time: a camera's would fill the memory together."""

    count: int
    read: Callable[[int], tuple[str, Tensor]]
    """Returns the name and the pixels of one image, (C, height, width) uint8 at full size; may raise a DataError."""
    name_image: Callable[[int], str]
    """Returns the name of one image, even if it cannot be read."""
    describe: Callable[[int], str]
    """Says what so many of the images are: "8 of the 1,000 images of photos"."""
    shown: ImageChoice | None = None
    """Other images to show; None to show some of those that are measured on."""


def choose_images(images: Images, task: Task | None = None) -> ImageChoice:
    """Choose from a folder with images at any depth, an image, a data set, or a list of images or labelled images.

    Of a data set with splits, the test split is taken. Nothing is decoded yet. A table is read as the `task` of a model
    says, or, if it has other targets, as it tells itself.

    Raises:
        DataError: if there are no images.
    """
    if _is_table(images):
        return _choose_from_table(images, task)
    if isinstance(images, str | os.PathLike):
        return _choose_from_place(os.fspath(images))
    if isinstance(images, Source | Mapping | TaskData):
        return _choose_from_data(images)
    several: Any = [images] if is_one_image(images) else images
    listed = list(several)
    if not listed:
        raise DataError("the list of images is empty: give one image or more")
    if all(isinstance(each, tuple) for each in listed):
        return _choose_from_data(listed)
    return _choose_from_data([(image, -1) for image in listed])


def _is_table(images: Images) -> TypeGuard[Data]:
    """Return whether images come with a table of targets: a file, or pairs in a list."""
    if isinstance(images, str | os.PathLike):
        return Path(images).suffix.lower() in DATA_SUFFIXES
    listed = isinstance(images, list) and len(images) > 0 and all(isinstance(each, tuple) for each in images)
    return listed or isinstance(images, TaskData | Mapping)


def choose_from_source(source: Source, name: str) -> ImageChoice:
    """Choose from an open data set; `name` is its name in the report."""
    return ImageChoice(
        len(source), partial(_read_sample, source), source.display_name, partial(describe_count, len(source), name)
    )


def choose_photographs() -> ImageChoice:
    """Choose two photographs that come with scikit-learn, and crops of them to measure on: the same every time."""
    from sklearn.datasets import load_sample_images

    sample = load_sample_images()
    photos = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in sample.images]
    crops = [crop for photo in photos for crop in _crop_squares(photo)]
    names = [Path(name).name for name in sample.filenames]
    shown = ImageChoice(
        len(photos), lambda index: (names[index], photos[index]), names.__getitem__, lambda some: PHOTOGRAPHS
    )
    return ImageChoice(
        len(crops),
        lambda index: (f"crop {index}", crops[index]),
        lambda index: f"crop {index}",
        lambda some: f"{format_count(some, 'crop')} of {PHOTOGRAPHS}; the numbers mean more on images of your own",
        shown,
    )


def _choose_from_table(images: Data, task: Task | None) -> ImageChoice:
    if task is None or task.kind == "labels":
        return _choose_from_data(recognise_data(images))
    try:
        return _choose_from_data(add_task(images, task))
    except DataError as error:  # other targets: the images can still be looked at
        try:
            return _choose_from_data(recognise_data(images))
        except DataError:
            raise error from None


def _choose_from_place(place: str) -> ImageChoice:
    if place == "digits" or place.startswith("hf:"):
        return _choose_from_data(place)
    path = find_local_path(place)
    try:
        if path.is_file() and path.name.lower().endswith(IMAGE_SUFFIXES):
            return _choose_from_files([str(path)], path.parent, lambda some: name_place(place))
        below = sorted(walk_files(path)) if path.is_dir() else [str(path)] if path.is_file() else []
    except OSError as error:
        raise DataError(f"{make_printable(place)} cannot be read: {describe_reason(error)}") from None
    if files := [name for name in below if name.lower().endswith(IMAGE_SUFFIXES)]:
        return _choose_from_files(files, path, partial(describe_count, len(files), name_place(place)))
    if any(name.lower().endswith(DATA_SUFFIXES) for name in below):
        return _choose_from_data(place)
    problem = "holds no images" if path.is_dir() else "is no image" if path.is_file() else "does not exist"
    allowed = f"a folder with images ({', '.join(IMAGE_SUFFIXES)}), one image, or a data set"
    raise DataError(f"{make_printable(place)} {problem}: give {allowed}")


def _choose_from_data(data: Data) -> ImageChoice:
    split = choose_test_split(data) or ("train" if "train" in list_splits(data) else None)
    name = name_place(data)
    return choose_from_source(open_data(data, split), f"{name} ({split})" if split else name)


def _choose_from_files(files: Sequence[str], root: Path, describe: Callable[[int], str]) -> ImageChoice:
    def name_image(index: int) -> str:
        return make_printable(Path(files[index]).relative_to(root).as_posix())

    def read(index: int) -> tuple[str, Tensor]:
        return name_image(index), decode_image(read_file(Path(files[index])))

    return ImageChoice(len(files), read, name_image, describe)


def _read_sample(source: Source, index: int) -> tuple[str, Tensor]:
    """Return name and label of a sample, and its pixels."""
    sample = source.read(index)
    pixels = sample.content if isinstance(sample.content, Tensor) else decode_image(sample.content)
    name = make_printable(source.display_name(index).rsplit("/", 1)[-1])
    known = 0 <= sample.label < len(source.classes)
    if sample.targets is not None and source.task.kind != "labels":
        return f"{name} (true: {source.task.describe_target(sample.targets)})", pixels.cpu()
    return f"{name} (label: {translate_wnid(source.classes[sample.label])})" if known else name, pixels.cpu()


def _crop_squares(photo: Tensor) -> Iterator[Tensor]:
    """Yield squares of several sizes, spread over a photograph from edge to edge."""
    height, width = photo.shape[1:]
    for share, down, across in SQUARES:
        side = int(share * min(height, width))
        for top in np.linspace(0, height - side, down).astype(int).tolist():
            for left in np.linspace(0, width - side, across).astype(int).tolist():
                yield photo[:, top : top + side, left : left + side]


def name_place(images: Images) -> str:
    """Return a name of images for the report: of a path the last part alone, because strangers may read it."""
    if isinstance(images, TaskData):
        return name_place(images.data)
    if not isinstance(images, str | os.PathLike):
        return "a data set" if isinstance(images, Source) else "a list"
    place = os.fspath(images)
    if place.startswith("hf:"):
        return place
    return make_printable(hide_folders(place) if is_address(place) else Path(place).expanduser().resolve().name)


def describe_count(count: int, name: str, some: int) -> str:
    """Say what some of the images of a data set are: "8 of the 1,000 images of photos"."""
    return (
        f"{some:,} of the {count:,} images of {name}" if some < count else f"{format_count(count, 'image')} of {name}"
    )
