"""Whether a run's steps are computed by our own kernels (`run.fused`), and that they are."""

from __future__ import annotations

import torch

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.fast.optimize import why_no_kernels
from vitrail.model.base import ImageModel
from vitrail.train.config import RunConfig
from vitrail.train.distributed import Ranks


def fuse(model: ImageModel, config: RunConfig, ranks: Ranks, precision: torch.dtype) -> bool:
    """Let a model train by fused kernels, where that is asked for. Whether it does."""
    run = config.run
    if not run.fused:
        if run.fp8:
            raise ConfigError("run.fp8 is computed by the fused kernels: give run.fused=true too")
        return False
    why = why_no_kernels(ranks.device) or _unfit(config, ranks, precision)
    if why is None:
        try:
            _attach(model, run.fp8)
        except NotApplicableError as error:
            why = str(error)
    if why is not None:
        raise ConfigError(f"run.fused: there are no fused kernels for this run: {why}; leave it out")
    return True


def _attach(model: ImageModel, fp8: bool) -> None:
    from vitrail.fast.learning import FusedLearning

    model.forward = FusedLearning(model, fp8=fp8)  # type: ignore[method-assign]


def _unfit(config: RunConfig, ranks: Ranks, precision: torch.dtype) -> str | None:
    """What about a run does not go together with them."""
    for wrong, why in (
        (ranks.size > 1 and config.run.parallel != "ddp", "they do not work on sharded weights"),
        (precision != torch.bfloat16, "they are for run.precision=bf16"),
        (config.objective.kind != "classification", "they are for classification"),
        (config.run.gradient_checkpointing, "they keep activations, which run.gradient_checkpointing rules out"),
        (config.run.compile is True, "they take the place of run.compile"),
        (config.run.deterministic, "which of them are fastest is measured, which run.deterministic rules out"),
    ):
        if wrong:
            return why
    return None
