"""A data set kept as pixels: decoded once, for small images that are seen many times."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vitrail.data.order import Indices
from vitrail.data.sources.source import Sample, Source
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import DataError

MOST_BYTES = 64 << 30


def in_memory(source: Source) -> Source:
    """The same samples, decoded. What cannot be decoded stays broken, and says so when it is asked for."""
    return InMemorySource(source)


class InMemorySource(Source):
    """All pixels in one tensor of shared memory, so that workers of any kind look at the same bytes."""

    def __init__(self, source: Source) -> None:
        self.whole, self.classes = source, source.classes
        self.block, self.window = source.block, source.window  # the order depends on them
        pixels, self.broken = _decoded(source)
        sizes = np.array([image.numel() for image in pixels], dtype=np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.shapes = np.array([image.shape for image in pixels], dtype=np.int64).reshape(-1, 3)
        self.pixels = _shared(int(self.starts[-1]))
        if pixels:  # an empty source stays one
            torch.cat([_rows(image) for image in pixels], out=self.pixels)
        self.targets: Indices = source.labels(0, len(source))

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> Sample:
        """(C, height, width) pixels, in the memory order of a decoded image."""
        if index in self.broken:
            raise DataError(self.broken[index])
        channels, height, width = self.shapes[index].tolist()
        pixels = self.pixels[self.starts[index] : self.starts[index + 1]]
        return Sample(pixels.view(height, width, channels).permute(2, 0, 1), int(self.targets[index]))

    def name(self, index: int) -> str:
        """Its name where it came from."""
        return self.whole.name(index)

    def identity(self, index: int) -> str:
        """Its own where it came from."""
        return self.whole.identity(index)

    def labels(self, start: int, stop: int) -> Indices:
        """All of them are in memory."""
        return self.targets[start:stop]


def _decoded(source: Source) -> tuple[list[Tensor], dict[int, str]]:
    pixels, broken, total = [], {}, 0
    for index in range(len(source)):
        try:
            content = source.read(index).content
            image = content if isinstance(content, Tensor) else decode_image(content)
        except DataError as error:
            image, broken[index] = torch.empty(1, 0, 0, dtype=torch.uint8), str(error)
        total += image.numel()
        if total > MOST_BYTES:
            raise DataError(
                f"more than {MOST_BYTES >> 30} GB of pixels: data.in_memory is for small images; pack them instead"
            )
        pixels.append(image)
    return pixels, broken


def _shared(size: int) -> Tensor:
    pixels = torch.empty(size, dtype=torch.uint8)
    try:
        pixels.share_memory_()
    except RuntimeError:
        raise DataError(
            f"{size:,} bytes of pixels find no room in shared memory: give a container more of it, such as "
            "docker run --shm-size=8g, or leave them where they are by data.in_memory=false"
        ) from None
    return pixels


def _rows(image: Tensor) -> Tensor:
    """Row by row, a pixel's channels side by side."""
    return image.permute(1, 2, 0).reshape(-1)
