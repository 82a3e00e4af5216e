"""The images of a study: one set to pre-train on, one or more to transfer to, and masks of objects for one study."""

from __future__ import annotations

from collections.abc import Sequence
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

    def describe(self) -> dict[str, str]:
        """Return the fingerprints of the images, for the raw results."""
        found = {} if self.pretraining is None else {"pretraining": compute_fingerprint(self.pretraining)}
        return found | {f"transfer {each.name}": compute_fingerprint(each.train) for each in self.transfer}


def open_study_data(
    scale: Scale,
    needs: set[str],
    data: Data | None,
    transfer: Sequence[Data],
    masks: str | Path | None,
    on_event: OnEvent,
) -> StudyData:
    """Open the images that a study needs and keep their pixels in memory.

    Raises:
        ConfigError: The scale has no data of its own for something that was not given.
        DataError: Some data cannot be opened.
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
    if masks is None and "masks" in needs and data != "digits":
        raise ConfigError("this study compares attention with objects: give --masks FOLDER of trimaps (masks=…)")
    pretraining = None
    if data is not None and "data" in needs:
        on_event("message", {"text": f"opening {name_data(data)} to pre-train on"})
        pretraining = _keep(scale, open_data(data, "train") if "train" in list_splits(data) else open_data(data))
    sets = tuple(_open_transfer(scale, each, on_event) for each in transfer) if "transfer" in needs else ()
    return StudyData(pretraining, sets, None if masks is None else Path(masks))


def _open_transfer(scale: Scale, data: Data, on_event: OnEvent) -> TransferSet:
    name = name_data(data)
    on_event("message", {"text": f"opening {name} to transfer to"})
    split = choose_test_split(data)
    if split is not None:
        train, test = open_data(data, "train"), open_data(data, split)
    else:
        train, test = hold_out(open_data(data), HELD_OUT, 0)
    return TransferSet(Path(name).name or name, _keep(scale, train), _keep(scale, test))


def _keep(scale: Scale, source: Source) -> Source:
    return InMemorySource(source, None if scale.kept_size is None else partial(cut_square, size=scale.kept_size))


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
