"""Calibrate a classifier that was just trained, where enough images chose nothing."""

from __future__ import annotations

from pathlib import Path

from vitrail.data.sources.source import Source
from vitrail.errors import VitrailError
from vitrail.evaluation.reliability import fit_reliability
from vitrail.inference.batches import InferenceOptions
from vitrail.model.base import ImageModel
from vitrail.reliability.sets import LEAST_IMAGES
from vitrail.system.events import OnEvent, send_messages, send_progress
from vitrail.system.files import hide_folders
from vitrail.weights.save import add_reliability

MOST_IMAGES = 2000
"""Images to calibrate on: a pass over them must not take long. `vitrail calibrate` takes more."""


def calibrate_trained(
    model: ImageModel,
    images: Source | None,
    options: InferenceOptions,
    listener: OnEvent,
    data: str = "",
    folder: Path | None = None,
) -> None:
    """Give a classifier sets of labels and a score of unknown images, if there are enough images that chose nothing.

    A problem is told as a message: the classifier itself is not in doubt.

    Args:
        model: a trained classifier; one that is calibrated already stays as it is.
        images: images that neither trained nor chose anything; None if there are none.
        options: where the model runs.
        listener: hears the progress of the task "calibrating".
        data: the name of the data.
        folder: the native folder of the model, which what is fitted is added to; None if it is saved later.
    """
    if images is None or len(images) < LEAST_IMAGES or model.reliability is not None:
        return
    try:
        fitted = fit_reliability(
            model,
            images,
            options=options,
            most=MOST_IMAGES,
            data=hide_folders(data),
            progress=send_progress(listener, "calibrating"),
        )
        if fitted is None or fitted.reliability.sets is None:
            return
        if folder is not None:
            add_reliability(folder, fitted.reliability)
    except VitrailError as error:
        send_messages(listener)(f"the classifier could not be calibrated: {error}")
        return
    model.reliability = fitted.reliability
