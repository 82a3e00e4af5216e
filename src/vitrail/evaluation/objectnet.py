"""ObjectNet's images as a model must see them: without the red frame that keeps them out of training sets.

ObjectNet's authors add a frame of two pixels, and ask that it be cut off before evaluation.
"""

from __future__ import annotations

from torch import Tensor

from vitrail.data.sources.source import Sample, Subset
from vitrail.data.transforms.decode import decode_image

FRAME = 2
"""Width of the frame in pixels."""
LEAST_RED, MOST_OTHER = 200, 60
"""What counts as red: at least so much red, at most so much green and blue."""


class FramelessImages(Subset):
    """Some images of a source, without their red frames."""

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        content = sample.content
        return Sample(cut_frame(content if isinstance(content, Tensor) else decode_image(content)), sample.label)


def cut_frame(pixels: Tensor) -> Tensor:
    """Return (C, height, width) uint8 pixels without a red frame; an image that has none is returned as it is."""
    channels, height, width = pixels.shape
    if channels != 3 or min(height, width) <= 2 * FRAME:
        return pixels
    for edge in (pixels[:, 0], pixels[:, -1], pixels[:, :, 0], pixels[:, :, -1]):
        if edge[0].min() < LEAST_RED or edge[1:].max() > MOST_OTHER:
            return pixels
    return pixels[:, FRAME:-FRAME, FRAME:-FRAME]
