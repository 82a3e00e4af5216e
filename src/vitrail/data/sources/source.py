"""The interface of every data set: numbered samples, each an image with a label, and the names of the classes.

A source keeps no list of its samples. It is cheap to send to another process and reads each sample on demand.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.order import Indices
from vitrail.data.sources.image_files import MOST_BYTES as MOST_BYTES
from vitrail.data.sources.image_files import make_printable as make_printable
from vitrail.errors import ConfigError, DataError
from vitrail.system.files import is_out_of_handles, read_regular_file
from vitrail.tasks.labels import LABEL, Labels
from vitrail.tasks.task import Cell, Targets, Task

SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""The names of the splits, and the words that mean them in file and folder names."""

MOST_LABELS = 10_000_000
"""Labels count from 0 and stay below this: larger numbers are not labels, but names of something."""
FINGERPRINT_SAMPLES = 1000
GOLDEN_RATIO = (5**0.5 - 1) / 2


class Sample(NamedTuple):
    """One image, not yet decoded, and its label or its other targets."""

    content: bytes | Tensor
    """The bytes of an image file, or (C, height, width) uint8 pixels."""
    label: int
    """The number of its class; −1 if there is none, as for every other task than labels."""
    targets: Mapping[str, Any] | None = None
    """The targets of another task, by name; None if the label is the target."""

    @property
    def named_targets(self) -> Mapping[str, Any]:
        """The targets by name, also if there is only a label."""
        return {LABEL: self.label} if self.targets is None else self.targets


class Source(ABC):
    """Samples by number, from 0 to len(source) − 1."""

    classes: tuple[str, ...]
    """The names of the labels 0, 1, 2, …; empty if they are unknown."""
    block: int = 1
    """How many neighbouring samples should be read together."""
    window: int = 1
    """How many samples a shuffle should mix at least, so that a batch does not consist of neighbours."""
    reads_in_threads: bool = False
    """Whether several threads may read at the same time."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Return one sample; raise a DataError if it cannot be read."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return a name for messages, such as the path, even if the image is unreadable."""

    def identity(self, index: int) -> str:
        """Return a name that does not depend on where the data is stored; it decides what is held out."""
        return self.name(index)

    @property
    def task(self) -> Task:
        """What a target is here: one label an image, unless a source says otherwise."""
        return Labels(names=self.classes)

    def targets(self, start: int, stop: int) -> Targets:
        """Return the targets of samples `start` to `stop` by name, without reading images."""
        return {LABEL: self.labels(start, stop)}

    def cells(self, index: int) -> Mapping[str, Cell]:
        """Return what a table says about a sample, by column; nothing by default, for labels need no table."""
        return {}

    def strata(self, start: int, stop: int) -> Indices:
        """Return the numbers of the strata of samples `start` to `stop`: their labels, or groups with similar targets.

        Whatever divides the data takes an equal share of each stratum.
        """
        return self.labels(start, stop)

    def read_checked(self, index: int) -> Sample:
        """Read a sample, and raise a DataError if its label is missing or not a known class."""
        sample = self.read(index)
        if sample.targets is not None:
            return sample
        if sample.label < 0:
            raise DataError("has no label")
        if sample.label >= (len(self.classes) or MOST_LABELS):
            raise DataError(f"its label is {sample.label}, and there are {len(self.classes) or MOST_LABELS} classes")
        return sample

    def display_name(self, index: int) -> str:
        """Return the name of a sample, or its number if the name cannot be read."""
        try:
            return self.name(index)
        except DataError:
            return f"sample {index}"

    @abstractmethod
    def labels(self, start: int, stop: int) -> Indices:
        """Return the labels of samples `start` to `stop` without reading images; −1 where there is none."""

    @property
    def num_classes(self) -> int:
        """The number of class names, or the largest label + 1 if there are no names."""
        largest = -1 if self.classes else self._largest_label()
        if largest >= MOST_LABELS:
            raise DataError(f"there are labels of {MOST_LABELS:,} and more: number the classes 0, 1, 2, …")
        return len(self.classes) or largest + 1

    def _largest_label(self) -> int:
        chunk = 1 << 16
        return max(
            (int(self.labels(i, min(i + chunk, len(self))).max()) for i in range(0, len(self), chunk)), default=-1
        )


class Subset(Source):
    """Some samples of a source, chosen by their numbers in it."""

    def __init__(self, whole: Source, indices: Indices) -> None:
        self.whole, self.indices = whole, indices
        self.classes, self.reads_in_threads = whole.classes, whole.reads_in_threads
        self.block, self.window = whole.block, whole.window

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        return self.whole.read(int(self.indices[index]))

    def name(self, index: int) -> str:
        return self.whole.name(int(self.indices[index]))

    def identity(self, index: int) -> str:
        return self.whole.identity(int(self.indices[index]))

    @property
    def task(self) -> Task:
        return self.whole.task

    def labels(self, start: int, stop: int) -> Indices:
        low, high, chosen = self._find_range(start, stop)
        return self.whole.labels(low, high)[chosen]

    def targets(self, start: int, stop: int) -> Targets:
        low, high, chosen = self._find_range(start, stop)
        return {name: values[chosen] for name, values in self.whole.targets(low, high).items()}

    def cells(self, index: int) -> Mapping[str, Cell]:
        return self.whole.cells(int(self.indices[index]))

    def strata(self, start: int, stop: int) -> Indices:
        low, high, chosen = self._find_range(start, stop)
        return self.whole.strata(low, high)[chosen]

    def _find_range(self, start: int, stop: int) -> tuple[int, int, Indices]:
        """Return the range of the whole that these samples lie in, and their places in it."""
        chosen = np.asarray(self.indices[start:stop], np.int64)
        if not len(chosen):
            return 0, 0, chosen
        low = int(chosen.min())
        return low, int(chosen.max()) + 1, chosen - low


def clip_label(label: object) -> int:
    """Return a label for a column of labels: −1 for what is none, at most `MOST_LABELS` for what is too large."""
    return min(max(label, -1), MOST_LABELS) if isinstance(label, int) else -1


def compute_fingerprint(source: Source) -> str:
    """Return a hash of the size, the classes, and the names and labels of about a thousand samples.

    It does not depend on where the data is stored.
    """
    count = len(source)
    digest = hashlib.blake2b(
        f"{count} {source.classes or source.task.output_names}".encode("utf-8", "surrogateescape"), digest_size=16
    )
    for index in range(0, count, max(count // FINGERPRINT_SAMPLES, 1)):
        target = _describe_target(source, index)
        digest.update(f"\0{source.identity(index)}\0{target}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _describe_target(source: Source, index: int) -> str:
    targets = source.targets(index, index + 1)
    if list(targets) == [LABEL]:
        return str(targets[LABEL][0])
    return " ".join(f"{name}={values[0].tolist()}" for name, values in targets.items())


def hold_out(source: Source, share: float, seed: int) -> tuple[Subset, Subset]:
    """Split a source into the rest and a held-out part of about `share` of each class.

    A class with two or more images has at least one in each part. Other tasks than labels have strata of any size, such
    as a single image with its own tag: the share is taken evenly over all of these. The choice depends only on the seed
    and the names of the images: it is the same on every machine, and an added image hardly changes it.
    """
    if not 0 < share < 1:
        raise ConfigError(f"holdout = {share}: give a share between 0 and 1")
    order, starts, sizes = order_within_strata(source, seed)
    if source.task.kind != "labels":
        count = min(max(round(len(source) * share), 1), len(source) - 1) if len(source) > 1 else 0
        out = _mark_evenly(order, count)
        return Subset(source, np.flatnonzero(~out)), Subset(source, np.flatnonzero(out))
    taken = np.where(sizes > 1, np.clip(np.round(sizes * share), 1, sizes - 1), 0).astype(np.int64)
    out = _mark_first(order, starts, sizes, taken)
    return Subset(source, np.flatnonzero(~out)), Subset(source, np.flatnonzero(out))


def take_share(source: Source, share: float, seed: int) -> Subset:
    """Return about `share` of each class of a source, in the order of the source.

    Shares are nested: the images of a smaller share are among those of every larger share with the same seed. The
    choice depends only on the seed and the names of the images, so it is the same on every machine and in any order.

    Raises:
        ConfigError: `share` is not between 0 and 1, or leaves no image of a class that has some.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share = {share}: give a share above 0, and at most 1")
    order, starts, sizes = order_within_strata(source, seed, purpose="share")
    if source.task.kind != "labels":
        return Subset(source, np.flatnonzero(_mark_evenly(order, max(round(len(source) * share), 1))))
    taken = np.floor(sizes * share + 0.5).astype(np.int64)
    if not taken.all():
        smallest = int(sizes.argmin())
        label = int(source.strata(int(order[starts[smallest]]), int(order[starts[smallest]]) + 1)[0])
        group = "the images without a label" if label < 0 else f"class {name_class(source, label)!r}"
        least = math.ceil(500_000 / sizes[smallest]) / 1_000_000  # so that it rounds to one image
        raise ConfigError(
            f"share = {share:g} leaves no image of {group}, which has {sizes[smallest]} to train on: give {least:g} or "
            "more, so that every class keeps one"
        )
    return Subset(source, np.flatnonzero(_mark_first(order, starts, sizes, taken)))


def require_labels(source: Source, name: str, verb: str) -> None:
    """Raise a DataError if data has another task than one label an image, which `verb` needs."""
    if source.task.kind != "labels":
        raise DataError(
            f"{name} has {source.task.kind}, and {verb} needs one label an image: give a folder for each class, or a "
            "table with a column `label`"
        )


def name_class(source: Source, label: int) -> str:
    """Return the name of a label, or its number if the classes have no names."""
    return source.classes[label] if label < len(source.classes) else str(label)


def order_within_strata(source: Source, seed: int, purpose: str = "") -> tuple[Indices, Indices, Indices]:
    """Order samples by stratum, and at random within one; return their numbers, and starts and sizes of the strata.

    The random order depends on the seed, the names of the samples and the purpose.
    """
    count = len(source)
    labels = source.strata(0, count)
    salt = seed.to_bytes(16, "big", signed=True)
    keys = np.fromiter((hash_name(salt, purpose + source.identity(index)) for index in range(count)), np.uint64, count)
    order = np.lexsort((keys, labels))
    starts = np.flatnonzero(np.r_[True, np.diff(labels[order]) != 0]) if count else np.empty(0, np.int64)
    return order, starts, np.diff(np.r_[starts, count])


def _mark_first(order: Indices, starts: Indices, sizes: Indices, taken: Indices) -> NDArray[np.bool_]:
    """Mark the first `taken` samples of each class; see `order_within_strata`."""
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    marks = np.zeros(len(order), dtype=bool)
    marks[order] = rank < np.repeat(taken, sizes)
    return marks


def _mark_evenly(order: Indices, count: int) -> NDArray[np.bool_]:
    """Mark `count` samples that lie evenly in the order; those of a smaller count are among those of a larger one.

    Places are taken by the golden ratio: the first places of this sequence are spread evenly, however many there are.
    """
    places = (np.arange(len(order)) * GOLDEN_RATIO) % 1
    marks = np.zeros(len(order), dtype=bool)
    marks[order[np.argsort(places, kind="stable")[:count]]] = True
    return marks


def halve_source(source: Source, seed: int = 1) -> tuple[Subset, Subset]:
    """Divide a source into two halves, each class as evenly as possible. The choice depends on names and the seed."""
    count = len(source)
    salt = seed.to_bytes(16, "big", signed=True)
    keys = np.fromiter((hash_name(salt, source.identity(index)) for index in range(count)), np.uint64, count)
    order = np.lexsort((keys, source.strata(0, count)))  # neighbours are of one class wherever that is possible
    return Subset(source, np.sort(order[::2])), Subset(source, np.sort(order[1::2]))


def hash_name(salt: bytes, identity: str) -> int:
    """Return a number that orders samples at random, the same wherever the data is stored."""
    digest = hashlib.blake2b(identity.encode("utf-8", "surrogateescape"), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "big")


def read_image(image: Any) -> bytes | Tensor:
    """Return the bytes of an image file, or (C, height, width) uint8 pixels for an image that is already decoded.

    Args:
        image: a path, the bytes of a file, a Pillow image, an array (height, width[, C]) or a
            tensor ([C,] height, width).

    Raises:
        DataError: the file cannot be read, or the pixels are not uint8.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return read_file(Path(image))
    try:
        pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(_convert_pillow(image)))
    except TypeError:
        raise DataError(f"a {type(image).__name__} is no image: give a path, bytes, a Pillow image or pixels") from None
    if pixels.ndim == 2:
        pixels = pixels[None]
    elif pixels.ndim == 3 and not isinstance(image, Tensor):
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim != 3 or pixels.dtype != torch.uint8 or not pixels.numel():
        kind = f"{pixels.dtype} {tuple(pixels.shape)}"
        raise DataError(f"pixels must be uint8 of shape (channels, height, width), not {kind}")
    return pixels


def _convert_pillow(image: Any) -> Any:
    from vitrail.data.transforms.decode import IGNORE_WARNINGS, to_rgb, turn_upright

    if not hasattr(image, "getbands"):
        return image
    with IGNORE_WARNINGS:
        return to_rgb(turn_upright(image))


def read_file(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the bytes of a regular file; raise a DataError if it cannot be read or is larger than `most_bytes`.

    The default is `MOST_BYTES`. Links are followed: they are the user's own.

    Raises:
        OSError: Too many files are open: the file may well be whole.
    """
    try:
        return read_regular_file(path, MOST_BYTES if most_bytes is None else most_bytes)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        if is_out_of_handles(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        is_plain = getattr(error, "errno", None) in (errno.EINVAL, errno.EFBIG)  # not a file, or too large
        raise DataError(reason if is_plain else f"cannot be read: {reason}") from None


def read_small_text(file: Path, most_bytes: int) -> str:
    """Return the text of a file; raise a DataError if it is no UTF-8 text or larger than `most_bytes`."""
    try:
        return read_file(file, most_bytes).decode("utf-8-sig")
    except (ValueError, DataError) as error:
        reason = "no UTF-8 text" if isinstance(error, UnicodeError) else str(error).removeprefix("cannot be read: ")
        raise DataError(f"{make_printable(file)} cannot be read: {reason}") from None
