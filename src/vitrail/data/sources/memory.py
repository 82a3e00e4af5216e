"""Keep a data set in memory as pixels: decoded once, for small images that are seen many times."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.data.order import Indices
from vitrail.data.parallel import resolve_worker_count
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import DataError
from vitrail.tasks.task import Targets, Task

Change = Callable[[Tensor], Tensor]
"""Takes and returns (C, height, width) uint8 pixels."""
MOST_BYTES = 64 << 30
"""Bytes of pixels that are allowed."""
DECODE_CHUNK = 1024
"""Samples that are decoded before their size is added up."""


class InMemorySource(Source):
    """The decoded samples of another source, in one tensor of shared memory that all workers read.

    A sample that cannot be decoded raises its DataError when it is read.
    """

    def __init__(self, source: Source, change: Change | None = None) -> None:
        """Decode all samples of a source; `change` replaces the pixels of each by others, such as a smaller image."""
        self.whole, self.classes, self.has_labels = source, source.classes, source.task.kind == "labels"
        self.block, self.window = source.block, source.window  # the order of samples depends on them
        pixels, self.broken = _decode_all(source, change)
        sizes = np.array([image.numel() for image in pixels], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.shapes = np.array([image.shape for image in pixels], dtype=np.int64).reshape(-1, 3)
        self.pixels = _allocate_shared(int(self.starts[-1]))
        if pixels:  # an empty source stays one
            torch.cat([_flatten(image) for image in pixels], out=self.pixels)
        self._labels: Indices = source.labels(0, len(source))

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> Sample:
        if index in self.broken:
            raise DataError(self.broken[index])
        channels, height, width = self.shapes[index].tolist()
        pixels = self.pixels[self.starts[index] : self.starts[index + 1]]
        image = pixels.view(height, width, channels).permute(2, 0, 1)
        return Sample(image, int(self._labels[index]), self._read_targets(index))

    def name(self, index: int) -> str:
        return self.whole.name(index)

    def identity(self, index: int) -> str:
        return self.whole.identity(index)

    def labels(self, start: int, stop: int) -> Indices:
        return self._labels[start:stop]

    @property
    def task(self) -> Task:
        return self.whole.task

    def targets(self, start: int, stop: int) -> Targets:
        return self.whole.targets(start, stop)

    def strata(self, start: int, stop: int) -> Indices:
        return self.whole.strata(start, stop)

    def _read_targets(self, index: int) -> dict[str, Any] | None:
        if self.has_labels:
            return None
        return {name: values[0] for name, values in self.whole.targets(index, index + 1).items()}


def _decode_all(source: Source, change: Change | None) -> tuple[list[Tensor], dict[int, str]]:
    pixels: list[Tensor] = []
    broken: dict[int, str] = {}
    total = 0
    read = partial(_read_or_reason, source)
    decode = partial(_decode_or_reason, change=change)
    with ThreadPoolExecutor(resolve_worker_count(None)) as threads:
        for start in range(0, len(source), DECODE_CHUNK):
            indices = range(start, min(start + DECODE_CHUNK, len(source)))
            # Decoding releases Python's lock, and so does waiting for a file.
            contents = threads.map(read, indices) if source.reads_in_threads else map(read, indices)
            for index, image in zip(indices, threads.map(decode, contents), strict=True):
                if isinstance(image, str):
                    broken[index] = image
                pixels.append(torch.empty(1, 0, 0, dtype=torch.uint8) if isinstance(image, str) else image)
                total += pixels[-1].numel()
            if total > MOST_BYTES:
                raise DataError(
                    f"more than {MOST_BYTES >> 30} GB of pixels: data.in_memory is for small images; pack them instead"
                )
    return pixels, broken


def _read_or_reason(source: Source, index: int) -> bytes | Tensor | str:
    """Return the content of a sample, or why there is none."""
    try:
        return source.read(index).content
    except DataError as error:
        return str(error)


def _decode_or_reason(content: bytes | Tensor | str, change: Change | None) -> Tensor | str:
    """Return the pixels of a sample, or why there are none."""
    if isinstance(content, str):
        return content
    try:
        pixels = decode_image(content) if isinstance(content, bytes) else content
        return pixels if change is None else change(pixels)
    except DataError as error:
        return str(error)


def _allocate_shared(size: int) -> Tensor:
    pixels = torch.empty(size, dtype=torch.uint8)
    try:
        pixels.share_memory_()
    except RuntimeError:
        raise DataError(
            f"{size:,} bytes of pixels find no room in shared memory: give a container more of it, such as "
            "docker run --shm-size=8g, or leave them where they are by data.in_memory=false"
        ) from None
    return pixels


def _flatten(image: Tensor) -> Tensor:
    """Return the pixels row by row, with the channels of a pixel next to each other."""
    return image.permute(1, 2, 0).reshape(-1)
