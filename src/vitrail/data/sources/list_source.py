"""Images that a program has at hand: a list of (image, label) pairs, or such a list for each split."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source, make_printable, read_image
from vitrail.errors import DataError

Pairs = Sequence[tuple[Any, int | str]]
"""Images and their labels. An image is a path, the bytes of a file, a Pillow image, a uint8 array (height, width[, C])
or a uint8 tensor ([C,] height, width). All labels are names of classes, or all are numbers of classes."""


class ListSource(Source):
    """A list of (image, label) pairs.

    Args:
        samples: the pairs. The list is copied, the images are not.
        classes: the names of the classes in the order of their numbers. By default these are the labels, sorted, if
            they are names, and none if they are numbers.

    Raises:
        DataError: a sample is no pair, a label is neither a name nor a whole number, or the labels are of both kinds.
    """

    def __init__(self, samples: Pairs, classes: Sequence[str] = ()) -> None:
        names = list_class_names([samples])
        self.classes = tuple(classes) or names
        numbers = {name: number for number, name in enumerate(self.classes)}
        unknown = sorted(set(names) - set(numbers))
        if unknown:
            raise DataError(f"the label {unknown[0]!r} is none of the classes {', '.join(self.classes)}")
        self.samples = [(_prepare_to_send(image), label) for image, label in samples]
        self._targets: Indices = np.array(
            [
                numbers[make_printable(label)] if isinstance(label, str) else operator.index(label)
                for _, label in samples
            ],
            dtype=np.int64,
        )
        self._digests: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        return Sample(read_image(self.samples[index][0]), int(self._targets[index]))

    def name(self, index: int) -> str:
        image = self.samples[index][0]
        return make_printable(image) if isinstance(image, str | os.PathLike) else f"sample {index}"

    def identity(self, index: int) -> str:
        """Return the path, or a hash of an image in memory: so its place in the list does not matter."""
        if isinstance(self.samples[index][0], str | os.PathLike):
            return self.name(index)
        if index not in self._digests:
            self._digests[index] = self._compute_digest(index)
        return self._digests[index]

    def _compute_digest(self, index: int) -> str:
        try:
            content = read_image(self.samples[index][0])
        except DataError:  # whoever reads it is told why
            return self.name(index)
        if isinstance(content, Tensor):
            content = f"{tuple(content.shape)}\0".encode() + content.numpy().tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def labels(self, start: int, stop: int) -> Indices:
        return self._targets[start:stop]


def list_class_names(lists: Iterable[Pairs]) -> tuple[str, ...]:
    """Return the labels of lists of (image, label) pairs, sorted, if they are names; nothing if they are numbers.

    Raises:
        DataError: a sample is no pair, a label is neither a name nor a whole number, or the labels are of both kinds.
    """
    names, number = set[str](), None
    for samples in lists:
        for index, sample in enumerate(samples):
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise DataError(f"sample {index} is not a pair: give (image, label), such as ('a.jpg', 'cat')")
            label = sample[1]
            if isinstance(label, str):
                names.add(make_printable(label))
            else:
                number = _read_number(index, label)
            if names and number is not None:
                raise DataError(
                    f"some labels are names, such as {min(names)!r}, and some are whole numbers, such as {number}: "
                    "give all as names, or all as numbers"
                )
    return tuple(sorted(names))


def _read_number(index: int, label: Any) -> int:
    try:
        number = operator.index(label)
        np.int64(number)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"sample {index}: its label is {label!r}, which is neither a name nor a whole number of 64 bits"
        ) from None
    return number


def _prepare_to_send(image: Any) -> Any:
    """Return uint8 tensors as arrays of the same memory.

    To another process, an array sends its own pixels. A tensor would send all that it is a part of, and would need an
    open file for each image.
    """
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim in (2, 3):
        return (image if image.ndim == 2 else image.permute(1, 2, 0)).cpu().numpy()
    return image
