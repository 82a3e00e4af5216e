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
from vitrail.inspection.measure.anatomy import check_grid, image_model, kind_of, patch_grid, prefix_names
from vitrail.inspection.measure.similarity import cosine_similarity
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.positions import Grid, InputPositions
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

LEAST_PATCHES = 9
"""Fewer have too few arrangements for a test."""
AT_ONCE = 1 << 20
"""Similarities looked up at a time."""


def position_similarity(model: ImageModel, layer: int = 0) -> Array:
    """(rows, columns, rows, columns): cosine similarity of the position embeddings of the patches, on the model's grid.

    A row of zeros is like itself (1) and like no other (0). `layer`: which table, where every layer has its own. A
    NotApplicableError says what a model has that has no such table, or one of more than 4,096 patches.
    """
    _, table, grid = _table(image_model(model), layer)
    return _similarity(table, grid)


def positions_of(model: ImageModel) -> Positions:
    """`position_similarity` of the first table, and the test on neighbours."""
    kind, table, grid = _table(image_model(model), 0)
    similarity = _similarity(table, grid)
    return Positions(kind, similarity, neighbour_test(similarity))


def neighbour_test(similarity: Array, permutations: int = 9999, seed: int = 0) -> Neighbours | None:
    """Whether patches that touch (4-neighbours) are more alike than all other pairs, by a permutation test.

    The statistic is the mean similarity of neighbours less that of the others. The p-value, one-sided, says how often
    it is as large with the patches in places drawn by lot, the one that was found among them:
    (1 + as large) / (1 + permutations).

    Args:
        similarity: (rows, columns, rows, columns).

    Returns:
        None for fewer than 9 patches, and where not every similarity is a number.
    """
    if permutations < 1:
        raise ConfigError(f"permutations = {permutations}: give 1 or more")
    rows, columns = similarity.shape[:2]
    count = rows * columns
    if count < LEAST_PATCHES or not np.isfinite(similarity).all():
        return None
    flat = similarity.reshape(count, count).astype(np.float64)
    flat = (flat + flat.T) / 2
    pairs = _neighbours((rows, columns))
    found = flat[pairs[0], pairs[1]].sum()
    # All pairs together have one sum wherever they lie, so the neighbours' alone decides how large the statistic is.
    every, others = (flat.sum() - flat.trace()) / 2, count * (count - 1) // 2 - pairs.shape[1]
    as_large = _as_large(flat, pairs, found, permutations, seed)
    return Neighbours(
        near=float(found / pairs.shape[1]),
        far=float((every - found) / others),
        p_value=(1 + as_large) / (1 + permutations),
        permutations=permutations,
    )


def _similarity(table: Tensor, grid: Grid) -> Array:
    check_grid(grid)
    if not table.isfinite().all():
        raise NotApplicableError(
            "the weights of the position embeddings are not all numbers (some are NaN or infinite), so there is "
            "nothing to compare"
        )
    return cosine_similarity(table).reshape(*grid, *grid)


def _neighbours(grid: Grid) -> NDArray[np.int64]:
    """(2, pairs): the numbers of patches that touch, each pair once."""
    places = np.arange(grid[0] * grid[1]).reshape(grid)
    across = np.stack([places[:, :-1].ravel(), places[:, 1:].ravel()])
    down = np.stack([places[:-1].ravel(), places[1:].ravel()])
    return np.concatenate([across, down], axis=1)


def _as_large(flat: Array, pairs: NDArray[np.int64], found: float, permutations: int, seed: int) -> int:
    """How many of so many drawings by lot have a sum over neighbours as large as the one found."""
    generator = np.random.default_rng(seed)
    count, values = len(flat), flat.ravel()
    least = found - 1e-12 * pairs.shape[1] * np.abs(flat).max()  # equal sums differ by rounding
    step = max(AT_ONCE // pairs.shape[1], 1)
    total = 0
    for start in range(0, permutations, step):
        places = np.tile(np.arange(count), (min(step, permutations - start), 1))
        places = generator.permuted(places, axis=1)
        sums = values[places[:, pairs[0]] * count + places[:, pairs[1]]].sum(axis=1)
        total += int((sums >= least).sum())
    return total


@torch.no_grad()
def _table(model: ImageModel, layer: int) -> tuple[str, Tensor, Grid]:
    """What kind of position embedding, (N, D) of the patches, and their grid."""
    if isinstance(model, TimmModel):
        return _table_of_timm(model)
    if isinstance(model, BitResNet):
        raise NotApplicableError(
            "a ResNet has no position embeddings: its convolutions know which pixels lie side by side, so there is no "
            "table to look at"
        )
    assert isinstance(model, VisionTransformer)
    if model.position == "relative":
        raise NotApplicableError(
            "relative position embeddings belong to offsets between patches, not to places: they act inside attention, "
            "and the attention distance shows what they do"
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
    return model.position, table[positions.prefix :], model.grid


def _table_of_timm(model: TimmModel) -> tuple[str, Tensor, Grid]:
    table = getattr(model.peer, "pos_embed", None)
    names = [name.rpartition(".")[2] for name, _ in model.peer.named_modules()]
    rotary = any(name.startswith("rope") for name in names)
    grid = _grid_of_timm(model)
    if isinstance(table, Tensor) and table.ndim == 3 and len(table) == 1 and grid is not None:
        # Of the tokens before the patches some, all or none own a row.
        owned = table.shape[1] - grid[0] * grid[1]
        if 0 <= owned <= len(prefix_names(model)):
            kind = "learned-1d" if isinstance(table, nn.Parameter) else "fixed"
            return kind + (" and rotary" if rotary else ""), table[0, owned:], grid
    if rotary:
        raise NotApplicableError(
            f"{kind_of(model)} has rotary position embeddings: they turn queries and keys inside attention, and the "
            "attention distance shows what they do"
        )
    if any("relative_position" in name or "rel_pos" in name for name, _ in model.peer.named_parameters()):
        raise NotApplicableError(
            f"{kind_of(model)} has relative position embeddings: they belong to offsets between patches, not to "
            "places, and act inside attention"
        )
    raise NotApplicableError(f"{kind_of(model)} has no table of position embeddings with a row for each patch")


def _grid_of_timm(model: TimmModel) -> Grid | None:
    try:
        return patch_grid(model, torch.empty(1, model.in_channels, *model.image_size, device="meta"))
    except NotApplicableError:
        return None
