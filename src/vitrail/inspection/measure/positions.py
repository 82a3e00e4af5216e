"""Figure 7, centre: how alike the position embeddings of patches are, and whether neighbours are more so than others.

Shapes: N patches on a grid of (rows, columns) in row-major order, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection.findings import Array, Neighbours, Positions
from vitrail.inspection.measure.anatomy import check_grid, describe_kind, patch_grid, prefix_names, unwrap_model
from vitrail.inspection.measure.similarity import cosine_similarity
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.positions import Grid, InputPositions
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

LEAST_PATCHES = 9
"""Fewer patches have too few arrangements for a test."""
FIXED = ("sin-cos", "fixed")
"""Kinds of position embeddings that are computed, not learned."""
AT_ONCE = 1 << 20
"""Similarities looked up at a time."""


def position_similarity(model: ImageModel, layer: int = 0) -> Array:
    """Return the cosine similarity between the position embeddings of the patches, on the model's grid.

    Args:
        model: a model with a table of position embeddings.
        layer: number of the table, if every layer has its own.

    Returns:
        (rows, columns, rows, columns), from −1 to 1. A row of zeros has 1 with itself and 0 with others.

    Raises:
        NotApplicableError: if the model has no such table, or one of more than 4,096 patches.
    """
    _, table, grid = _read_table(unwrap_model(model), layer)
    return _compute_similarity(table, grid)


def measure_learned_positions(model: ImageModel) -> Positions:
    """Measure as `measure_positions` does, if the embeddings were learned: a fixed table shows nothing about a model.

    Raises:
        NotApplicableError: as `position_similarity`; or the table is fixed.
    """
    kind, _, _ = _read_table(unwrap_model(model), 0)
    if kind.startswith(FIXED):
        how = "fixed sines and cosines of a patch's row and column" if kind.startswith("sin-cos") else "fixed"
        raise NotApplicableError(f"the position embeddings are {how}: nothing was learned here, so there is no figure")
    return measure_positions(model)


def measure_positions(model: ImageModel) -> Positions:
    """Measure `position_similarity` of the first table, and test the neighbours."""
    kind, table, grid = _read_table(unwrap_model(model), 0)
    similarity = _compute_similarity(table, grid)
    return Positions(kind, similarity, neighbour_test(similarity))


def neighbour_test(similarity: Array, permutations: int = 9999, seed: int = 0) -> Neighbours | None:
    """Test whether patches that touch (4-neighbours) are more alike than all other pairs, by permutation.

    The statistic is the mean similarity of neighbours minus that of the others. The one-sided p-value says how often it
    is as large with randomly placed patches, the observed placement included: (1 + as large) / (1 + permutations).

    Args:
        similarity: (rows, columns, rows, columns), from `position_similarity`.
        permutations: the number of random placements, at least 1.
        seed: of the random placements.

    Returns:
        The result, or None for fewer than 9 patches or if a similarity is NaN or infinite.
    """
    if permutations < 1:
        raise ConfigError(f"permutations = {permutations}: give 1 or more")
    rows, columns = similarity.shape[:2]
    count = rows * columns
    if count < LEAST_PATCHES or not np.isfinite(similarity).all():
        return None
    flat = similarity.reshape(count, count).astype(np.float64)
    flat = (flat + flat.T) / 2
    pairs = _list_neighbours((rows, columns))
    observed = flat[pairs[0], pairs[1]].sum()
    # The sum over all pairs is the same in every placement, so the neighbours' sum alone decides the statistic.
    every, others = (flat.sum() - flat.trace()) / 2, count * (count - 1) // 2 - pairs.shape[1]
    as_large = _count_as_large(flat, pairs, observed, permutations, seed)
    return Neighbours(
        near=float(observed / pairs.shape[1]),
        far=float((every - observed) / others),
        p_value=(1 + as_large) / (1 + permutations),
        permutations=permutations,
    )


def _compute_similarity(table: Tensor, grid: Grid) -> Array:
    check_grid(grid)
    if not table.isfinite().all():
        raise NotApplicableError(
            "the weights of the position embeddings are not all numbers (some are NaN or infinite), so there is "
            "nothing to compare"
        )
    return cosine_similarity(table).reshape(*grid, *grid)


def _list_neighbours(grid: Grid) -> NDArray[np.int64]:
    """Return the numbers of patches that touch, (2, pairs), each pair once."""
    places = np.arange(grid[0] * grid[1]).reshape(grid)
    across = np.stack([places[:, :-1].ravel(), places[:, 1:].ravel()])
    down = np.stack([places[:-1].ravel(), places[1:].ravel()])
    return np.concatenate([across, down], axis=1)


def _count_as_large(flat: Array, pairs: NDArray[np.int64], observed: float, permutations: int, seed: int) -> int:
    """Return how many random placements have a sum over neighbours as large as the observed one."""
    generator = np.random.default_rng(seed)
    count, values = len(flat), flat.ravel()
    least = observed - 1e-12 * pairs.shape[1] * np.abs(flat).max()  # equal sums differ by rounding
    step = max(AT_ONCE // pairs.shape[1], 1)
    total = 0
    for start in range(0, permutations, step):
        places = np.tile(np.arange(count), (min(step, permutations - start), 1))
        places = generator.permuted(places, axis=1)
        sums = values[places[:, pairs[0]] * count + places[:, pairs[1]]].sum(axis=1)
        total += int((sums >= least).sum())
    return total


@torch.no_grad()
def _read_table(model: ImageModel, layer: int) -> tuple[str, Tensor, Grid]:
    """Return the kind of position embedding, its rows for the patches, (N, D), and their grid."""
    if isinstance(model, TimmModel):
        return _read_timm_table(model)
    if isinstance(model, BitResNet):
        raise NotApplicableError(
            "a ResNet has no position embeddings: its convolutions know which pixels lie side by side, so there is no "
            "table to look at"
        )
    assert isinstance(model, VisionTransformer)
    if model.position in ("relative", "relative-bias"):
        raise NotApplicableError(
            "relative position embeddings belong to offsets between patches, not to places: they act inside attention. "
            "The attention distance shows their effect"
        )
    if model.position == "none" and model.rotary is not None:
        raise NotApplicableError(
            "rotary positions turn queries and keys inside attention, so there is no table to look at. The attention "
            "distance shows their effect"
        )
    if model.position == "none":
        raise NotApplicableError(
            'this model has no position embeddings (position "none"): its encoder takes patches as a set without '
            "order, so there is no table to look at"
        )
    count = len(model.position_embedding)
    if not -count <= layer < count:
        raise ConfigError(
            f"layer {layer} of a model with {count} table{'s' if count > 1 else ''} of position embeddings: give "
            f"{f'0 to {count - 1}, or −1 for the last' if count > 1 else '0'}"
        )
    positions = model.position_embedding[layer]
    assert isinstance(positions, InputPositions)
    table: Tensor = positions(model.grid)
    kind = model.position if model.rotary is None else f"{model.position} and rotary"
    return kind, table[positions.prefix :], model.grid


def _read_timm_table(model: TimmModel) -> tuple[str, Tensor, Grid]:
    table = getattr(model.peer, "pos_embed", None)
    names = [name.rpartition(".")[2] for name, _ in model.peer.named_modules()]
    rotary = any(name.startswith("rope") for name in names)
    grid = _find_timm_grid(model)
    if isinstance(table, Tensor) and table.ndim == 3 and len(table) == 1 and grid is not None:
        # Some, all or none of the tokens before the patches have a row of their own.
        owned = table.shape[1] - grid[0] * grid[1]
        if 0 <= owned <= len(prefix_names(model)):
            kind = "learned-1d" if isinstance(table, nn.Parameter) else "fixed"
            return kind + (" and rotary" if rotary else ""), table[0, owned:], grid
    if rotary:
        raise NotApplicableError(
            f"{describe_kind(model)} has rotary position embeddings: they turn queries and keys inside attention. The "
            "attention distance shows their effect"
        )
    if any("relative_position" in name or "rel_pos" in name for name, _ in model.peer.named_parameters()):
        raise NotApplicableError(
            f"{describe_kind(model)} has relative position embeddings: they belong to offsets between patches, not to "
            "places, and act inside attention"
        )
    raise NotApplicableError(f"{describe_kind(model)} has no table of position embeddings with a row for each patch")


def _find_timm_grid(model: TimmModel) -> Grid | None:
    try:
        return patch_grid(model, torch.empty(1, model.in_channels, *model.image_size, device="meta"))
    except NotApplicableError:
        return None
