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
from vitrail.inspection.measure.anatomy import image_model, kind_of
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.patches import ConvStem
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

COMPONENTS = 28
"""As many as the paper shows."""
OF_FEATURES, ROOT = "patch projection of the feature map", "root convolution"


def embedding_filters(model: ImageModel, components: int = COMPONENTS) -> Array:
    """(components, height, width, channels): principal components of the filters that embed the image.

    They are those of the patch projection E, where there is one: a hybrid's acts on a feature map, and its channels are
    that map's. Else of the first convolution of a stem, or of the root of a ResNet as it is applied, standardised. Each
    has length 1, the first explains most, and its entry of largest magnitude is positive. There are fewer than asked
    for where the filters have no more.
    """
    of, weight = next(iter(_filters(image_model(model)).items()))
    return _principal(of, weight, components).components


def filters_of(model: ImageModel, components: int = COMPONENTS) -> tuple[Filters, ...]:
    """`embedding_filters` with what they are of and what they explain; a hybrid's projection, then its root."""
    return tuple(_principal(of, weight, components) for of, weight in _filters(image_model(model)).items())


@torch.no_grad()
def _filters(model: ImageModel) -> dict[str, Tensor]:
    """(D, C, height, width) by what they are the filters of."""
    if isinstance(model, TimmModel):
        return _filters_of_timm(model)
    if isinstance(model, BitResNet):
        return {ROOT: model.backbone.root.standardised()}
    assert isinstance(model, VisionTransformer)
    embed = model.patch_embed
    if isinstance(embed, ConvStem):
        return {"first convolution of the stem": _convolutions(embed)[0].weight}
    projection = embed.projection.weight.unflatten(1, (embed.in_channels, embed.patch_size, embed.patch_size))
    if model.backbone is None:
        return {"patch embedding": projection}
    return {OF_FEATURES: projection, ROOT: model.backbone.root.standardised()}


def _filters_of_timm(model: TimmModel) -> dict[str, Tensor]:
    """The patch projection, where there is one, and what sees the image: in timm that is the first in line."""
    projection = getattr(getattr(model.peer, "patch_embed", None), "proj", None)
    found: dict[str, Tensor] = {}
    if isinstance(projection, nn.Conv2d):
        if projection.in_channels == model.in_channels:
            return {"patch embedding": _applied(projection)}
        found[OF_FEATURES] = _applied(projection)
    first = next(iter(_convolutions(model.peer)), None)
    if first is not None and first.in_channels == model.in_channels and first.groups == 1:
        found["first convolution"] = _applied(first)
    if not found:
        raise NotApplicableError(
            f"the first layer of {kind_of(model)} that sees the image is no convolution, so it has no filters to show"
        )
    return found


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]


class _Seen(TorchFunctionMode):
    """Notes the weight of a convolution as torch is given it: some of timm's layers standardise theirs on the way."""

    weight: Tensor | None = None

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.conv2d:
            self.weight = args[1]
        return func(*args, **(kwargs or {}))


def _applied(convolution: nn.Conv2d) -> Tensor:
    """(D, C, height, width)."""
    size = [side * dilation for side, dilation in zip(convolution.kernel_size, convolution.dilation, strict=True)]
    with _Seen() as seen:
        convolution(convolution.weight.new_zeros(1, convolution.in_channels, *size))
    return convolution.weight if seen.weight is None else seen.weight


def _principal(of: str, weight: Tensor, components: int) -> Filters:
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
    # As strong as errors of one rounding would be, if they were drawn by lot: below it nothing is told from them.
    rounding = torch.finfo(weight.dtype).eps * rows.square().mean().sqrt() * sum(map(math.sqrt, rows.shape))
    count = min(components, int((strengths > rounding).sum()))
    if not count:
        raise NotApplicableError(f"the filters of the {of} are all alike, so they have no principal components")
    directions = directions[:count]
    directions = directions * directions.gather(1, directions.abs().argmax(dim=1, keepdim=True)).sign()
    explained = strengths.square() / strengths.square().sum()
    return Filters(of, directions.unflatten(1, filters.shape[1:]).numpy(), explained[:count].numpy())
