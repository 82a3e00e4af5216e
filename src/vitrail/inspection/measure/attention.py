"""What a model attends to, and from how far away: Figures 6, 7 (right) and 14, and the attention of each head.

Shapes: B images, L attention layers, H heads, N patches on a grid of (rows, columns), T = prefix + N tokens. In a layer
G groups of t tokens attend within themselves: one group of all T tokens, or for axial layers every row or column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import NotApplicableError
from vitrail.inspection.findings import Attention
from vitrail.inspection.measure.anatomy import (
    check_grid,
    describe_kind,
    evaluation_mode,
    list_layers,
    patch_grid,
    patch_stride,
    prefix_names,
    split_batch,
    unwrap_model,
)
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.pooling import AttentionPool
from vitrail.model.positions import Grid
from vitrail.model.recording import find_attention_layers, observe_attention
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer
from vitrail.system.device import to_float64

Array = NDArray[np.float64]
Reduce = Callable[[Tensor, Tensor], None]
"""Called with the tokens of each group of a layer, (G, t), and its attention maps, (B, G, H, t, t)."""

READS = {
    "class": "the class token",
    "average": "the mean of the patches",
    "class+average": "the class token and the mean of the patches",
    "distilled": "the class token and the distillation token",
    "attention": "the attention pool",
    "all": "the mean of all tokens",
}
"""The tokens that the representation is read from, by the kind of pooling."""


def name_attention_layers(model: ImageModel) -> tuple[str, ...]:
    """Name the attention layers in order: "1", "2", …; in axial blocks "1 rows", "1 columns", …"""
    model = unwrap_model(model)
    count = len(_list_attention_layers(model))
    if _is_axial(model):
        return tuple(f"{number} {axis}" for number in range(1, count // 2 + 1) for axis in ("rows", "columns"))
    return tuple(str(number) for number in range(1, count + 1))


def describe_readout(model: ImageModel) -> str:
    """Return in words which tokens the representation is read from. It is their attention that is shown."""
    return READS[_find_pooling(unwrap_model(model))]


@torch.no_grad()
def mean_attention_distance(model: ImageModel, images: Tensor) -> Array:
    """Return how far apart patches are that attend to each other, in image pixels (Figure 7, right).

    The distance between the centres of query and key patch is weighted by attention and averaged over queries and
    images; in axial layers it runs along the row or the column. Tokens that are no patch are dropped, and the rest of
    each row is scaled to sum to 1. A row with nothing left does not count.

    Args:
        model: a model with attention from patch to patch.
        images: (B, C, height, width), normalised, on the model's device and of its dtype; any size the model takes.

    Returns:
        (L, H); NaN for a head without any row that counts.
    """
    model = unwrap_model(model)
    _measure_tokens(model, images)
    parts = [_sum_distances(model, part) for part in split_batch(model, images)]
    summed, rows = torch.stack(parts).sum(dim=0)
    return _to_array(summed / rows)


def attention_rollout(model: ImageModel, images: Tensor) -> Array:
    """Return how much of each patch the representation holds, by attention rollout (Figures 6 and 14).

    Rollout follows Abnar and Zuidema (arXiv 2005.00928): the mean over heads, plus the identity for the residual, rows
    scaled to sum to 1, multiplied over layers, later ones from the left. The result is the row of the product that the
    representation is read from: the class token's, or the mean of the patches' (`describe_readout`).

    Args:
        model: a model with attention from patch to patch.
        images: (B, C, height, width), normalised, on the model's device and of its dtype; any size the model takes.

    Returns:
        (B, rows, columns). The share of tokens that are no patch is left out, so a map may sum to less than 1.

    Raises:
        NotApplicableError: if the model has no attention from patch to patch, or several attentions side by side in a
            block: rollout is not defined for them.
    """
    model = unwrap_model(model)
    prefix, grid = _measure_tokens(model, images)
    return rollout_by_layer(model, images)[:, -1, prefix:].reshape(-1, *grid)


def rollout_by_layer(model: ImageModel, images: Tensor) -> Array:
    """Return the rollout up to each layer over all tokens, (B, L, T), prefix tokens first; each row sums to 1.

    If an attention pool reads the tokens, its weights on the last layer's tokens are used for every layer.
    Arguments and errors are those of `attention_rollout`.
    """
    model = unwrap_model(model)
    _measure_tokens(model, images)
    _check_sequence(model)
    return _to_array(torch.cat([rollout for rollout, _ in _follow_in_parts(model, images)]))


def head_attention(model: ImageModel, images: Tensor) -> Array:
    """Return what the tokens behind the representation attend to, by layer and head, (B, L, H, T); rows sum to 1.

    If the representation is the mean of the patches (`describe_readout`), this is the mean of their attention.
    """
    return _to_array(torch.cat([heads for _, heads in _follow_in_parts(model, images)]))


def measure_attention(model: ImageModel, images: Tensor) -> Attention:
    """Measure rollout and the attention of each head for a few images, in one pass."""
    model = unwrap_model(model)
    prefix, grid = _measure_tokens(model, images)
    _check_sequence(model)
    rollout, heads = (_to_array(torch.cat(parts)) for parts in zip(*_follow_in_parts(model, images), strict=True))
    return Attention(
        layers=name_attention_layers(model),
        rollout=rollout[..., prefix:].reshape(*rollout.shape[:-1], *grid),
        rollout_prefix=rollout[..., :prefix],
        heads=heads[..., prefix:].reshape(*heads.shape[:-1], *grid),
        heads_prefix=heads[..., :prefix],
        prefix=prefix_names(model),
        reads=describe_readout(model),
    )


# Rollout and heads


def _follow_in_parts(model: ImageModel, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `_follow_attention` for a few images at a time."""
    model = unwrap_model(model)
    _measure_tokens(model, images)
    yield from (_follow_attention(model, part) for part in split_batch(model, images))


@torch.no_grad()
def _follow_attention(model: ImageModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that are read, of the rollout (B, L, T) and of each head (B, L, H, T), from one pass."""
    reading = _compute_readout(model, images)
    product = torch.eye(reading.shape[1], dtype=reading.dtype, device=reading.device).repeat(len(images), 1, 1)
    rollout: list[Tensor] = []
    heads: list[Tensor] = []

    def reduce(groups: Tensor, maps: Tensor) -> None:
        mixed = torch.eye(groups.shape[1], dtype=reading.dtype, device=reading.device)
        of_heads = reading.new_zeros(len(images), maps.shape[2], reading.shape[1])
        for head, attention in enumerate(maps.unbind(2)):
            attention = to_float64(attention)
            of_heads[:, head, groups] = (reading[:, groups].unsqueeze(2) @ attention).squeeze(2)
            mixed = mixed + attention / maps.shape[2]
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        # Tokens of different groups do not mix, so this is the product with the map of all tokens.
        product[:, groups] = mixed @ product[:, groups]
        rollout.append((reading.unsqueeze(1) @ product).squeeze(1))
        heads.append(of_heads)

    _visit_layers(model, images, reduce)
    return torch.stack(rollout, dim=1), torch.stack(heads, dim=1)


def _compute_readout(model: ImageModel, images: Tensor) -> Tensor:
    """Return how much of each token the representation takes, (B, T); rows sum to 1."""
    prefix, grid = _measure_tokens(model, images)
    patches = math.prod(grid)
    counts = to_float64(images.new_zeros(len(images), prefix + patches))
    pooling = _find_pooling(model)
    if pooling == "attention":
        weights = _compute_pool_weights(model, images)
        counts[:, prefix + patches - weights.shape[1] :] = weights
    elif pooling == "all":
        counts[:] = 1 / (prefix + patches)
    elif pooling == "distilled":
        counts[:, :2] = 1 / 2
    else:
        of_class_token = {"class": 1.0, "class+average": 0.5, "average": 0.0}[pooling]
        counts[:, prefix:] = (1 - of_class_token) / patches
        if of_class_token:
            counts[:, 0] = of_class_token
    return counts


def _compute_pool_weights(model: ImageModel, images: Tensor) -> Tensor:
    """(B, N), or (B, T) if it reads all tokens: from a pass of its own, for they are known last and needed first."""
    assert isinstance(model, VisionTransformer)
    assert isinstance(model.pool, AttentionPool)
    with evaluation_mode(model):
        return to_float64(model.pool.weights(model.forward_features(images))).mean(dim=1)


def _find_pooling(model: ImageModel) -> str:
    """Return the kind of pooling, a key of READS."""
    _list_attention_layers(model)
    if isinstance(model, VisionTransformer):
        return model.architecture.pool
    assert isinstance(model, TimmModel)
    kind = getattr(model.peer, "global_pool", None)
    if kind == "token":
        return "class" if getattr(model.peer, "dist_token", None) is None else "distilled"
    if kind == "avg":
        return "all" if getattr(model.peer, "pool_include_prefix", False) else "average"
    raise NotApplicableError(
        f'{describe_kind(model)} pools its tokens by "{kind}": attention can be followed only from a class token or a '
        "mean of tokens"
    )


# Distance


def _sum_distances(model: ImageModel, images: Tensor) -> Tensor:
    """Return the sum and the number, (2, L, H), of the mean distances of all rows with any attention, in one pass."""
    prefix, (_, columns) = _measure_tokens(model, images)
    sums: list[Tensor] = []

    def reduce(groups: Tensor, maps: Tensor) -> None:
        distances = _compute_distances(groups[0, prefix:] - prefix, columns) * patch_stride(model)
        sums.append(_weigh_distances(maps[..., prefix:, prefix:], distances))

    _visit_layers(model, images, reduce)
    return torch.stack(sums, dim=1)


def _compute_distances(patches: Tensor, columns: int) -> Tensor:
    """Return how far apart patches lie, in patches, by their numbers: (t,) → (t, t)."""
    row, column = to_float64(patches // columns), to_float64(patches % columns)
    return torch.hypot(row[:, None] - row, column[:, None] - column)


def _weigh_distances(maps: Tensor, distances: Tensor) -> Tensor:
    """Return the sum and the number of `_sum_distances` in one layer: (B, G, H, t, t) → (2, H)."""
    sums = []
    for attention in maps.unbind(2):
        attention = to_float64(attention)
        total = attention.sum(dim=-1)
        rows = ((attention * distances.to(attention.device)).sum(dim=-1) / total)[total > 0]
        sums.append(torch.stack([rows.sum(), rows.new_tensor(len(rows))]))
    return torch.stack(sums, dim=1)


# Passes


def _visit_layers(model: ImageModel, images: Tensor, reduce: Reduce) -> None:
    """Run one pass and call `reduce` with the maps of each layer, which are freed before the next layer runs."""
    groups = _group_tokens(model, images)
    attentions = _list_attention_layers(model)

    def observe(layer: int, maps: Tensor) -> None:
        layer_groups = groups[layer % len(groups)]
        _check_maps(model, attentions[layer], maps, len(images) * len(layer_groups), layer_groups.shape[1])
        reduce(layer_groups, maps.unflatten(0, (len(images), len(layer_groups))))

    with evaluation_mode(model), observe_attention(model, observe):
        model.forward_features(images)


def _group_tokens(model: ImageModel, images: Tensor) -> list[Tensor]:
    """Return which tokens attend to each other, (G, t); for axial models two such tensors, used in turn."""
    prefix, (rows, columns) = _measure_tokens(model, images)
    if _is_axial(model):
        places = torch.arange(rows * columns).view(rows, columns)
        return [places, places.T]
    return [torch.arange(prefix + rows * columns).unsqueeze(0)]


def _check_maps(model: ImageModel, layer: nn.Module, maps: Tensor, count: int, tokens: int) -> None:
    """Raise a NotApplicableError if a layer of timm does not attend from token to token."""
    if maps.ndim != 4 or len(maps) != count or maps.shape[2:] != (tokens, tokens):
        raise NotApplicableError(
            f"{describe_kind(model)} attends within windows or to channels, not from patch to patch"
        )
    if maps.shape[1] != getattr(layer, "num_heads", maps.shape[1]):
        raise NotApplicableError(
            f"{describe_kind(model)} subtracts attention maps from each other, so none of them says what is attended to"
        )


def _check_sequence(model: ImageModel) -> None:
    """Raise a NotApplicableError if a block of a timm network has several attention layers."""
    attentions = set(_list_attention_layers(model))
    several = any(len(attentions.intersection(block.modules())) > 1 for block in list_layers(model).values())
    if several and isinstance(model, TimmModel):  # an axial block has two, one after the other
        raise NotApplicableError(
            f"{describe_kind(model)} has several attentions side by side in a block, but rollout needs a "
            "sequence of layers"
        )


def _measure_tokens(model: ImageModel, images: Tensor) -> tuple[int, Grid]:
    """Return the number of tokens before the patches, and the grid of the patches."""
    _list_attention_layers(model)
    model.check_images(images)
    try:
        prefix, grid = len(prefix_names(model)), patch_grid(model, images)
    except NotApplicableError:
        raise NotApplicableError(
            f"the attention of {describe_kind(model)} may not go from patch to patch: it may lie within windows, "
            "between channels or between grids of several sizes"
        ) from None
    check_grid(grid)
    return prefix, grid


def _list_attention_layers(model: ImageModel) -> list[nn.Module]:
    """Return the attention layers; raise a NotApplicableError if there are none."""
    if isinstance(model, BitResNet):
        raise NotApplicableError(f"{describe_kind(model)} has no attention")
    return find_attention_layers(model)


def _is_axial(model: ImageModel) -> bool:
    return isinstance(model, VisionTransformer) and model.axial


def _to_array(values: Tensor) -> Array:
    array: Array = values.cpu().numpy()
    return array
