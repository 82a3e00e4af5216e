"""A small data set that lives on the training device: decoded once, ordered, cropped and augmented there.

Processes that decode and augment give an accelerator less than it can take when images are small. Here all pixels lie
beside the model, and a batch is some hundred kernels away. The order of samples is that of `TrainingLoader`; chance is
a function of (seed, position of the step), drawn for the batch of all ranks, of which each takes its part. So neither
a stop and a new start nor the number of ranks changes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.loader import (
    BROKEN_LEAST,
    BROKEN_SHARE,
    REPLACEMENTS,
    Batch,
    BrokenSample,
    EvaluationLoader,
    _Account,
    _EndlessLoader,
    _reason,
)
from vitrail.data.open import Data, open_data
from vitrail.data.order import Order, derive_seed
from vitrail.data.parallel import resolve_worker_count
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.augment import Augmentation
from vitrail.data.transforms.batch_augment import apply_parameters, draw_parameters, get_magnitude
from vitrail.data.transforms.batch_operations import luma
from vitrail.data.transforms.decode import MOST_PIXELS_TRAINING, decode_image, to_channels
from vitrail.errors import ConfigError, DataError
from vitrail.system.device import send_to_device

AT_ONCE = 1024
"""Samples that are read and decoded before they go to the device together."""
AHEAD = 64
"""Batches whose order is worked out at a time."""
INSTEAD = "another image takes its place"


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
        """Decode all of it. `most_broken` and `most_pixels` as for a TrainingLoader."""
        self.source, self.device = open_data(source), torch.device(device)
        count = len(self.source)
        if not count:
            raise DataError("the data set is empty")
        most = max(int(count * BROKEN_SHARE), BROKEN_LEAST) if most_broken is None else most_broken
        self.account = _Account(count, most)
        self.pixels = torch.empty(0, dtype=torch.uint8, device=self.device)
        """(samples, 3, height, width) uint8; what is broken holds nothing of meaning."""
        self.labels = torch.zeros(count, dtype=torch.int64, device=self.device)
        self._first = -1
        # A source is read by one thread alone; decoding releases Python's lock.
        with ThreadPoolExecutor(resolve_worker_count(None)) as threads:
            for start in range(0, count, AT_ONCE):
                self._add(range(start, min(start + AT_ONCE, count)), threads, most_pixels)
        if self._first < 0:
            broken = next(iter(self.account.broken.values()))
            raise DataError(f"{broken.name}: {broken.reason}; and every other image is broken too")

    def stand_ins(self, seed: int) -> Tensor:
        """(samples,) int64: each sample's own number; for a broken one that of another, by the seed and its number."""
        found = torch.arange(len(self.source))
        for index, broken in self.account.broken.items():
            key = derive_seed(seed, index)
            tried = (derive_seed(key, attempt) % len(self.source) for attempt in range(1, REPLACEMENTS))
            other = next((other for other in tried if other not in self.account.broken), None)
            if other is None:
                raise DataError(f"{broken.name}: {broken.reason}; and every other that was tried is broken too")
            found[index] = other
        return found.to(self.device)

    def _add(self, indices: range, threads: ThreadPoolExecutor, most_pixels: int) -> None:
        read = [_tried(partial(self.source.read_checked, index)) for index in indices]
        decoded = list(threads.map(partial(_pixels, most_pixels=most_pixels), read))
        broken, places, images, labels = [], [], [], []
        for index, sample, image in zip(indices, read, decoded, strict=True):
            if isinstance(image, Exception):
                broken.append(BrokenSample(index, self.source.display_name(index), _reason(image)))
                continue
            assert isinstance(sample, Sample)
            self._check(index, image)
            places.append(index)
            images.append(image)
            labels.append(sample.label)
        self.account.add(broken, INSTEAD)
        if places:
            where = torch.tensor(places, device=self.device)
            self.pixels[where] = torch.stack(images).to(self.device)
            self.labels[where] = torch.tensor(labels, device=self.device)

    def _check(self, index: int, image: Tensor) -> None:
        """The first image decides the size of all, and how much room they need."""
        if self._first < 0:
            size = len(self.source) * image.numel()
            free = _free(self.device)
            if free is not None and size > free // 2:
                raise DataError(
                    f"{size:,} bytes of pixels are more than half of the {free:,} that are free on {self.device}: "
                    "give data.on_device=false and data.workers, or take smaller images"
                )
            self._first = index
            self.pixels = torch.zeros(len(self.source), *image.shape, dtype=torch.uint8, device=self.device)
        elif image.shape != self.pixels.shape[1:]:
            (height, width), (first_height, first_width) = image.shape[1:], self.pixels.shape[2:]
            raise DataError(
                f"{self.source.display_name(index)} is {width}×{height} pixels and {self.source.display_name(self._first)} "
                f"{first_width}×{first_height}: on the device all images must have one size; give "
                "data.on_device=false and data.workers, or make the images one size first"
            )


class ResidentLoader(_EndlessLoader):
    """An endless sequence of batches that are on the device already. `position` is its state, as a TrainingLoader's.

    It is its own iterator: however often `iter` is called, there is one sequence.
    """

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
        """Where samples come from, and what becomes of them.

        Args:
            source: from `open_data`, or what that takes; or images that are on `device` already, with an account of
                what is broken.
            batch_size: images in a step on all ranks together. It is part of what chance depends on.
            image_size: height and width of the images in a batch, or one number.
            device: where pixels are kept and batches made.
            seed: of order and augmentation.
            augmentation: the paper's crop and flip if None.
            channels: 3, or 1 for grey.
            position: samples used so far on all ranks together.
            rank: which part of every batch is ours, of `ranks`. Each rank keeps all pixels.
            ranks: how many share a batch.
            most_pixels: larger images are broken.
            most_broken: more broken samples than this stop the run; a thousandth of the source, at least 10, if None.
        """
        super().__init__(
            source.source if isinstance(source, ResidentImages) else source, batch_size, rank, ranks, most_broken
        )
        if position < 0:
            raise ConfigError(f"position = {position}: give a number from 0 on")
        if channels not in (1, 3):
            raise ConfigError(f"channels = {channels}: give 3, or 1 for grey")
        self.position, self.seed, self.channels = position, seed, channels
        self.device, self.augmentation = torch.device(device), augmentation or Augmentation()
        self.image_size = Preprocessing(image_size=image_size).image_size
        if not isinstance(source, ResidentImages):
            source = ResidentImages(self.source, self.device, most_pixels=most_pixels, most_broken=most_broken)
        self.images, self._account, self.most_broken = source, source.account, source.account.most
        self._stand_ins = source.stand_ins(seed)
        self._all = torch.ones(batch_size // ranks, dtype=torch.bool, device=self.device)
        self._order = Order(len(self.source), seed, self.source.block, self.source.window)
        self._ahead: Tensor | None = None
        self._first = position
        """The position that `_ahead` begins from."""
        self.generator = torch.Generator(self.device)
        self.make: Callable[[Tensor], tuple[Tensor, Tensor]] = self._make
        """Numbers of a batch's samples → its images and labels, drawing from the generator."""
        self.aside: torch.cuda.Stream | None = None
        """Where given, batches are made there one ahead, while the device is at work on the last."""
        self._begun: tuple[int, Batch] | None = None

    def __next__(self) -> Batch:
        batch = self._made(self.position) if self.aside is None else self._made_aside(self.aside)
        self.position += self.batch_size
        return batch

    def _made(self, position: int) -> Batch:
        indices = self._numbers(position)
        self.generator.manual_seed(derive_seed(self.seed, position))
        images, labels = self.make(indices)
        return Batch(images, labels, indices, self._all)

    def _made_aside(self, aside: torch.cuda.Stream) -> Batch:
        """A copy of what is made there, where the next one is then begun: after all that was asked of the device so
        far, and beside what will be."""

        def begin(position: int) -> tuple[int, Batch]:
            aside.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(aside):
                return position, self._made(position)

        if self._begun is None or self._begun[0] != self.position:
            self._begun = begin(self.position)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        made = self._begun[1]
        batch = Batch(made.images.clone(), made.labels.clone(), made.indices.clone(), made.mask)
        self._begun = begin(self.position + self.batch_size)
        return batch

    def _numbers(self, position: int) -> Tensor:
        """Of a batch's samples; those of many batches are worked out and sent at a time."""
        ahead, rest = divmod(position - self._first, self.batch_size)
        if self._ahead is None or rest or not 0 <= ahead < AHEAD:
            share, self._first, ahead = self.batch_size // self.ranks, position, 0
            starts = position + self.rank * share + np.arange(AHEAD) * self.batch_size
            _, numbers = self._order((starts[:, None] + np.arange(share)).ravel())
            self._ahead = send_to_device(torch.from_numpy(numbers).view(AHEAD, share), self.device)
        return self._ahead[ahead]

    def _make(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        start = self.rank * len(indices)
        chosen = self._stand_ins[indices]
        pixels = self.images.pixels[chosen]
        old_size = (pixels.shape[2], pixels.shape[3])
        draws = draw_parameters(self.batch_size, self.augmentation, self.generator, old_size, self.image_size)
        draws = draws.rows(start, start + len(indices))
        images = apply_parameters(pixels, draws, get_magnitude(self.augmentation), self.image_size)
        if self.channels == 1:
            images = luma(images).to(torch.uint8)
        return images, self.images.labels[chosen]


class CachedBatches:
    """The batches of an evaluation, which are the same every time: prepared in the first pass, and kept on a device.

    Where they would take more than half of what is free there, they are prepared every time.
    """

    def __init__(self, loader: EvaluationLoader, device: torch.device | str) -> None:
        self.loader, self.device = loader, torch.device(device)
        self._kept: list[Batch] | None = None

    @property
    def source(self) -> Source:
        """Where samples come from."""
        return self.loader.source

    @property
    def broken(self) -> dict[int, BrokenSample]:
        """The samples found to be broken, by their numbers."""
        return self.loader.broken

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        """Once through. A pass that is left early keeps nothing."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Batch] = []
        keeping: bool | None = None
        for batch in self.loader:
            if keeping is None:
                free = _free(self.device)
                keeping = free is None or batch.images.numel() * len(self) <= free // 2
            moved = batch.to(self.device)
            if keeping:
                kept.append(moved)
            yield moved
        if keeping:
            self._kept = kept


def _free(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory that nobody uses; None for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _tried(function: Callable[[], Sample]) -> Sample | Exception:
    """One strange sample is no reason to give up on all others."""
    try:
        return function()
    except Exception as error:
        return error


def _pixels(sample: Sample | Exception, most_pixels: int) -> Tensor | Exception:
    """(3, height, width) uint8; an error, of reading or of decoding, as it is."""
    if isinstance(sample, Exception):
        return sample
    try:
        content = sample.content
        return to_channels(content if isinstance(content, Tensor) else decode_image(content, most_pixels), 3)
    except Exception as error:
        return error
