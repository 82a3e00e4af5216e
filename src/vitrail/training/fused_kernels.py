"""Train with our own fused kernels (`run.fused`) where they are wanted and possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.fast.known_parts import find_unknown_part
from vitrail.fast.optimize import explain_missing_kernels
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.system.ranks import Ranks
from vitrail.training.config import RunConfig

if TYPE_CHECKING:
    from vitrail.fast.gpu.training import FusedTraining

WIDTH_FROM = 768
"""Models at least this wide were measured to train faster with them than compiled (docs/speed.md)."""


def use_fused_kernels(model: ImageModel, config: RunConfig, ranks: Ranks, precision: torch.dtype) -> str | None:
    """Make a model train with fused kernels, if the configuration asks for them, or leaves it open and they are faster.

    Returns:
        None if it does, else why it does not.

    Raises:
        ConfigError: The configuration asks for them, but they cannot be used.
    """
    run = config.run
    if run.fused is False:
        if run.fp8:
            raise ConfigError(
                "run.fp8 is computed by the fused kernels, which run.fused=false rules out: leave out one of them"
            )
        return "run.fused=false"
    is_requested = run.fused or run.fp8
    why = explain_missing_kernels(ranks.device) or _find_conflict(config, ranks, precision)
    if why is None and not is_requested:
        why = _find_preference(model, config)
    if why is None:
        try:
            _attach(model, run.fp8)
        except NotApplicableError as error:
            why = str(error)
    if why is not None and is_requested:
        name = "run.fused" if run.fused else "run.fp8"
        raise ConfigError(f"{name}: there are no fused kernels for this run: {why}; leave it out")
    return why


def get_kernels(model: ImageModel) -> FusedTraining:
    """Return what computes a model for which `use_fused_kernels` returned None."""
    return cast("FusedTraining", model.forward)


def describe_computation(obstacle: str | None, is_compiled: bool, config: RunConfig) -> str:
    """Return what computes a run and why, for a person who wants to know how fast it can be.

    Args:
        obstacle: Why it is not the fused kernels; None if it is.
        is_compiled: Whether torch.compile compiles the model.
        config: The configuration.
    """
    graphs = ", each step one CUDA graph" if config.run.graphs else ""
    if obstacle is None:
        return f"vitrail's kernels{', with FP8 after norms' if config.run.fp8 else ''}{graphs}"
    return f"PyTorch{', compiled' if is_compiled else ''}{graphs}; not vitrail's kernels: {obstacle}"


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


def _find_preference(model: ImageModel, config: RunConfig) -> str | None:
    """Return why fused kernels that were not asked for are left out although they would work, or None."""
    if config.run.compile is not None:
        return f"run.compile={str(config.run.compile).lower()} was given"
    if not isinstance(model.architecture, VitArchitecture) or model.architecture.width < WIDTH_FROM:
        return "they are for plain Vision Transformers as wide as B/16 or wider, where they are faster"
    if model.architecture.dropout or model.architecture.layer_scale is not None:
        return "with dropout or layer scale their gradients were not yet checked on a GPU: run.fused=true uses them"
    if part := find_unknown_part(model.architecture):
        return f"with {part} they were not measured: run.fused=true uses them where they can"
    return None
