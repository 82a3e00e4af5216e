"""Turn a source into batches, for training or for evaluation.

The whole state of a training loader is one integer: how many samples have been used. The order depends on (seed,
epoch) and augmentation on (seed, epoch, sample). So the number of workers and a restart change no byte, and any number
of ranks sees the same samples in the same steps.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from vitrail.config import Preprocessing
from vitrail.data.open import Data, open_data
from vitrail.data.order import Order, derive_seed
from vitrail.data.sources.source import Sample, Source
from vitrail.data.torch_loader import EndlessSteps, EpochSteps, make_loader_options, stream_batches
from vitrail.data.transforms.augment import Augmentation, augment_image, draw_crop_box
from vitrail.data.transforms.decode import MOST_PIXELS_TRAINING, decode_crop, decode_image, to_channels
from vitrail.data.transforms.jpeg import load_decoder
from vitrail.data.transforms.preprocess import resize_and_crop
from vitrail.errors import ConfigError, DataError
from vitrail.system.device import can_copy_asynchronously
from vitrail.system.files import describe_os_error, is_out_of_handles
from vitrail.tasks.labels import LABEL
from vitrail.tasks.task import Targets, Task, to_tensors

log = logging.getLogger("vitrail")

BROKEN_SHARE, BROKEN_LEAST = 0.001, 10
"""A run stops when more samples are broken than this share of the source, and more than this number."""
REPLACEMENTS = 100
"""How many other samples are tried in place of a broken one."""


@dataclass(frozen=True)
class BrokenSample:
    """A sample that could not be used."""

    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Batch:
    """B images of one size. Pixels are uint8; they are normalised on the device, where that is cheap."""

    images: Tensor
    """(B, C, height, width) uint8."""
    targets: dict[str, Tensor]
    """What is learned, by name: "label" is (B,) int64; other tasks have other names and shapes, see vitrail/tasks/."""
    indices: Tensor
    """(B,) int64: the samples' numbers in the source; −1 for padding. A replaced sample keeps its own number."""
    mask: Tensor
    """(B,) bool: False for padding of an evaluation batch, and for samples that could not be read there."""
    broken: tuple[BrokenSample, ...] = ()

    @property
    def labels(self) -> Tensor:
        """(B,) int64: the numbers of the classes, of data with one label an image."""
        return self.targets[LABEL]

    def change_tensors(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with every tensor replaced by what `change` makes of it, such as a copy elsewhere."""
        targets = {name: change(values) for name, values in self.targets.items()}
        return Batch(change(self.images), targets, change(self.indices), change(self.mask), self.broken)

    def take(self, start: int, stop: int) -> Batch:
        """Return the part of the batch with samples `start` to `stop` − 1."""
        return self.change_tensors(lambda values: values[start:stop])

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device; the copy to a GPU of NVIDIA's is asynchronous if memory is pinned."""
        return self.change_tensors(partial(Tensor.to, device=device, non_blocking=can_copy_asynchronously(device)))

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory, from which copies to a GPU are fast. torch calls this."""
        return self.change_tensors(Tensor.pin_memory)


@dataclass
class BrokenLog:
    """Lists the broken samples of a source and raises an error when there are too many.

    It is an object of its own so that the stream of batches does not refer to its loader: a loader that is no longer
    used can then be freed at once, and its workers with it.
    """

    total: int
    """Samples in the source."""
    most: int
    """Broken samples that are allowed."""
    broken: dict[int, BrokenSample] = field(default_factory=dict)

    @classmethod
    def for_source(cls, source: Source, most_broken: int | None) -> BrokenLog:
        share = int(len(source) * BROKEN_SHARE)
        return cls(len(source), max(share, BROKEN_LEAST) if most_broken is None else most_broken)

    def add(self, samples: Sequence[BrokenSample], consequence: str) -> None:
        """Log each broken sample once; raise a DataError that lists all if there are more than allowed."""
        for sample in samples:
            if sample.index not in self.broken:
                self.broken[sample.index] = sample
                log.warning("%s: %s; %s", sample.name, sample.reason, consequence)
        if len(self.broken) > self.most:
            lines = "\n".join(f"  {broken.name}: {broken.reason}" for broken in self.broken.values())
            raise DataError(
                f"{len(self.broken)} of {self.total} images cannot be used, more than the {self.most} allowed; "
                f"`vitrail data check` finds them all\n{lines}"
            )

    def check_batches(self, batches: Iterator[Batch | DataError], consequence: str) -> Iterator[Batch]:
        """Pass batches on, and add their broken samples to the log."""
        for batch in batches:
            if isinstance(batch, DataError):
                raise batch
            self.add(batch.broken, consequence)
            yield batch


class Loader:
    """The common part of all loaders: a source, and a batch that several ranks share."""

    def __init__(self, source: Data, batch_size: int, rank: int, ranks: int, most_broken: int | None) -> None:
        self.source = open_data(source)
        if ranks < 1 or not 0 <= rank < ranks or batch_size < 1 or batch_size % ranks:
            raise ConfigError(
                f"batch_size = {batch_size} for rank {rank} of {ranks}: all ranks share a batch, so give a multiple "
                "of the number of ranks; ranks count from 0"
            )
        if not len(self.source):
            raise DataError("the data set is empty")
        self.batch_size, self.rank, self.ranks = batch_size, rank, ranks
        self._broken_log = BrokenLog.for_source(self.source, most_broken)

    @property
    def broken(self) -> dict[int, BrokenSample]:
        """The broken samples so far, by their numbers in the source."""
        return self._broken_log.broken

    @property
    def most_broken(self) -> int:
        """How many broken samples are allowed."""
        return self._broken_log.most

    @property
    def steps_per_epoch(self) -> int:
        """Batches that contain every sample; the last one reaches into the next epoch, or is padded."""
        return -(-len(self.source) // self.batch_size)


class EndlessLoader(Loader):
    """A loader for training. Its only state is `position`, the samples used so far on all ranks together."""

    position: int

    @property
    def epoch(self) -> float:
        """How many times the source has been seen; a fraction within an epoch."""
        return self.position / len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        return self

    @abstractmethod
    def __next__(self) -> Batch: ...


class TrainingLoader(EndlessLoader):
    """An endless sequence of augmented training batches.

    To resume, save `position` and pass it to a new loader. The loader is its own iterator: there is one sequence,
    however often `iter` is called.
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
        """Create the loader; workers start with the first batch.

        Args:
            source: a Source, or anything that `open_data` accepts.
            batch_size: images of a step on all ranks together; a multiple of `ranks`.
            image_size: (height, width) of the images in a batch, or one number for both.
            seed: decides the order and the augmentation.
            augmentation: None means the paper's random crop and flip.
            channels: 3, or 1 for grey.
            position: samples used so far on all ranks together.
            workers: processes that read ahead; 0 reads in this process.
            rank: which part of each batch this process gets, from 0 to `ranks` − 1.
            ranks: how many processes share a batch.
            pin_memory: None pins memory if there is a GPU.
            start_method: "fork", "spawn" or "forkserver"; None leaves the choice to Python.
            most_pixels: images with more pixels count as broken.
            most_broken: how many broken samples this rank accepts before it stops; None means a thousandth of the
                source, but at least 10.

        Raises:
            ConfigError: an argument is out of its range.
            DataError: the source cannot be opened or is empty; or, while iterating, too many samples are broken.
        """
        super().__init__(source, batch_size, rank, ranks, most_broken)
        if position < 0 or workers < 0:
            raise ConfigError(f"position = {position}, workers = {workers}: give numbers from 0 on")
        self.position = position
        if workers:
            load_decoder()  # once, not in each of them
        size = Preprocessing(image_size=image_size).image_size
        samples = _TrainingSamples(
            self.source, self.source.task, size, seed, augmentation or Augmentation(), channels, most_pixels
        )
        steps = partial(EndlessSteps, position, batch_size, rank, ranks)
        batches = stream_batches(samples, steps, make_loader_options(workers, pin_memory, start_method))
        self._batches = self._broken_log.check_batches(batches, samples.consequence)

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.position += self.batch_size
        return batch


class EvaluationLoader(Loader):
    """Every sample once, in order, resized and cropped for a model. All ranks get the same number of batches."""

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
        """Create the loader; each `iter` starts a new pass.

        Args:
            source: a Source, or anything that `open_data` accepts.
            preprocessing: `model.preprocessing` of the model that is evaluated.
            batch_size: images of a step on all ranks together; a multiple of `ranks`.
            workers: processes that read images, as for `TrainingLoader`, which explains all that follow.
            rank: the number of this process.
            ranks: the number of processes.
            pin_memory: whether batches lie where a GPU fetches them faster.
            start_method: how workers are started.
            most_pixels: images with more pixels are broken.
            most_broken: the largest number of broken samples before an error.

        Raises:
            ConfigError: an argument is out of its range.
            DataError: the source cannot be opened or is empty; or, while iterating, too many samples are broken.
        """
        if not isinstance(preprocessing, Preprocessing):
            raise ConfigError(f"preprocessing is a {type(preprocessing).__name__}: give model.preprocessing")
        super().__init__(source, batch_size, rank, ranks, most_broken)
        self._samples = _EvaluationSamples(self.source, self.source.task, preprocessing, most_pixels)
        self._options = make_loader_options(workers, pin_memory, start_method)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        steps = partial(EpochSteps, len(self.source), self.batch_size, self.rank, self.ranks)
        batches = stream_batches(self._samples, steps, self._options)
        return self._broken_log.check_batches(batches, self._samples.consequence)


class _BatchMaker(Dataset[Batch | DataError], ABC):
    """Makes whole batches in a worker process."""

    consequence: ClassVar[str]
    """What happens to a broken sample, for the log."""

    @abstractmethod
    def make_batch(self, numbers: Sequence[int]) -> Batch: ...

    def __getitems__(self, numbers: Sequence[int]) -> Batch | DataError:
        """Return the error instead of raising it: torch would wrap it in the worker's traceback."""
        try:
            return self.make_batch(numbers)
        except DataError as error:
            return error
        except OSError as error:  # not the fault of an image
            return DataError(describe_os_error(error))
        except RuntimeError as error:
            if "shared memory" not in str(error):
                raise
            return DataError(describe_full_memory())


@dataclass
class _TrainingSamples(_BatchMaker):
    """Makes augmented batches from positions of the endless sequence."""

    source: Source
    task: Task
    image_size: tuple[int, int]
    seed: int
    augmentation: Augmentation
    channels: int
    most_pixels: int

    consequence = "another image takes its place"

    def make_batch(self, positions: Sequence[int]) -> Batch:
        order = Order(len(self.source), self.seed, self.source.block, self.source.window)
        epochs, indices = order(np.asarray(positions))
        images = _allocate_images(len(positions), self.channels, self.image_size)
        targets = self.task.allocate(len(positions))
        broken: list[BrokenSample] = []
        for place, (epoch, index) in enumerate(zip(epochs.tolist(), indices.tolist(), strict=True)):
            images[place], target = self._read_or_replace(epoch, index, broken)
            set_targets(targets, place, target)
        mask = torch.ones(len(positions), dtype=torch.bool)
        return Batch(images, to_tensors(targets), torch.from_numpy(indices), mask, tuple(broken))

    def _read_or_replace(self, epoch: int, index: int, broken: list[BrokenSample]) -> tuple[Tensor, Mapping[str, Any]]:
        """Return one augmented sample; the replacement of a broken one depends only on seed, epoch and sample."""
        key = derive_seed(self.seed, epoch, index)
        for attempt in range(REPLACEMENTS):
            chosen = index if attempt == 0 else derive_seed(key, attempt) % len(self.source)
            try:
                return self._augment(self.source.read_checked(chosen), random.Random(key))
            except Exception as error:
                broken.append(describe_broken(self.source, chosen, error))
        raise DataError(f"{broken[0].name}: {broken[0].reason}; and every other that was tried is broken too")

    def _augment(self, sample: Sample, rng: random.Random) -> tuple[Tensor, Mapping[str, Any]]:
        options = self.augmentation

        def choose_box(height: int, width: int) -> tuple[int, int, int, int]:
            return draw_crop_box(height, width, rng, options.crop_area, options.crop_ratio)

        image = decode_crop(sample.content, choose_box, self.image_size, self.most_pixels)
        return to_channels(augment_image(to_channels(image, 3), options, rng), self.channels), sample.named_targets


@dataclass
class _EvaluationSamples(_BatchMaker):
    """Makes batches from sample numbers; −1 stands for padding."""

    source: Source
    task: Task
    preprocessing: Preprocessing
    most_pixels: int

    consequence = "it is not counted"

    def make_batch(self, indices: Sequence[int]) -> Batch:
        channels = len(self.preprocessing.mean)
        images = _allocate_images(len(indices), channels, self.preprocessing.image_size).zero_()
        targets = self.task.allocate(len(indices))
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
                set_targets(targets, place, sample.named_targets)
                mask[place] = True
            except Exception as error:
                broken.append(describe_broken(self.source, index, error))
        return Batch(images, to_tensors(targets), torch.tensor(indices), mask, tuple(broken))


def describe_full_memory() -> str:
    """Return what to do if a worker finds no room for a batch in the memory that processes share."""
    try:
        size = f" ({shutil.disk_usage('/dev/shm').total / 1e6:,.0f} MB in all)"
    except OSError:  # not every system has it there
        size = ""
    return (
        f"a batch finds no room in shared memory{size}: give a container more of it, such as --shm-size=2g, or take "
        "fewer workers or smaller batches; workers=0 needs none (data.workers=0 for a training)"
    )


def set_targets(targets: Targets, place: int, values: Mapping[str, Any]) -> None:
    """Write the targets of one sample into arrays of many."""
    for name, value in values.items():
        targets[name][place] = value


def _allocate_images(count: int, channels: int, size: tuple[int, int]) -> Tensor:
    """Return empty (count, channels, *size) uint8 pixels.

    The memory order is that of decoded images, so that each is copied in one piece. In a worker the memory is already
    shared, so that sending the batch copies nothing.
    """
    shape, is_worker = (count, *size, channels), get_worker_info() is not None
    pixels = torch.empty(0 if is_worker else math.prod(shape), dtype=torch.uint8)
    if is_worker:
        pixels.set_(torch.UntypedStorage._new_shared(math.prod(shape)))
    return pixels.view(shape).permute(0, 3, 1, 2)


def describe_broken(source: Source, index: int, error: Exception) -> BrokenSample:
    """Describe a sample that failed with any error: one strange sample must not stop all others.

    Raises:
        OSError: Too many files are open, which is not the fault of the sample.
    """
    if is_out_of_handles(error):
        raise error
    text = str(error) if isinstance(error, DataError) else f"unexpected {type(error).__name__}: {error}"
    name = source.display_name(index)
    return BrokenSample(index, name, " ".join(text.split()).removeprefix(f"{name}: "))
