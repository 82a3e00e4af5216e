"""Choose the fastest precision for a long pass over images: tried on some of the images themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitrail.data.loader import EvaluationLoader
from vitrail.data.sources.source import Source, Subset
from vitrail.errors import ConfigError, NotApplicableError, WeightsError
from vitrail.fast.timing import relative_distance
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inference.engine import Engine
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device

MOST_DISTANCE = 0.05
"""Largest ‖Δy‖/‖y‖ from fp32, on images of the data, of a precision that may be chosen."""
TRIED_IMAGES = 16
"""Number of images, spread over the data, that precisions are tried on."""
LEAST_GAIN = 1.2
"""A precision must be so many times as fast as fp32 to be chosen."""
FASTER = {"cpu": "int8", "cuda": "fp16"}
"""The precision to try besides fp32, by the kind of device. On a GPU it is one that needs no preparation: tuning our
kernels takes longer than a pass over a hundred thousand images."""


def open_fastest_engine(
    model: ImageModel,
    source: Source,
    options: InferenceOptions,
    on_message: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Open a model in the fastest precision whose representations are close to those in fp32.

    Args:
        model: any model; it stays as it is.
        source: the images that it will see; some of them are used for the comparison.
        options: device and batch size; the precision is not used.
        on_message: called with a line of text about a precision that was tried and not chosen.
    """
    exact = open_model(model, replace(options, precision="fp32"))
    precision = FASTER.get(choose_device(options.device).type)
    pixels = _read_some_images(exact, source)
    if precision is None or not len(pixels):
        return exact
    try:
        fast = open_model(model, replace(options, precision=precision))
    except (ConfigError, NotApplicableError, WeightsError) as error:
        on_message(f"in fp32, because {precision} is not possible: {error}")
        return exact
    reference, exact_seconds = _time_pass(exact, pixels)
    computed, fast_seconds = _time_pass(fast, pixels)
    distance = relative_distance(computed, reference)
    if not distance <= MOST_DISTANCE:
        on_message(f"in fp32, because {fast.precision} changes the features of these images by {distance:.1%}")
        return exact
    return fast if fast_seconds * LEAST_GAIN <= exact_seconds else exact


def _read_some_images(engine: Engine, source: Source) -> Tensor:
    """Return (B, C, height, width) uint8 pixels of some images that can be read."""
    chosen = np.unique(np.linspace(0, len(source) - 1, min(TRIED_IMAGES, len(source))).astype(np.int64))
    loader = EvaluationLoader(Subset(source, chosen), engine.preprocessing, len(chosen), most_broken=len(chosen))
    return torch.cat([batch.images[batch.mask] for batch in loader])


def _time_pass(engine: Engine, pixels: Tensor) -> tuple[Tensor, float]:
    """Return the representations, and the seconds of a second pass: the first one prepares the engine."""
    engine.embed(pixels)
    began = time.perf_counter()
    features = torch.from_numpy(engine.embed(pixels))
    return features, time.perf_counter() - began
