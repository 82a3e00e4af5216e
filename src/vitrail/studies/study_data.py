"""The images of a study: one set to pre-train on, one or more to transfer to, and masks of objects for one study."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.open import Data, choose_test_split, list_splits, name_data, open_data
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import Source, Subset, compute_fingerprint, hold_out
from vitrail.errors import ConfigError
from vitrail.studies.scales import Scale
from vitrail.system.events import OnEvent

HELD_OUT = 0.2
"""Share of every class that is tested on if a data set has no part for it."""


@dataclass(frozen=True)
class TransferSet:
    """A data set that pre-trained models are transferred to."""

    name: str
    train: Source
    test: Source


@dataclass(frozen=True)
class StudyData:
    """All images of a study, in memory that processes share."""

    pretraining: Source | None
    transfer: tuple[TransferSet, ...]
    masks: Path | None = None
    """A folder of trimaps, NAME.png for each NAME.jpg of the first data set to transfer to."""


@dataclass(frozen=True)
class DataChoice:
    """The data that a caller has named, and the scale's own in place of what was not named."""

    pretraining: Data | None
    transfer: tuple[Data, ...]
    masks: Path | None
    kept_size: int | None

    def describe(self, needs: Collection[str]) -> dict[str, str]:
        """Return fingerprints of what a study needs, for its raw results. Images are not decoded."""
        found = {}
        if "data" in needs and self.pretraining is not None:
            found["pretraining"] = compute_fingerprint(_open_training(self.pretraining))
        if "transfer" in needs:
            for number, data in enumerate(self.transfer, start=1):
                prints = "+".join(compute_fingerprint(part) for part in _open_parts(data))
                found[f"transfer {number} {_shorten_name(data)}"] = prints
        if "masks" in needs and self.masks is not None:
            found["masks"] = self.masks.name
        return found

    def load(self, needs: Collection[str], on_event: OnEvent) -> StudyData:
        """Read what studies need, and keep its pixels in memory."""
        pretraining = None
        if "data" in needs and self.pretraining is not None:
            on_event("message", {"text": f"reading {name_data(self.pretraining)} to pre-train on"})
            pretraining = self._load_pixels(_open_training(self.pretraining))
        sets = []
        for data in self.transfer if "transfer" in needs else ():
            on_event("message", {"text": f"reading {name_data(data)} to transfer to"})
            train, test = map(self._load_pixels, _open_parts(data))
            sets.append(TransferSet(_shorten_name(data), train, test))
        return StudyData(pretraining, tuple(sets), self.masks)

    def _load_pixels(self, source: Source) -> Source:
        return InMemorySource(source, None if self.kept_size is None else partial(cut_square, size=self.kept_size))


def choose_data(
    scale: Scale, needs: Collection[str], data: Data | None, transfer: Sequence[Data], masks: str | Path | None
) -> DataChoice:
    """Return the data of studies.

    Raises:
        ConfigError: The scale has no data of its own for something that is needed and was not given.
    """
    data = scale.data if data is None else data
    transfer = transfer or scale.transfer
    if data is None and "data" in needs:
        raise ConfigError(
            f"the scale {scale.name!r} has no images of its own to pre-train on: give --data DATA (in Python data=…), "
            "such as a folder of Tiny-ImageNet"
        )
    if not transfer and "transfer" in needs:
        raise ConfigError(
            f"the scale {scale.name!r} has no data set of its own to transfer to: give --transfer DATA, once or more "
            "(in Python transfer=[…])"
        )
    if masks is None and "masks" in needs and tuple(transfer[:1]) != ("digits",):
        raise ConfigError("this study compares attention with objects: give --masks FOLDER of trimaps (masks=…)")
    return DataChoice(data, tuple(transfer), None if masks is None else Path(masks), scale.kept_size)


def _open_training(data: Data) -> Source:
    return open_data(data, "train") if "train" in list_splits(data) else open_data(data)


def _open_parts(data: Data) -> tuple[Source, Source]:
    """Open the images to learn from and those to test on."""
    split = choose_test_split(data)
    if split is not None:
        return open_data(data, "train"), open_data(data, split)
    return hold_out(open_data(data), HELD_OUT, 0)


def _shorten_name(data: Data) -> str:
    """Return the last part of a data set's name, without the folders above."""
    name = name_data(data)
    return Path(name).name or name


def cut_square(pixels: Tensor, size: int, mode: str = "bilinear") -> Tensor:
    """Return (C, height, width) uint8 pixels as a square of `size`: resized to cover it, and cut at the ends.

    A square that is not larger stays as it is.
    """
    height, width = pixels.shape[1:]
    if height == width <= size:
        return pixels
    scale = size / min(height, width)
    target = (max(round(height * scale), size), max(round(width * scale), size))
    smooth = {"antialias": True} if mode == "bilinear" else {}
    pixels = F.interpolate(pixels[None], size=target, mode=mode, **smooth)[0]
    top, left = (target[0] - size) // 2, (target[1] - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()


def choose_test_images(source: Source, most: int) -> Source:
    """Return at most `most` images of a source, evenly spread over its classes; the same ones every time."""
    if len(source) <= most:
        return source
    _, out = hold_out(source, most / len(source), 0)
    return Subset(source, np.sort(np.asarray(out.indices)))
