"""LeJEPA (arXiv 2511.08544): views of an image are projected to one point, and all points to a standard normal.

Not in the paper. There is no teacher and no stop of gradients: what keeps all images from the same point is SIGReg,
which tests the projections for normality along random directions. The projection is thrown away afterwards.

Shapes: B images, V views, P width of the projection, S directions, K knots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.objectives.base import Outcome, evaluation_outcome
from vitrail.objectives.metrics import sum_and_count
from vitrail.objectives.multi_crop import MultiCropObjective
from vitrail.objectives.noise import draw_uniform
from vitrail.objectives.projection import Projection, initialise_projection
from vitrail.objectives.rank_sums import sum_over_ranks
from vitrail.objectives.views import GLOBAL_VIEWS, Views
from vitrail.system.device import float64_device
from vitrail.system.precision import widen

KNOTS, LAST_KNOT = 17, 5.0
"""Where characteristic functions are compared: so many points from 0 to the last one; symmetry gives the others."""


class LeJepa(MultiCropObjective):
    """Trains a model to represent all views of an image alike, and all images like samples of a normal."""

    def __init__(
        self,
        model: ImageModel,
        *,
        views: Views | None = None,
        normality: float = 0.05,
        directions: int = 256,
        projector_width: int = 2048,
        projected: int = 64,
        projector_norm: str = "batch",
        seed: int = 0,
    ) -> None:
        """Take a model, with or without a head.

        Args:
            views: Which views are compared.
            normality: λ, the share of SIGReg in the loss; the rest is the distance between views.
            directions: S, how many random directions SIGReg looks along; others in every step.
            projector_width: width of both hidden layers of the projector.
            projected: P.
            projector_norm: "batch" or "layer", after each hidden layer.
            seed: seed of the projector's initial weights.
        """
        super().__init__(model, views or Views())
        if not 0 < normality < 1:
            raise ConfigError(f"normality = {normality}: give a share between 0 and 1, such as 0.05")
        if projector_norm not in ("batch", "layer"):
            raise ConfigError(f'projector_norm = "{projector_norm}": give batch or layer')
        self.normality, self.directions = normality, directions
        width = model.architecture.representation_width
        with torch.device("meta"):  # memory without values: nothing is drawn from torch's own generator
            projector = Projection(width, projector_width, projected, projector_norm)
        self.projector = projector.to_empty(device="cpu")
        self.projected = projected
        initialise_projection(self.projector, seed)

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return the loss, and sums of "loss", "distance" and "normality". `key` sets views and directions."""
        local_views = self.make_local_views(batch, key) if self.views.local_count else None
        embedded = self.embed_views(self.make_global_views(batch, key), local_views)
        points = self.project(self.select_counted(embedded, batch))
        directions = draw_directions(self.projected, self.directions, derive_seed(key, 2), points.device)
        with torch.autocast(points.device.type, enabled=False):
            distances = compute_distances(points)
            statistic = compute_sigreg(points, directions.to(points.dtype))
        losses = (1 - self.normality) * distances + self.normality * statistic
        parts = {"loss": losses, "distance": distances, "normality": statistic.expand_as(distances)}
        sums = {name: sum_and_count(values) for name, values in parts.items()}
        return Outcome(losses.mean(), sums) if self.training else evaluation_outcome(sums)

    def project(self, embedded: Tensor) -> Tensor:
        """Return the points (V, B, P) of representations (V, B, D), in float32 or float64."""
        points: Tensor = self.projector(embedded.flatten(0, 1)).unflatten(0, embedded.shape[:2])
        return widen(points)


def compute_distances(points: Tensor) -> Tensor:
    """Return (B,): the mean squared difference of (V, B, P) points from the mean of the image's global views."""
    centres = points[:GLOBAL_VIEWS].mean(dim=0)
    return (points - centres).square().mean(dim=(0, 2))


def compute_sigreg(points: Tensor, directions: Tensor) -> Tensor:
    """Return how far the (V, B, P) points of each view are from samples of a standard normal: about 1.06 if they are.

    This is the statistic of Epps and Pulley along each of the (P, S) unit directions: the squared difference of the
    characteristic functions, weighted with that of the normal, integrated, times the number of points. It is the mean
    over views and directions, and it counts the points of all ranks.
    """
    knots = torch.linspace(0, LAST_KNOT, KNOTS, dtype=points.dtype, device=points.device)
    normal = (-knots.square() / 2).exp()
    weights = 2 * LAST_KNOT / (KNOTS - 1) * normal  # both signs of a knot count alike
    weights[0], weights[-1] = weights[0] / 2, weights[-1] / 2
    angles = (points @ directions)[..., None] * knots
    count = sum_over_ranks(points.new_full((), points.shape[1])).clamp(min=1)
    real, imaginary = sum_over_ranks(torch.stack([angles.cos().sum(dim=1), angles.sin().sum(dim=1)])) / count
    gaps = (real - normal).square() + imaginary.square()
    statistic: Tensor = count * (gaps @ weights).mean()
    return statistic


def draw_directions(width: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return (width, count) float32: random unit vectors, the same on all ranks."""
    rows = torch.arange(width, device=float64_device(device))
    uniform = draw_uniform(key, rows, 2 * count).to(device)
    radii, angles = (-2 * (1 - uniform[:, :count]).log()).sqrt(), 2 * math.pi * uniform[:, count:]
    normal: Tensor = radii * angles.cos()
    return F.normalize(normal, dim=0)
