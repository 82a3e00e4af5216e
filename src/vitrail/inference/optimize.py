"""`optimize` for everyone: it also takes the name of a model, and photos to calibrate on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.transforms.preprocess import normalise
from vitrail.errors import ConfigError
from vitrail.fast.optimize import FastModel, Target
from vitrail.fast.optimize import optimize as optimize_model
from vitrail.inference.engine import EXPORTED, Model
from vitrail.inference.prepare import OneImage, fit_image, is_one_image
from vitrail.inference.torch_engine import cast_half_to_float32
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, open_listener
from vitrail.weights.load import load


def optimize(
    model: Model,
    target: Target = "throughput",
    precision: str = "auto",
    *,
    batch: int = 1,
    images: OneImage | Sequence[OneImage] | None = None,
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
        model: a loaded model with float32 weights, which is not changed, or anything that `vitrail.load` takes; a GPU
            holds a named model if there is one.
        target: "latency" or "throughput"; on a CPU both are the same. See vitrail/fast/optimize.py.
        precision: "fp32"; "bf16"; "fp8" on a GPU; "int8" on a CPU; or "auto", the fastest that is close enough.
        batch: usual number of images in a call; the search on a CPU measures with so many.
        images: some images of the kind that will come: normalised ones, a float tensor (B, C, H, W), or images in any
            form that `vitrail.Predictor` takes. FP8 is calibrated on them, and the distance is measured on them.
        on_event: called with events.

    Returns:
        The fast model. Its `distance` says how far its representations are from the plain model's.

    Raises:
        ConfigError: an option is unknown, or the weights are not float32.
        NotApplicableError: this model or this device cannot compute in the requested precision.
        WeightsError: the model cannot be read, or returns NaN or infinity.
    """
    with open_listener(on_event) as listener:
        if isinstance(model, str | Path):
            if Path(model).suffix.lower() in EXPORTED:
                raise ConfigError(f"{model} is exported already: optimize takes the model that it was made from")
            listener("loading", {"model": str(model)})
            model = load(model, device=choose_device("auto"))
            cast_half_to_float32(model)
        if not isinstance(model, ImageModel):
            raise ConfigError(
                f"a {type(model).__name__} is no model: give one of vitrail's, or what vitrail.load takes"
            )
        return optimize_model(
            model,
            target,
            precision,
            batch=batch,
            images=_prepare_images(images, model),
            on_message=lambda text: listener("message", {"text": text}),
        )


def _prepare_images(images: OneImage | Sequence[OneImage] | None, model: ImageModel) -> Tensor | None:
    """Return images normalised, (B, C, H, W); floats in a tensor are already."""
    if images is None or (isinstance(images, Tensor) and images.is_floating_point()):
        return images
    several: Any = [images] if is_one_image(images) else images
    if not several:
        raise ConfigError("the list of images is empty: give one image or more, or None")
    fitted = torch.stack([fit_image(image, model.preprocessing) for image in several])
    return normalise(fitted, model.preprocessing)
