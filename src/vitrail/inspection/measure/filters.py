"""Figure 7, left: what an embedding looks for in the image, as the principal components of its filters.

Shapes: D filters over C channels, each height × width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection.findings import Array, Filters
from vitrail.inspection.measure.anatomy import describe_kind, unwrap_model
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.patches import ConvStem
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

COMPONENTS = 28
"""The number of components that the paper shows."""
OF_FEATURES, ROOT = "patch projection of the feature map", "root convolution"


def embedding_filters(model: ImageModel, components: int = COMPONENTS) -> Array:
    """Return the principal components of the filters that embed the image.

    The filters are those of the patch projection E; in a hybrid they act on a feature map, whose channels they have.
    Without a projection they are those of the first convolution of a stem, or of a ResNet's root, standardised as it is
    applied.

    Args:
        model: any model.
        components: the most components to return, at least 1; filters with less variety have fewer.

    Returns:
        (components, height, width, channels), the first explains most. Each has length 1, and its entry of largest
        magnitude is positive.
    """
    of, weight = next(iter(_collect_filters(unwrap_model(model)).items()))
    return _compute_components(of, weight, components).components


def measure_filters(model: ImageModel, components: int = COMPONENTS) -> tuple[Filters, ...]:
    """Measure `embedding_filters` and the variance they explain; for a hybrid, of the projection and of the root."""
    return tuple(
        _compute_components(of, weight, components) for of, weight in _collect_filters(unwrap_model(model)).items()
    )


@torch.no_grad()
def _collect_filters(model: ImageModel) -> dict[str, Tensor]:
    """Return filters, (D, C, height, width), by the name of their layer."""
    if isinstance(model, TimmModel):
        return _collect_timm_filters(model)
    if isinstance(model, BitResNet):
        return {ROOT: model.backbone.root.standardise_weight()}
    assert isinstance(model, VisionTransformer)
    embed = model.patch_embed
    if isinstance(embed, ConvStem):
        return {"first convolution of the stem": _list_convolutions(embed)[0].weight}
    projection = embed.projection.weight.unflatten(1, (embed.in_channels, embed.patch_size, embed.patch_size))
    if model.backbone is None:
        return {"patch embedding": projection}
    return {OF_FEATURES: projection, ROOT: model.backbone.root.standardise_weight()}


def _collect_timm_filters(model: TimmModel) -> dict[str, Tensor]:
    """Return the filters of the patch projection, if any, and of the first convolution, which sees the image."""
    projection = getattr(getattr(model.peer, "patch_embed", None), "proj", None)
    filters: dict[str, Tensor] = {}
    if isinstance(projection, nn.Conv2d):
        if projection.in_channels == model.in_channels:
            return {"patch embedding": _find_applied_weight(projection)}
        filters[OF_FEATURES] = _find_applied_weight(projection)
    first = next(iter(_list_convolutions(model.peer)), None)
    if first is not None and first.in_channels == model.in_channels and first.groups == 1:
        filters["first convolution"] = _find_applied_weight(first)
    if not filters:
        raise NotApplicableError(
            f"the first layer of {describe_kind(model)} is no convolution, so it has no filters to show"
        )
    return filters


def _list_convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


class _ConvolutionSpy(TorchFunctionMode):
    """Notes the weight that a convolution passes to torch: some layers of timm standardise it first."""

    weight: Tensor | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            self.weight = args[1]
        return func(*args, **(kwargs or {}))


def _find_applied_weight(convolution: nn.Conv2d) -> Tensor:
    size = [side * dilation for side, dilation in zip(convolution.kernel_size, convolution.dilation, strict=True)]
    with _ConvolutionSpy() as spy:
        convolution(convolution.weight.new_zeros(1, convolution.in_channels, *size))
    return convolution.weight if spy.weight is None else spy.weight


def _compute_components(of: str, weight: Tensor, components: int) -> Filters:
    if components < 1:
        raise ConfigError(f"components = {components}: give 1 or more")
    filters = weight.detach().cpu().double().permute(0, 2, 3, 1)
    rows = filters.flatten(1)
    if not rows.isfinite().all():
        raise NotApplicableError(
            f"the weights of the {of} are not all numbers (some are NaN or infinite), so they have no principal "
            "components"
        )
    _, strengths, directions = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    # The strength of random rounding errors: weaker components cannot be told from them.
    rounding = torch.finfo(weight.dtype).eps * rows.square().mean().sqrt() * sum(map(math.sqrt, rows.shape))
    count = min(components, int((strengths > rounding).sum()))
    if not count:
        raise NotApplicableError(f"the filters of the {of} are all alike, so they have no principal components")
    directions = directions[:count]
    directions = directions * directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)).sign()
    explained = strengths.square() / strengths.square().sum()
    return Filters(of, directions.unflatten(1, filters.shape[1:]).numpy(), explained[:count].numpy())
