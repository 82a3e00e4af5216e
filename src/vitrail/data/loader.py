"""From a source to batches: fast, in an order that a seed decides, and able to go on from anywhere.

The whole state of a training loader is one integer, how many samples have been used. Order is a function of (seed,
epoch), augmentation of (seed, epoch, sample), so neither the number of workers nor a stop and a new start changes a
byte, and any number of ranks sees the same samples in the same steps.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vitrail.config import Preprocessing
from vitrail.data.augment import Augmentation, augment, inception_box
from vitrail.data.decode import MOST_PIXELS_TRAINING, decode, decode_crop, to_channels
from vitrail.data.evaluation import fitted
from vitrail.data.order import Order, mixed
from vitrail.data.source import Sample, Source
from vitrail.errors import ConfigError, DataError

log = logging.getLogger("vitrail")

BROKEN_SHARE, BROKEN_LEAST = 0.001, 10
"""More broken samples than this share of a source, and than this number, stop a run."""
REPLACEMENTS = 100
"""How many others are tried in place of a broken sample before giving up."""
WORKER_DEATHS = 3
"""How often in a row workers may die, of memory for example, before giving up."""


@dataclass(frozen=True)
class Broken:
    """A sample that could not be used."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """Images of one size. Pixels are uint8: they are normalised on the device, where it costs nothing."""

    images: Tensor
    """(B, C, height, width) uint8."""
    labels: Tensor
    """(B,) int64."""
    indices: Tensor
    """(B,) int64: the samples' numbers in their source; −1 where there is none."""
    mask: Tensor
    """(B,) bool: False for what only fills up an evaluation batch, or could not be read there."""
    broken: tuple[Broken, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """On another device; without waiting where memory is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """For a fast way to a GPU."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})


_TENSORS = ("images", "labels", "indices", "mask")


class TrainingLoader:
    """An endless sequence of batches. `position` is its state: save it, and give it back to go on from there."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        image_size: tuple[int, int],
        *,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        channels: int = 3,
        position: int = 0,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
        pin_memory: bool | None = None,
        start_method: str | None = None,
        most_pixels: int = MOST_PIXELS_TRAINING,
        most_broken: int | None = None,
    ) -> None:
        """Args:
        source: where samples come from.
        batch_size: images in a step on all ranks together.
        image_size: height and width of the images in a batch.
        seed: of order and augmentation.
        augmentation: the paper's crop and flip if None.
        channels: 3, or 1 for grey.
        position: samples used so far on all ranks together.
        workers: processes that read ahead; 0 reads in this one.
        rank: which part of every batch is ours, of `ranks`.
        ranks: how many share a batch.
        pin_memory: if None, where there is a GPU.
        start_method: "fork", "spawn" or "forkserver"; Python's own choice if None.
        most_pixels: larger images are broken.
        most_broken: more broken samples than this stop the run; a thousandth of the source, at least 10, if None.
        """
        _check_ranks(batch_size, rank, ranks)
        if not len(source):
            raise DataError("the data set is empty")
        self.source, self.batch_size, self.position = source, batch_size, position
        self.most_broken = max(int(len(source) * BROKEN_SHARE), BROKEN_LEAST) if most_broken is None else most_broken
        self.broken: dict[int, Broken] = {}
        self._samples = _TrainingSamples(
            source, image_size, seed, augmentation or Augmentation(), channels, most_pixels
        )
        self._share = (rank, ranks)
        self._options = _loader_options(workers, pin_memory, start_method)

    @property
    def epoch(self) -> float:
        """How often the source has been seen."""
        return self.position / len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        deaths = 0
        while True:
            steps = _EndlessSteps(self.position, self.batch_size, *self._share)
            loader = DataLoader(self._samples, batch_sampler=steps, **self._options)
            try:
                for batch in loader:
                    if isinstance(batch, DataError):
                        raise batch
                    self.position += self.batch_size
                    self._count(batch.broken)
                    deaths = 0
                    yield batch
            except RuntimeError as error:
                deaths += 1
                if not _WORKER_DIED.search(str(error)) or deaths > WORKER_DEATHS:
                    raise
                log.warning("%s; starting new workers at sample %d", error, self.position)

    def _count(self, found: Sequence[Broken]) -> None:
        """Each broken sample is named once; too many are an error that lists them."""
        for broken in found:
            if broken.index not in self.broken:
                self.broken[broken.index] = broken
                log.warning("%s: %s; another image takes its place", broken.name, broken.reason)
        if len(self.broken) > self.most_broken:
            lines = "\n".join(f"  {broken.name}: {broken.reason}" for broken in self.broken.values())
            raise DataError(
                f"{len(self.broken)} of {len(self.source)} images cannot be used, more than the {self.most_broken} "
                f"allowed; `vitrail data check` finds them all\n{lines}"
            )


class EvaluationLoader:
    """Every sample once, in order, prepared as the preprocessing says. All ranks get equally many batches."""

    def __init__(
        self,
        source: Source,
        preprocessing: Preprocessing,
        batch_size: int,
        *,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
        pin_memory: bool | None = None,
        start_method: str | None = None,
        most_pixels: int = MOST_PIXELS_TRAINING,
    ) -> None:
        """`batch_size`: images in a step on all ranks together; the rest as for training."""
        _check_ranks(batch_size, rank, ranks)
        self._samples = _EvaluationSamples(source, preprocessing, most_pixels)
        self._steps = _Steps(len(source), batch_size, rank, ranks)
        self._options = _loader_options(workers, pin_memory, start_method)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Batch]:
        for batch in DataLoader(self._samples, batch_sampler=self._steps, **self._options):
            for broken in batch.broken:
                log.warning("%s: %s; it is not counted", broken.name, broken.reason)
            yield batch


@dataclass
class _TrainingSamples(Dataset[Batch | DataError]):
    """What a worker does with the positions of a batch."""

    source: Source
    image_size: tuple[int, int]
    seed: int
    augmentation: Augmentation
    channels: int
    most_pixels: int

    def __getitems__(self, positions: Sequence[int]) -> Batch | DataError:
        """An error is handed over: raised in a worker it would arrive wrapped in that worker's traceback."""
        try:
            return self._batch(positions)
        except DataError as error:
            return error

    def _batch(self, positions: Sequence[int]) -> Batch:
        order = Order(len(self.source), self.seed, self.source.block, self.source.window)
        epochs, indices = order(np.asarray(positions))
        images = _empty(len(positions), self.channels, self.image_size)
        labels = torch.empty(len(positions), dtype=torch.int64)
        broken: list[Broken] = []
        for place, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            images[place], labels[place] = self._image(epoch, index, broken)
        mask = torch.ones(len(positions), dtype=torch.bool)
        return Batch(images, labels, torch.from_numpy(indices), mask, tuple(broken))

    def _image(self, epoch: int, index: int, broken: list[Broken]) -> tuple[Tensor, int]:
        """One sample augmented; where it is broken another, which depends on nothing but seed, epoch and sample."""
        key = mixed(self.seed, epoch, index)
        for attempt in range(REPLACEMENTS):
            chosen = index if attempt == 0 else mixed(key, attempt) % len(self.source)
            try:
                return self._augmented(self.source.sample(chosen), random.Random(key))
            except DataError as error:
                broken.append(Broken(chosen, self.source.called(chosen), str(error)))
        raise DataError(f"{broken[0].name}: {broken[0].reason}; and {REPLACEMENTS - 1} others are broken too")

    def _augmented(self, sample: Sample, rng: random.Random) -> tuple[Tensor, int]:
        options = self.augmentation

        def box(height: int, width: int) -> tuple[int, int, int, int]:
            return inception_box(height, width, rng, options.crop_area, options.crop_ratio)

        image = decode_crop(sample.content, box, self.image_size, self.most_pixels)
        return to_channels(augment(to_channels(image, 3), options, rng), self.channels), sample.label


@dataclass
class _EvaluationSamples(Dataset[Batch]):
    """What a worker does with the numbers of samples; −1 stands for none."""

    source: Source
    preprocessing: Preprocessing
    most_pixels: int

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        channels = len(self.preprocessing.mean)
        images = _empty(len(indices), channels, self.preprocessing.image_size).zero_()
        labels = torch.zeros(len(indices), dtype=torch.int64)
        mask = torch.zeros(len(indices), dtype=torch.bool)
        broken: list[Broken] = []
        for place, index in enumerate(indices):
            if index < 0:
                continue
            try:
                sample = self.source.sample(index)
                content = sample.content
                pixels = content if isinstance(content, Tensor) else decode(content, self.most_pixels)
                images[place] = fitted(to_channels(pixels, channels), self.preprocessing)
                labels[place], mask[place] = sample.label, True
            except DataError as error:
                broken.append(Broken(index, self.source.called(index), str(error)))
        return Batch(images, labels, torch.tensor(indices), mask, tuple(broken))


def _empty(count: int, channels: int, size: tuple[int, int]) -> Tensor:
    """(count, channels, *size) in the memory order of decoded images, so that one is copied into it in one go; in a
    worker in memory that is shared already, so that handing the batch over copies nothing."""
    shape, alone = (count, *size, channels), get_worker_info() is None
    pixels = torch.empty(math.prod(shape) if alone else 0, dtype=torch.uint8)
    if not alone:
        pixels.set_(torch.UntypedStorage._new_shared(math.prod(shape)))
    return pixels.view(shape).permute(0, 3, 1, 2)


@dataclass
class _EndlessSteps(Sampler[list[int]]):
    """The positions of each step that fall to one rank, from a position on."""

    position: int
    batch_size: int
    rank: int
    ranks: int

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        start = self.position + self.rank * share
        while True:
            yield list(range(start, start + share))
            start += self.batch_size


@dataclass
class _Steps(Sampler[list[int]]):
    """The samples of each step that fall to one rank, once; −1 fills up."""

    count: int
    batch_size: int
    rank: int
    ranks: int

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        for step in range(len(self)):
            start = step * self.batch_size + self.rank * share
            yield [index if index < self.count else -1 for index in range(start, start + share)]


_WORKER_DIED = re.compile(r"DataLoader worker .*(exited unexpectedly|is killed)")


def _check_ranks(batch_size: int, rank: int, ranks: int) -> None:
    if batch_size < 1 or batch_size % ranks or not 0 <= rank < ranks:
        raise ConfigError(f"batch_size = {batch_size} for rank {rank} of {ranks}: give a multiple of the ranks")


def _loader_options(workers: int, pin_memory: bool | None, start_method: str | None) -> dict[str, Any]:
    return {
        "num_workers": workers,
        "collate_fn": _as_it_is,
        "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
        "multiprocessing_context": start_method if workers else None,
    }


def _as_it_is(batch: Batch) -> Batch:
    """A worker has made the batch already."""
    return batch
