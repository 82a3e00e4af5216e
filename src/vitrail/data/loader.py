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
import signal
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from vitrail.config import Preprocessing
from vitrail.data.open import Data, open_data
from vitrail.data.order import Order, derive_seed
from vitrail.data.parallel import exit_with_parent
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.augment import Augmentation, augment_image, draw_crop_box
from vitrail.data.transforms.decode import MOST_PIXELS_TRAINING, decode_image, decode_crop, to_channels
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ConfigError, DataError

log = logging.getLogger("vitrail")

BROKEN_SHARE, BROKEN_LEAST = 0.001, 10
"""More broken samples than this share of a source, and than this number, stop a run."""
REPLACEMENTS = 100
"""How many others are tried in place of a broken sample before giving up."""
WORKER_DEATHS = 3
"""How often in a row workers may die, of memory for example, before giving up."""


@dataclass(frozen=True)
class BrokenSample:
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
    """(B,) int64: the samples' numbers in their source, also where another takes a broken one's place; −1 where there
    is none."""
    mask: Tensor
    """(B,) bool: False for what only fills up an evaluation batch, or could not be read there."""
    broken: tuple[BrokenSample, ...] = ()

    def to(self, device: torch.device | str) -> Batch:
        """On another device; without waiting where memory is pinned."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _TENSORS}
        return replace(self, **moved)

    def pin_memory(self) -> Batch:
        """For a fast way to a GPU."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})


_TENSORS = ("images", "labels", "indices", "mask")


class _Loader:
    """What training and evaluation share."""

    def __init__(self, source: Data, batch_size: int, rank: int, ranks: int, most_broken: int | None) -> None:
        self.source = open_data(source)
        if ranks < 1 or not 0 <= rank < ranks or batch_size < 1 or batch_size % ranks:
            raise ConfigError(
                f"batch_size = {batch_size} for rank {rank} of {ranks}: a batch is shared by all ranks, so give a "
                "multiple of their number, and ranks that count from 0"
            )
        if not len(self.source):
            raise DataError("the data set is empty")
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        share = int(len(self.source) * BROKEN_SHARE)
        self.most_broken = max(share, BROKEN_LEAST) if most_broken is None else most_broken
        self._account = _Account(len(self.source), self.most_broken)

    @property
    def broken(self) -> dict[int, BrokenSample]:
        """The samples found to be broken, by their numbers."""
        return self._account.broken

    @property
    def steps_per_epoch(self) -> int:
        """Batches in which every sample is seen once; the last may reach into the next epoch, or be filled up."""
        return -(-len(self.source) // self.batch_size)


@dataclass
class _Account:
    """Of broken samples. Not a part of the loader: one that nobody wants any more ends at once then, with workers."""

    total: int
    most: int
    broken: dict[int, BrokenSample] = field(default_factory=dict)

    def add(self, found: Sequence[BrokenSample], instead: str) -> None:
        """Each broken sample is named once; too many are an error that lists them."""
        for broken in found:
            if broken.index not in self.broken:
                self.broken[broken.index] = broken
                log.warning("%s: %s; %s", broken.name, broken.reason, instead)
        if len(self.broken) > self.most:
            lines = "\n".join(f"  {broken.name}: {broken.reason}" for broken in self.broken.values())
            raise DataError(
                f"{len(self.broken)} of {self.total} images cannot be used, more than the {self.most} allowed; "
                f"`vitrail data check` finds them all\n{lines}"
            )


def _batches(
    samples: _Samples, steps: Callable[[int], Sampler[list[int]]], options: dict[str, Any], account: _Account
) -> Iterator[Batch]:
    """The batches of `steps(0)`. Where a worker dies, new ones go on with `steps(done)`."""
    done = deaths = 0
    while True:
        with warnings.catch_warnings():
            # More workers than cores is what a person asked for, and torch would say so again for every loader.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(samples, batch_sampler=steps(done), **options)
        try:
            for batch in _without_interruption(loader):
                if isinstance(batch, DataError):
                    raise batch
                account.add(batch.broken, samples.instead)
                done, deaths = done + 1, 0
                yield batch
            return
        except (RuntimeError, EOFError, OSError) as error:
            # Found by torch; or in the middle of handing a batch over, when the other end of a connection is gone.
            died = _WORKER_DIED.search(str(error)) if isinstance(error, RuntimeError) else options["num_workers"]
            deaths += 1
            if not died or deaths > WORKER_DEATHS:
                raise
            log.warning("a worker died (%s); new workers go on from there", error or type(error).__name__)


class _EndlessLoader(_Loader):
    """What those of training share: the samples used so far on all ranks together are all of their state."""

    position: int

    @property
    def epoch(self) -> float:
        """How often the source has been seen."""
        return self.position / len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def __next__(self) -> Batch:
        """The next batch, wherever it comes from."""


class TrainingLoader(_EndlessLoader):
    """An endless sequence of batches. `position` is its state: save it, and give it back to go on from there.

    It is its own iterator: however often `iter` is called, there is one sequence.
    """

    def __init__(
        self,
        source: Data,
        batch_size: int,
        image_size: int | tuple[int, int],
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
        """Where samples come from, and what becomes of them.

        Args:
            source: from `open_data`, or what that takes.
            batch_size: images in a step on all ranks together.
            image_size: height and width of the images in a batch, or one number.
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
            most_broken: more broken samples than this, on this rank since this start, stop the run; a thousandth of
                the source, at least 10, if None.
        """
        super().__init__(source, batch_size, rank, ranks, most_broken)
        if position < 0 or workers < 0:
            raise ConfigError(f"position = {position}, workers = {workers}: give numbers from 0 on")
        self.position = position
        size = Preprocessing(image_size=image_size).image_size
        samples = _TrainingSamples(self.source, size, seed, augmentation or Augmentation(), channels, most_pixels)
        options = _loader_options(workers, pin_memory, start_method)
        steps = partial(_EndlessSteps, position, batch_size, rank, ranks)
        self._sequence = _batches(samples, steps, options, self._account)

    def __next__(self) -> Batch:
        batch = next(self._sequence)
        self.position += self.batch_size
        return batch


class EvaluationLoader(_Loader):
    """Every sample once, in order, prepared as the preprocessing says. All ranks get equally many batches."""

    def __init__(
        self,
        source: Data,
        preprocessing: Preprocessing,
        batch_size: int,
        *,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
        pin_memory: bool | None = None,
        start_method: str | None = None,
        most_pixels: int = MOST_PIXELS_TRAINING,
        most_broken: int | None = None,
    ) -> None:
        """`preprocessing`: the model's. `batch_size`: on all ranks together. The rest as for training."""
        if not isinstance(preprocessing, Preprocessing):
            raise ConfigError(f"preprocessing is a {type(preprocessing).__name__}: give model.preprocessing")
        super().__init__(source, batch_size, rank, ranks, most_broken)
        self._samples = _EvaluationSamples(self.source, preprocessing, most_pixels)
        self._options = _loader_options(workers, pin_memory, start_method)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        """Once through; each call begins anew."""
        steps = partial(_Steps, len(self.source), self.batch_size, self.rank, self.ranks)
        return _batches(self._samples, steps, self._options, self._account)


class _Samples(Dataset[Batch | DataError], ABC):
    """What a worker does with the numbers of a batch."""

    instead: ClassVar[str]
    """What becomes of a broken sample, for the log."""

    @abstractmethod
    def batch(self, numbers: Sequence[int]) -> Batch:
        """Made in a worker."""

    def __getitems__(self, numbers: Sequence[int]) -> Batch | DataError:
        """An error is handed over: raised in a worker it would arrive wrapped in that worker's traceback."""
        try:
            return self.batch(numbers)
        except DataError as error:
            return error


@dataclass
class _TrainingSamples(_Samples):
    """Positions of the endless sequence become images."""

    source: Source
    image_size: tuple[int, int]
    seed: int
    augmentation: Augmentation
    channels: int
    most_pixels: int

    instead = "another image takes its place"

    def batch(self, positions: Sequence[int]) -> Batch:
        """Augmented images, none missing."""
        order = Order(len(self.source), self.seed, self.source.block, self.source.window)
        epochs, indices = order(np.asarray(positions))
        images = _empty(len(positions), self.channels, self.image_size)
        labels = torch.empty(len(positions), dtype=torch.int64)
        broken: list[BrokenSample] = []
        for place, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            images[place], labels[place] = self._image(epoch, index, broken)
        mask = torch.ones(len(positions), dtype=torch.bool)
        return Batch(images, labels, torch.from_numpy(indices), mask, tuple(broken))

    def _image(self, epoch: int, index: int, broken: list[BrokenSample]) -> tuple[Tensor, int]:
        """One sample augmented; where it is broken another, which depends on nothing but seed, epoch and sample."""
        key = derive_seed(self.seed, epoch, index)
        for attempt in range(REPLACEMENTS):
            chosen = index if attempt == 0 else derive_seed(key, attempt) % len(self.source)
            try:
                return self._augmented(self.source.read_checked(chosen), random.Random(key))
            except Exception as error:
                broken.append(BrokenSample(chosen, self.source.display_name(chosen), _reason(error)))
        raise DataError(f"{broken[0].name}: {broken[0].reason}; and every other that was tried is broken too")

    def _augmented(self, sample: Sample, rng: random.Random) -> tuple[Tensor, int]:
        options = self.augmentation

        def box(height: int, width: int) -> tuple[int, int, int, int]:
            return draw_crop_box(height, width, rng, options.crop_area, options.crop_ratio)

        image = decode_crop(sample.content, box, self.image_size, self.most_pixels)
        return to_channels(augment_image(to_channels(image, 3), options, rng), self.channels), sample.label


@dataclass
class _EvaluationSamples(_Samples):
    """Numbers of samples become images; −1 stands for none."""

    source: Source
    preprocessing: Preprocessing
    most_pixels: int

    instead = "it is not counted"

    def batch(self, indices: Sequence[int]) -> Batch:
        """Images as the model wants them; what is missing is masked."""
        channels = len(self.preprocessing.mean)
        images = _empty(len(indices), channels, self.preprocessing.image_size).zero_()
        labels = torch.zeros(len(indices), dtype=torch.int64)
        mask = torch.zeros(len(indices), dtype=torch.bool)
        broken: list[BrokenSample] = []
        for place, index in enumerate(indices):
            if index < 0:
                continue
            try:
                sample = self.source.read_checked(index)
                content = sample.content
                pixels = content if isinstance(content, Tensor) else decode_image(content, self.most_pixels)
                images[place] = resize_and_crop(to_channels(pixels, channels), self.preprocessing)
                labels[place], mask[place] = sample.label, True
            except Exception as error:
                broken.append(BrokenSample(index, self.source.display_name(index), _reason(error)))
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
    """The positions of each step that fall to one rank, from a position and so many steps on."""

    position: int
    batch_size: int
    rank: int
    ranks: int
    first: int

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        start = self.position + self.first * self.batch_size + self.rank * share
        while True:
            yield list(range(start, start + share))
            start += self.batch_size


@dataclass
class _Steps(Sampler[list[int]]):
    """The samples of each step that fall to one rank, once, from a step on; −1 fills up."""

    count: int
    batch_size: int
    rank: int
    ranks: int
    first: int

    def __iter__(self) -> Iterator[list[int]]:
        share = self.batch_size // self.ranks
        for step in range(self.first, -(-self.count // self.batch_size)):
            start = step * self.batch_size + self.rank * share
            yield [index if index < self.count else -1 for index in range(start, start + share)]


_WORKER_DIED = re.compile(r"DataLoader worker .*(exited unexpectedly|is killed)")


def _without_interruption(loader: DataLoader[Any]) -> Iterator[Any]:
    """Its batches. torch would raise the death of a worker wherever the program happens to be, in the middle of a
    training step; without its handler the death is found here, when the next batch is asked for."""
    if not loader.num_workers or threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        batches = iter(loader)
    if before is not None:
        signal.signal(signal.SIGCHLD, before)
    return batches


def _reason(error: Exception) -> str:
    """One strange sample is no reason to give up on all others, and is told as what it is."""
    text = str(error) if isinstance(error, DataError) else f"unexpected {type(error).__name__}: {error}"
    return " ".join(text.split())


def _loader_options(workers: int, pin_memory: bool | None, start_method: str | None) -> dict[str, Any]:
    return {
        "num_workers": workers,
        "collate_fn": _as_it_is,
        "worker_init_fn": exit_with_parent,
        "generator": torch.Generator(),  # of its own: else it would draw from the program's
        "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
        "multiprocessing_context": start_method if workers else None,
    }


def _as_it_is(batch: Batch) -> Batch:
    """A worker has made the batch already."""
    return batch
