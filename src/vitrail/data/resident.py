"""Keep a small data set on the training device: decode it once, then order, crop and augment it there.

When images are small, worker processes cannot keep an accelerator busy. Here all pixels are on the device, and making
a batch takes some hundred kernels. Samples come in the order of `TrainingLoader`. Random numbers depend on (seed,
position of the step) and are drawn for the batch of all ranks; each rank takes its rows. So neither a restart nor the
number of ranks changes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.loader import (
    REPLACEMENTS,
    Batch,
    BrokenLog,
    BrokenSample,
    EndlessLoader,
    EvaluationLoader,
    describe_broken,
    set_targets,
)
from vitrail.data.open import Data, open_data
from vitrail.data.order import Order, derive_seed
from vitrail.data.parallel import resolve_worker_count
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.augment import Augmentation
from vitrail.data.transforms.batch_augment import apply_parameters, draw_parameters, get_magnitude
from vitrail.data.transforms.batch_operations import luma
from vitrail.data.transforms.decode import MOST_PIXELS_TRAINING, decode_image, to_channels
from vitrail.errors import ConfigError, DataError, detach_error
from vitrail.system.device import float64_device, free_memory, send_to_device
from vitrail.tasks.task import Targets, to_tensors

DECODE_CHUNK = 1024
"""Samples that are decoded, then copied to the device together."""
ORDER_CHUNK = 64
"""Batches whose order is computed at a time."""


class ResidentImages:
    """The pixels and labels of a source, all of one height and width, on a device."""

    def __init__(
        self,
        source: Data,
        device: torch.device | str,
        *,
        most_pixels: int = MOST_PIXELS_TRAINING,
        most_broken: int | None = None,
    ) -> None:
        """Decode the whole source and copy it to the device.

        Args:
            source: a Source, or anything that `open_data` accepts; all images must have the same size.
            device: where the pixels are kept: on the CPU for Apple's GPU, which shares its memory with it.
            most_pixels, most_broken: as for `TrainingLoader`.

        Raises:
            DataError: the images differ in size, do not fit on the device, or too many are broken.
        """
        self.source, self.device = open_data(source), float64_device(device)
        count = len(self.source)
        if not count:
            raise DataError("the data set is empty")
        self.broken_log = BrokenLog.for_source(self.source, most_broken)
        self.pixels = torch.empty(0, dtype=torch.uint8, device=self.device)
        """(samples, 3, height, width) uint8; the pixels of broken samples are meaningless."""
        self.targets = {
            name: each.to(self.device) for name, each in to_tensors(self.source.task.allocate(count)).items()
        }
        """For each target an array of all samples; see vitrail/tasks/."""
        self._first_index = -1  # the first sample that could be decoded
        # One thread reads the source, many decode: decoding releases Python's lock.
        with ThreadPoolExecutor(resolve_worker_count(None)) as threads:
            for start in range(0, count, DECODE_CHUNK):
                self._add(range(start, min(start + DECODE_CHUNK, count)), threads, most_pixels)
        if self._first_index < 0:
            broken = next(iter(self.broken_log.broken.values()))
            raise DataError(f"{broken.name}: {broken.reason}; and every other image is broken too")

    def choose_replacements(self, seed: int) -> Tensor:
        """Return (samples,) int64: each sample's own number, or that of its replacement if it is broken."""
        numbers = torch.arange(len(self.source))
        for index, broken in self.broken_log.broken.items():
            key = derive_seed(seed, index)
            candidates = (derive_seed(key, attempt) % len(self.source) for attempt in range(1, REPLACEMENTS))
            other = next((other for other in candidates if other not in self.broken_log.broken), None)
            if other is None:
                raise DataError(f"{broken.name}: {broken.reason}; and every other that was tried is broken too")
            numbers[index] = other
        return numbers.to(self.device)

    def _add(self, indices: range, threads: ThreadPoolExecutor, most_pixels: int) -> None:
        samples = [_read_or_error(self.source, index) for index in indices]
        decoded = list(threads.map(partial(_decode_or_error, most_pixels=most_pixels), samples))
        broken, places, images = [], list[int](), list[Tensor]()
        for index, sample, image in zip(indices, samples, decoded, strict=True):
            if isinstance(image, Exception):
                broken.append(describe_broken(self.source, index, image))
                continue
            assert isinstance(sample, Sample)
            self._check_size(index, image)
            places.append(index)
            images.append(image)
        self.broken_log.add(broken, "another image takes its place")
        if places:
            where = torch.tensor(places, device=self.device)
            self.pixels[where] = torch.stack(images).to(self.device)
            for name, values in to_tensors(self._collect_targets(samples, indices, places)).items():
                self.targets[name][where] = values.to(self.device)

    def _collect_targets(self, samples: list[Sample | Exception], indices: range, places: list[int]) -> Targets:
        targets = self.source.task.allocate(len(places))
        for row, place in enumerate(places):
            sample = samples[place - indices.start]
            assert isinstance(sample, Sample)
            set_targets(targets, row, sample.named_targets)
        return targets

    def _check_size(self, index: int, image: Tensor) -> None:
        """Allocate memory at the first image; check that every later one has the same size."""
        if self._first_index < 0:
            size = len(self.source) * image.numel()
            free = free_memory(self.device)
            if free is not None and size > free // 2:
                raise DataError(
                    f"{size:,} bytes of pixels are more than half of the {free:,} that are free on {self.device}: "
                    "give data.on_device=false and data.workers, or take smaller images"
                )
            self._first_index = index
            self.pixels = torch.zeros(len(self.source), *image.shape, dtype=torch.uint8, device=self.device)
        elif image.shape != self.pixels.shape[1:]:
            (height, width), (first_height, first_width) = image.shape[1:], self.pixels.shape[2:]
            name, first_name = self.source.display_name(index), self.source.display_name(self._first_index)
            raise DataError(
                f"{name} is {width}×{height} pixels and {first_name} {first_width}×{first_height}: "
                "on the device all images must have one size; give "
                "data.on_device=false and data.workers, or make the images one size first"
            )


class ResidentLoader(EndlessLoader):
    """An endless sequence of training batches that are made on the device; used like a `TrainingLoader`."""

    def __init__(
        self,
        source: Data | ResidentImages,
        batch_size: int,
        image_size: int | tuple[int, int],
        *,
        device: torch.device | str,
        seed: int = 0,
        augmentation: Augmentation | None = None,
        channels: int = 3,
        position: int = 0,
        rank: int = 0,
        ranks: int = 1,
        most_pixels: int = MOST_PIXELS_TRAINING,
        most_broken: int | None = None,
    ) -> None:
        """Copy the source to the device, unless it is there already, and create the loader.

        Args:
            source: `ResidentImages` on the same device, or anything that `open_data` accepts.
            batch_size: images of a step on all ranks together. Random numbers depend on it.
            device: where pixels are kept and batches are made: on the CPU for Apple's GPU, because augmentation
                computes in float64.
            rank: which part of each batch this process gets. Each rank keeps all pixels.
            image_size, seed, augmentation, channels, position, ranks, most_pixels, most_broken: as for
                `TrainingLoader`.

        Raises:
            ConfigError: an argument is out of its range.
            DataError: the data cannot be kept on the device; see `ResidentImages`.
        """
        super().__init__(
            source.source if isinstance(source, ResidentImages) else source, batch_size, rank, ranks, most_broken
        )
        if position < 0:
            raise ConfigError(f"position = {position}: give a number from 0 on")
        if channels not in (1, 3):
            raise ConfigError(f"channels = {channels}: give 3, or 1 for grey")
        self.position, self.seed, self.channels = position, seed, channels
        self.device, self.augmentation = float64_device(device), augmentation or Augmentation()
        self.image_size = Preprocessing(image_size=image_size).image_size
        if not isinstance(source, ResidentImages):
            source = ResidentImages(self.source, self.device, most_pixels=most_pixels, most_broken=most_broken)
        self.images, self._broken_log = source, source.broken_log
        self._replacements = source.choose_replacements(seed)
        self._mask = torch.ones(batch_size // ranks, dtype=torch.bool, device=self.device)
        self._order = Order(len(self.source), seed, self.source.block, self.source.window)
        self._upcoming: Tensor | None = None
        """(ORDER_CHUNK, share) int64: the samples of the next batches."""
        self._upcoming_from = position
        """The position that `_upcoming` starts from."""
        self.generator = torch.Generator(self.device)
        self.make: Callable[[Tensor], tuple[Tensor, ...]] = self._make
        """Makes the images and targets of a batch from its sample numbers, with random numbers of `generator`."""
        self.aside: torch.cuda.Stream | None = None
        """If set, the next batch is made on this stream while the device works on the current one."""
        self._prefetched: tuple[int, Batch] | None = None

    def __next__(self) -> Batch:
        batch = self._make_batch(self.position) if self.aside is None else self._take_prefetched(self.aside)
        self.position += self.batch_size
        return batch

    def _make_batch(self, position: int) -> Batch:
        indices = self._choose_samples(position)
        self.generator.manual_seed(derive_seed(self.seed, position))
        images, *targets = self.make(indices)
        return Batch(images, dict(zip(self.images.targets, targets, strict=True)), indices, self._mask)

    def _take_prefetched(self, aside: torch.cuda.Stream) -> Batch:
        """Return a copy of the prefetched batch and start the next one on the other stream.

        The next batch waits for the work queued so far and runs beside the work queued later.
        """

        def start(position: int) -> tuple[int, Batch]:
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                return position, self._make_batch(position)

        if self._prefetched is None or self._prefetched[0] != self.position:
            self._prefetched = start(self.position)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        ready = self._prefetched[1]
        batch = replace(ready.change_tensors(Tensor.clone), mask=ready.mask)
        self._prefetched = start(self.position + self.batch_size)
        return batch

    def _choose_samples(self, position: int) -> Tensor:
        """Return the sample numbers of a batch; the order of many batches is computed and copied at a time."""
        number, rest = divmod(position - self._upcoming_from, self.batch_size)
        if self._upcoming is None or rest or not 0 <= number < ORDER_CHUNK:
            share, self._upcoming_from, number = self.batch_size // self.ranks, position, 0
            starts = position + self.rank * share + np.arange(ORDER_CHUNK) * self.batch_size
            _, indices = self._order((starts[:, None] + np.arange(share)).ravel())
            self._upcoming = send_to_device(torch.from_numpy(indices).view(ORDER_CHUNK, share), self.device)
        return self._upcoming[number]

    def _make(self, indices: Tensor) -> tuple[Tensor, ...]:
        start = self.rank * len(indices)
        chosen = self._replacements[indices]
        pixels = self.images.pixels[chosen]
        old_size = (pixels.shape[2], pixels.shape[3])
        drawn = draw_parameters(self.batch_size, self.augmentation, self.generator, old_size, self.image_size)
        own = drawn.select_rows(start, start + len(indices))
        images = apply_parameters(pixels, own, get_magnitude(self.augmentation), self.image_size)
        if self.channels == 1:
            images = luma(images).to(torch.uint8)
        return images, *(values[chosen] for values in self.images.targets.values())


class CachedBatches:
    """The batches of an evaluation, prepared in the first pass and then kept on the device.

    If they would take more than half of the device's free memory, they are prepared in every pass.
    """

    def __init__(self, loader: EvaluationLoader, device: torch.device | str) -> None:
        self.loader, self.device = loader, torch.device(device)
        self._cache: list[Batch] | None = None

    @property
    def source(self) -> Source:
        return self.loader.source

    @property
    def broken(self) -> dict[int, BrokenSample]:
        """The broken samples so far, by their numbers in the source."""
        return self.loader.broken

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate once. A pass that is not finished caches nothing."""
        if self._cache is not None:
            yield from self._cache
            return
        batches: list[Batch] = []
        fits: bool | None = None
        for batch in self.loader:
            if fits is None:
                free = free_memory(self.device)
                fits = free is None or batch.images.numel() * len(self) <= free // 2
            moved = batch.to(self.device)
            if fits:
                batches.append(moved)
            yield moved
        if fits:
            self._cache = batches


def _read_or_error(source: Source, index: int) -> Sample | Exception:
    """Return the error instead of raising it: one strange sample must not stop all others."""
    try:
        return source.read_checked(index)
    except Exception as error:
        return detach_error(error)


def _decode_or_error(sample: Sample | Exception, most_pixels: int) -> Tensor | Exception:
    """Return (3, height, width) uint8 pixels, or the error of reading or decoding."""
    if isinstance(sample, Exception):
        return sample
    try:
        content = sample.content
        return to_channels(content if isinstance(content, Tensor) else decode_image(content, most_pixels), 3)
    except Exception as error:
        return detach_error(error)
