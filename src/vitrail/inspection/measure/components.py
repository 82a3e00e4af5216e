"""Features of patches, and their principal components: which parts of images a model tells apart.

Shapes: B images, N patches on a grid of (rows, columns), D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection.findings import Array, Components
from vitrail.inspection.measure import anatomy
from vitrail.model.base import ImageModel
from vitrail.model.recording import disable_compilation

COMPONENTS = 3
"""As many as there are colours: red, green and blue."""


@torch.no_grad()
def patch_features(model: ImageModel, images: Tensor) -> Tensor:
    """Return what the model knows of each patch in the end: the encoded tokens after the last norm.

    Args:
        model: a model that cuts images into patches.
        images: (B, C, height, width), normalised, on the model's device and of its dtype; any size the model takes.

    Returns:
        (B, rows, columns, D) on the CPU, without class token and registers.

    Raises:
        NotApplicableError: if the model does not cut images into patches.
    """
    model = anatomy.unwrap_model(model)
    model.check_images(images)
    anatomy.patch_grid(model, images)  # raises for a network without patches
    with anatomy.evaluation_mode(model), disable_compilation():
        parts = [
            anatomy.arrange_on_grid(model, part, model.forward_features(part)).cpu()
            for part in anatomy.split_batch(model, images)
        ]
    return torch.cat(parts)


def patch_components(model: ImageModel, images: Tensor, components: int = COMPONENTS) -> Array:
    """Return the first principal components of `patch_features`, over the patches of all images together.

    The components are those of the centred features, the one with the largest variance first. The direction of each is
    chosen so that its entry of largest magnitude is positive, so the same features always have the same components.

    Args:
        model: a model that cuts images into patches.
        images: (B, C, height, width), normalised, on the model's device and of its dtype; any size the model takes.
        components: how many, at least 1.

    Returns:
        (B, rows, columns, components); zeros for components that the features do not have.
    """
    return measure_components(model, images, components).values


def measure_components(model: ImageModel, images: Tensor, components: int = COMPONENTS) -> Components:
    """Measure `patch_components`, and how much of the variance each explains."""
    if components < 1:
        raise ConfigError(f"components = {components}: give 1 or more")
    features = patch_features(model, images)
    if not features.isfinite().all():
        raise NotApplicableError(
            "the features of the patches are not all numbers (some are NaN or infinite), so they have no principal "
            "components"
        )
    directions, explained = _find_directions(features.flatten(1, 2), components)
    mean = _find_mean(features.flatten(1, 2))
    values = torch.stack([(each.double() - mean) @ directions for each in features])  # one by one: float64 is large
    return Components(values.numpy(), explained.numpy())


def _find_mean(features: Tensor) -> Tensor:
    """(B, N, D) → (D,) in float64."""
    return torch.stack([image.double().mean(dim=0) for image in features]).mean(dim=0)


def _find_directions(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(B, N, D) → the directions of the components, (D, count), and the share of the variance of each, (count,)."""
    width = features.shape[2]
    mean, covariance = _find_mean(features), torch.zeros(width, width, dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    for image in features:
        centred = image.double() - mean
        covariance += centred.T @ centred
        squares += image.double().square().sum()
    variances, vectors = (each.flip(-1) for each in torch.linalg.eigh(covariance))  # the largest first
    # Rounding errors of the features have about this variance: weaker components cannot be told from them.
    rounding = torch.finfo(features.dtype).eps ** 2 * squares * width
    found = min(count, int((variances > rounding).sum()))
    if not found:
        raise NotApplicableError("all patches have the same features, so they have no principal components")
    directions, explained = torch.zeros(width, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    chosen = vectors[:, :found]
    directions[:, :found] = chosen * chosen.gather(0, chosen.abs().argmax(dim=0, keepdim=True)).sign()
    explained[:found] = variances[:found] / variances.clamp(min=0).sum()
    return directions, explained
