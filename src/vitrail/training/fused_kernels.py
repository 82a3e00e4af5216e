"""Train with our own fused kernels (`run.fused`) where they are wanted and possible."""

from __future__ import annotations

import torch

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.fast.optimize import explain_missing_kernels
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.system.ranks import Ranks
from vitrail.training.config import RunConfig

WIDTH_FROM = 768
"""Models at least this wide were measured to train faster with them than compiled (docs/speed.md)."""


def use_fused_kernels(model: ImageModel, config: RunConfig, ranks: Ranks, precision: torch.dtype) -> bool:
    """Make a model train with fused kernels, if the configuration asks for them, or leaves it open and they are faster.

    Returns:
        Whether it does.

    Raises:
        ConfigError: The configuration asks for them, but they cannot be used.
    """
    run = config.run
    if run.fused is False:
        if run.fp8:
            raise ConfigError(
                "run.fp8 is computed by the fused kernels, which run.fused=false rules out: leave out one of them"
            )
        return False
    is_requested = run.fused or run.fp8
    if not is_requested and (run.compile is not None or not _is_wide(model)):
        return False
    why = explain_missing_kernels(ranks.device) or _find_conflict(config, ranks, precision)
    if why is None:
        try:
            _attach(model, run.fp8)
        except NotApplicableError as error:
            why = str(error)
    if why is not None and is_requested:
        name = "run.fused" if run.fused else "run.fp8"
        raise ConfigError(f"{name}: there are no fused kernels for this run: {why}; leave it out")
    return why is None


def _attach(model: ImageModel, fp8: bool) -> None:
    from vitrail.fast.gpu.training import FusedTraining

    model.forward = FusedTraining(model, fp8=fp8)  # type: ignore[method-assign]


def _find_conflict(config: RunConfig, ranks: Ranks, precision: torch.dtype) -> str | None:
    """Return which setting of the run rules out fused kernels, if any does."""
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


def _is_wide(model: ImageModel) -> bool:
    return isinstance(model.architecture, VitArchitecture) and model.architecture.width >= WIDTH_FROM
