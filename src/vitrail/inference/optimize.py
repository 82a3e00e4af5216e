"""`optimize` for everyone: it also takes the name of a model, and photos to calibrate on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vitrail.config import Preprocessing
from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError, DataError, InputError
from vitrail.fast.optimize import FastModel, Target
from vitrail.fast.optimize import optimize as optimize_model
from vitrail.inference.engine import Model, check_model
from vitrail.inference.find_images import find_images
from vitrail.inference.prepare import OneImage, fit_image
from vitrail.inference.torch_engine import cast_half_to_float32
from vitrail.model.base import ImageModel
from vitrail.model.create import share_model
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, open_listener, send_messages
from vitrail.weights.load import load


def optimize(
    model: Model,
    target: Target = "throughput",
    precision: str = "auto",
    *,
    batch: int = 1,
    images: OneImage | Iterable[OneImage] | None = None,
    on_event: OnEvent | None = None,
) -> FastModel:
    """Make a fast copy of a model, for inference on the device that holds its weights: a GPU or the CPU.

    Example:
        fast = vitrail.optimize("pane", precision="int8")
        logits = fast(images)          # (B, C, H, W), normalised → (B, K)
        print(fast)                    # precision, method, distance from the plain model

    Events:
        loading: model: a model that was named is being loaded.
        message: text: a precision that was tried, or the result.

    Args:
        model: a loaded model, which is not changed, or anything that `vitrail.load` takes; a GPU holds a named model if
            there is one.
        target: "latency" or "throughput"; on a CPU both are the same. See vitrail/fast/optimize.py.
        precision: "fp32"; "bf16"; "fp8" on a GPU; "int8" on a CPU; or "auto", the fastest that is close enough.
        batch: usual number of images in a call; the search on a CPU measures with so many.
        images: some images of the kind that will come: normalised ones, a float tensor (B, C, H, W), or anything that
            `vitrail.predict` takes. FP8 is calibrated on them, and the distance is measured on them.
        on_event: called with events.

    Returns:
        The fast model. Its `distance` says how far its representations are from the plain model's.

    Raises:
        ConfigError: an option is unknown, or the weights are float64.
        DataError: an image cannot be read.
        NotApplicableError: this model or this device cannot compute in the requested precision.
        WeightsError: the model cannot be read, or returns NaN or infinity.
    """
    check_model(model)
    if batch < 1:
        raise ConfigError(f"batch = {batch}: give 1 or more")
    with open_listener(on_event) as listener:
        if isinstance(model, ImageModel):
            loaded = share_model(model)
        else:
            listener("loading", {"model": str(model)})
            loaded = load(model, device=choose_device("auto"))
        cast_half_to_float32(loaded)
        return optimize_model(
            loaded,
            target,
            precision,
            batch=batch,
            images=_prepare_images(images, loaded.preprocessing),
            on_message=send_messages(listener),
        )


def _prepare_images(images: OneImage | Iterable[OneImage] | None, preprocessing: Preprocessing) -> Tensor | None:
    """Return images normalised, (B, C, H, W); floats in a tensor are already."""
    if images is None or (isinstance(images, Tensor) and images.is_floating_point()):
        return images
    fitted = []
    for image in find_images(images):
        try:
            fitted.append(fit_image(image.content, preprocessing))
        except (DataError, InputError) as error:
            raise type(error)(f"{image.name}: {error}") from None
    return normalise(torch.stack(fitted), preprocessing)
