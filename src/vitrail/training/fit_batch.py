"""`data.batch_size=auto`: compute a batch in as few parts as fit into the memory of the device."""

from __future__ import annotations

from typing import Any

import torch

from vitrail.data.open import Data
from vitrail.errors import ConfigError, TrainingError
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.events import OnEvent
from vitrail.system.ranks import Ranks
from vitrail.training.build import build_run, prepare_run
from vitrail.training.config import RunConfig
from vitrail.training.memory import OUT_OF_MEMORY, find_fitting_parts
from vitrail.training.resolve import change_config
from vitrail.training.run import Progress


def fit_batch(
    config: RunConfig, ranks: Ranks, listener: OnEvent, source: Data | None = None, start: ImageModel | None = None
) -> RunConfig:
    """Return the configuration with as many parts in `optimizer.accumulate` as let a batch fit, found by trying.

    Args:
        config: The configuration; its `optimizer.accumulate` is the fewest parts that are tried.
        ranks: This process alone.
        listener: Gets a message if there are more parts than the configuration has.
        source: Images in place of those of `data.source`.
        start: The model of `model.weights`, if it is loaded already. It stays as it is.

    Raises:
        ConfigError: There are several ranks, or steps are CUDA graphs, which have one part.
        TrainingError: Not even one image fits.
    """
    if ranks.size > 1 or config.run.graphs:
        why = "run.graphs computes a batch as one part" if config.run.graphs else "several ranks cannot try what fits"
        raise ConfigError(f"data.batch_size = 'auto': {why}; give a number, and optimizer.accumulate for more parts")
    fewest = config.optimizer.accumulate
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        count = _try_parts(config, ranks, source, start)
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    if count is None:
        raise TrainingError(OUT_OF_MEMORY)
    if count == fewest:
        return config
    images = config.data.batch_size
    text = (
        f"a batch of {images:,} images is computed in {count} parts: {images // count:,} at a time fit into the memory"
    )
    listener("message", {"text": text})
    return change_config(config, {"optimizer": {"accumulate": count}})


def _try_parts(config: RunConfig, ranks: Ranks, source: Data | None, start: ImageModel | None) -> int | None:
    """Return in how many parts a batch fits. Everything that was built for it is freed when this returns."""
    # Compiled kernels would be compiled for each size that is tried; they need no more memory than others.
    changes: dict[str, dict[str, Any]] = {"data": {"workers": 0, "in_memory": False}, "run": {"compile": False}}
    copied = None if start is None else copy_model(start)
    run = build_run(prepare_run(change_config(config, changes), ranks, source=source, start=copied), Progress())
    batch = next(run.training_loader).to(ranks.device)
    return find_fitting_parts(run, batch, config.run.seed, config.optimizer.accumulate)
