"""The images that an export is compared and calibrated on.

Shapes: C channels, height × width pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from vitrail.errors import NotApplicableError
from vitrail.exporting.graphs import ExportGraph
from vitrail.inference.prepare import fit_pixels
from vitrail.inspection.findings import Absent
from vitrail.inspection.image_choice import Images, choose_images, choose_photographs
from vitrail.inspection.images import (
    InspectionImages,
    fit_images,
    normalise_batch,
    pick_from_folder,
    pick_photographs,
    spread_evenly,
)

CALIBRATED = 64
"""The images that int8 is calibrated on; if only a few are given, half of them."""


def pick_images(graph: ExportGraph, images: Images | None, most: int) -> InspectionImages:
    """Pick at most so many images, evenly spread: of built-in photographs if `images` is None.

    Returns:
        For a graph of normalised images, images fitted to the model, (C, height, width) uint8; for a graph of pixels,
        images of any size.

    Raises:
        DataError: if none of the images can be read.
        NotApplicableError: if the images do not have the model's number of channels.
    """
    channels, task = graph.model.in_channels, graph.model.task
    if graph.input == "pixels":
        if images is None:
            return pick_photographs(channels, most)
        return pick_from_folder(images, channels, most, show=1, task=task)
    choice = choose_photographs() if images is None else choose_images(images, task)
    (picked,) = fit_images(choice, [graph.model], most, show=1)
    if isinstance(picked, Absent):
        raise NotApplicableError(picked.why)
    return picked


def split_for_calibration(picked: InspectionImages) -> tuple[list[Tensor], InspectionImages]:
    """Return evenly spread images to calibrate on, and the others to compare on; a single image serves both."""
    count = len(picked.measured)
    if count == 1:
        return picked.measured, replace(picked, measured_on=f"{picked.measured_on}, which it was calibrated on too")
    chosen = set(spread_evenly(count, min(CALIBRATED, count // 2)))
    others = [pixels for index, pixels in enumerate(picked.measured) if index not in chosen]
    description = f"{picked.measured_on}: {len(others):,} compared, the other {len(chosen)} to calibrate on"
    return [picked.measured[index] for index in sorted(chosen)], replace(
        picked, measured=others, measured_on=description
    )


def prepare_calibration(graph: ExportGraph, images: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return picked images one by one as the graph takes them. Pixels are resized: onnxruntime wants one size."""
    how = graph.model.preprocessing
    if graph.input == "images":
        return list(normalise_batch(images, graph.model).split(1))
    resized = how.model_copy(update={"image_size": how.resized, "crop_fraction": 1.0})
    return [fit_pixels(pixels, resized).permute(1, 2, 0)[None].contiguous() for pixels in images]
