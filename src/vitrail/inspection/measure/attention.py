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
    evaluating,
    few_at_a_time,
    image_model,
    kind_of,
    layers,
    patch_grid,
    patch_stride,
    prefix_names,
)
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.pooling import AttentionPool
from vitrail.model.positions import Grid
from vitrail.model.recording import find_attention_layers, observe_attention
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

Array = NDArray[np.float64]
Reduce = Callable[[Tensor, Tensor], None]
"""Given the tokens of each group of a layer, (G, t), and its maps, (B, G, H, t, t)."""

READS = {
    "class": "the class token",
    "average": "the mean of the patches",
    "class+average": "the class token and the mean of the patches",
    "distilled": "the class token and the distillation token",
    "attention": "the attention pool",
    "all": "the mean of all tokens",
}
"""What the representation is read from, by the kind of pooling."""


def attention_names(model: ImageModel) -> tuple[str, ...]:
    """The attention layers in the order in which they run: "1", "2", …; "1 rows", "1 columns", … in axial blocks."""
    model = image_model(model)
    count = len(_layers(model))
    if _axial(model):
        return tuple(f"{number} {axis}" for number in range(1, count // 2 + 1) for axis in ("rows", "columns"))
    return tuple(str(number) for number in range(1, count + 1))


def what_is_read(model: ImageModel) -> str:
    """What the representation is read from, and whose attention is therefore told, in words."""
    return READS[_pooling(image_model(model))]


@torch.no_grad()
def mean_attention_distance(model: ImageModel, images: Tensor) -> Array:
    """(L, H): how far from each other, in image pixels, patches are that attend to each other (Figure 7, right).

    The distance from the centre of the query patch to that of the key patch, weighted by attention and averaged over
    queries and images; in axial layers along the row or the column. Rows and columns of tokens that are no patch are
    dropped and what is left of each row is scaled to sum to 1. A row that has nothing left does not count; a head
    without any row that counts is not a number.

    Args:
        images: (B, C, height, width), normalised, on the model's device and of its dtype; of any size it takes.
    """
    model = image_model(model)
    _tokens(model, images)
    parts = [_distances_of(model, part) for part in few_at_a_time(model, images)]
    summed, rows = torch.stack(parts).sum(dim=0)
    return _array(summed / rows)


def attention_rollout(model: ImageModel, images: Tensor) -> Array:
    """(B, rows, columns): how much of each patch the representation holds, by attention rollout (Figures 6 and 14).

    As Abnar and Zuidema have it (arXiv 2005.00928): the mean over heads, with the identity added for the residual and
    rows scaled to sum to 1, multiplied over layers, later ones from the left. Of the product that row is shown which
    the representation is read from: the class token's, or the mean of the patches' (`what_is_read`). What falls on
    tokens that are no patch is left out, so that the map sums to 1 only where there are none. A network with several
    attentions side by side in a block has no such product: a NotApplicableError.

    Args:
        images: (B, C, height, width), normalised, on the model's device and of its dtype; of any size it takes.
    """
    model = image_model(model)
    prefix, grid = _tokens(model, images)
    return rollout_by_layer(model, images)[:, -1, prefix:].reshape(-1, *grid)


def rollout_by_layer(model: ImageModel, images: Tensor) -> Array:
    """(B, L, T): the rollout up to each layer, over all tokens, those that are no patch first; each sums to 1.

    Where an attention pool reads the tokens, its weights on the last ones are taken for every layer.
    """
    model = image_model(model)
    _tokens(model, images)
    _check_sequence(model)
    return _array(torch.cat([rollout for rollout, _ in _read_in_parts(model, images)]))


def head_attention(model: ImageModel, images: Tensor) -> Array:
    """(B, L, H, T): what the tokens that are read attend to, in each layer and head; each sums to 1.

    Read is what the representation reads at the end (`what_is_read`): where that is the mean of the patches, it is the
    mean of their attention.
    """
    return _array(torch.cat([heads for _, heads in _read_in_parts(model, images)]))


def attention_of_images(model: ImageModel, images: Tensor) -> Attention:
    """Rollout and heads of a few images, from one pass."""
    model = image_model(model)
    prefix, grid = _tokens(model, images)
    _check_sequence(model)
    rollout, heads = (_array(torch.cat(parts)) for parts in zip(*_read_in_parts(model, images), strict=True))
    return Attention(
        layers=attention_names(model),
        rollout=rollout[..., prefix:].reshape(*rollout.shape[:-1], *grid),
        rollout_prefix=rollout[..., :prefix],
        heads=heads[..., prefix:].reshape(*heads.shape[:-1], *grid),
        heads_prefix=heads[..., :prefix],
        prefix=prefix_names(model),
        reads=what_is_read(model),
    )


# Rollout and heads


def _read_in_parts(model: ImageModel, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`_read` for a few images at a time."""
    model = image_model(model)
    _tokens(model, images)
    yield from (_read(model, part) for part in few_at_a_time(model, images))


@torch.no_grad()
def _read(model: ImageModel, images: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that are read, of the rollout (B, L, T) and of each head (B, L, H, T), from one pass."""
    reading = _reading(model, images)
    product = torch.eye(reading.shape[1], dtype=reading.dtype, device=reading.device).repeat(len(images), 1, 1)
    rollout: list[Tensor] = []
    heads: list[Tensor] = []

    def reduce(groups: Tensor, maps: Tensor) -> None:
        mixed = torch.eye(groups.shape[1], dtype=reading.dtype, device=reading.device)
        of_heads = reading.new_zeros(len(images), maps.shape[2], reading.shape[1])
        for head, attention in enumerate(maps.unbind(2)):
            attention = _exact(attention)
            of_heads[:, head, groups] = (reading[:, groups].unsqueeze(2) @ attention).squeeze(2)
            mixed = mixed + attention / maps.shape[2]
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)
        # Tokens of different groups do not mix, so this is the product with the map of all tokens.
        product[:, groups] = mixed @ product[:, groups]
        rollout.append((reading.unsqueeze(1) @ product).squeeze(1))
        heads.append(of_heads)

    _each_layer(model, images, reduce)
    return torch.stack(rollout, dim=1), torch.stack(heads, dim=1)


def _reading(model: ImageModel, images: Tensor) -> Tensor:
    """(B, T): how much of each token the representation takes; sums to 1."""
    prefix, grid = _tokens(model, images)
    patches = math.prod(grid)
    counts = _exact(images.new_zeros(len(images), prefix + patches))
    pooling = _pooling(model)
    if pooling == "attention":
        counts[:, prefix:] = _pool_weights(model, images)
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


def _pool_weights(model: ImageModel, images: Tensor) -> Tensor:
    """(B, N): from a pass of its own, for they are known last and needed first."""
    assert isinstance(model, VisionTransformer)
    assert isinstance(model.pool, AttentionPool)
    with evaluating(model):
        return _exact(model.pool.weights(model.forward_features(images))).mean(dim=1)


def _pooling(model: ImageModel) -> str:
    """One of READS."""
    _layers(model)
    if isinstance(model, VisionTransformer):
        return model.architecture.pool
    assert isinstance(model, TimmModel)
    kind = getattr(model.peer, "global_pool", None)
    if kind == "token":
        return "class" if getattr(model.peer, "dist_token", None) is None else "distilled"
    if kind == "avg":
        return "all" if getattr(model.peer, "pool_include_prefix", False) else "average"
    raise NotApplicableError(
        f'{kind_of(model)} pools its tokens by "{kind}", and only for a class token or a mean of tokens is there a row '
        "of attention to follow"
    )


# Distance


def _distances_of(model: ImageModel, images: Tensor) -> Tensor:
    """(2, L, H): the mean distances of all rows that have any attention, summed, and their number; from one pass."""
    prefix, (_, columns) = _tokens(model, images)
    found: list[Tensor] = []

    def reduce(groups: Tensor, maps: Tensor) -> None:
        distances = _distances(groups[0, prefix:] - prefix, columns) * patch_stride(model)
        found.append(_summed(maps[..., prefix:, prefix:], distances))

    _each_layer(model, images, reduce)
    return torch.stack(found, dim=1)


def _distances(patches: Tensor, columns: int) -> Tensor:
    """(t,) numbers of patches → (t, t): how far apart they lie, in patches."""
    row, column = _exact(patches // columns), _exact(patches % columns)
    return torch.hypot(row[:, None] - row, column[:, None] - column)


def _summed(maps: Tensor, distances: Tensor) -> Tensor:
    """(B, G, H, t, t) → (2, H): what `_distances_of` says, in one layer."""
    found = []
    for attention in maps.unbind(2):
        attention = _exact(attention)
        total = attention.sum(dim=-1)
        rows = ((attention * distances.to(attention.device)).sum(dim=-1) / total)[total > 0]
        found.append(torch.stack([rows.sum(), rows.new_tensor(len(rows))]))
    return torch.stack(found, dim=1)


# Passes


def _each_layer(model: ImageModel, images: Tensor, reduce: Reduce) -> None:
    """One pass: `reduce` sees one layer's maps after the other's, and they are gone before the next layer runs."""
    groups = _groups(model, images)
    attentions = _layers(model)

    def tell(layer: int, maps: Tensor) -> None:
        of_layer = groups[layer % len(groups)]
        _check_maps(model, attentions[layer], maps, len(images) * len(of_layer), of_layer.shape[1])
        reduce(of_layer, maps.unflatten(0, (len(images), len(of_layer))))

    with evaluating(model), observe_attention(model, tell):
        model.forward_features(images)


def _groups(model: ImageModel, images: Tensor) -> list[Tensor]:
    """(G, t): which tokens attend to each other; two that take turns in axial models."""
    prefix, (rows, columns) = _tokens(model, images)
    if _axial(model):
        places = torch.arange(rows * columns).view(rows, columns)
        return [places, places.T]
    return [torch.arange(prefix + rows * columns).unsqueeze(0)]


def _check_maps(model: ImageModel, layer: nn.Module, maps: Tensor, count: int, tokens: int) -> None:
    """Raise a NotApplicableError where a layer of timm's does not attend from token to token."""
    if maps.ndim != 4 or len(maps) != count or maps.shape[2:] != (tokens, tokens):
        raise NotApplicableError(f"{kind_of(model)} attends within windows or to channels, not from patch to patch")
    if maps.shape[1] != getattr(layer, "num_heads", maps.shape[1]):
        raise NotApplicableError(
            f"{kind_of(model)} subtracts attention maps from each other, so none of them says what is attended to"
        )


def _check_sequence(model: ImageModel) -> None:
    """Raise a NotApplicableError where a block of a network of timm's has several attention layers."""
    attentions = set(_layers(model))
    several = any(len(attentions.intersection(block.modules())) > 1 for block in layers(model).values())
    if several and isinstance(model, TimmModel):  # an axial block has two, one after the other
        raise NotApplicableError(
            f"{kind_of(model)} has several attentions side by side in a block, and rollout follows layers that come "
            "one after the other"
        )


def _tokens(model: ImageModel, images: Tensor) -> tuple[int, Grid]:
    """How many tokens come before the patches, and the grid of these."""
    _layers(model)
    model.check_images(images)
    try:
        prefix, grid = len(prefix_names(model)), patch_grid(model, images)
    except NotApplicableError:
        raise NotApplicableError(
            f"the attention of {kind_of(model)} is not known to go from patch to patch: it may lie within windows, "
            "between channels or between grids of several sizes"
        ) from None
    check_grid(grid)
    return prefix, grid


def _layers(model: ImageModel) -> list[nn.Module]:
    """The attention layers, of a model that has any."""
    if isinstance(model, BitResNet):
        raise NotApplicableError(f"{kind_of(model)} has no attention")
    return find_attention_layers(model)


def _axial(model: ImageModel) -> bool:
    return isinstance(model, VisionTransformer) and model.axial


def _exact(values: Tensor) -> Tensor:
    """In float64, which Apple's GPUs do not have."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _array(values: Tensor) -> Array:
    found: Array = values.cpu().numpy()
    return found
