"""How alike states inside models are: the patches of an image after a layer, and whole layers.

Layers are compared by linear CKA (arXiv 1905.00414), estimated in small batches of images (arXiv 2010.15327).

Shapes: B images, L layers, N patches on a grid of (rows, columns), D width; n images in one batch of an estimate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import ConfigError, InputError, NotApplicableError
from vitrail.inspection.findings import Array, Layers, Tokens
from vitrail.inspection.measure import anatomy
from vitrail.model.base import ImageModel
from vitrail.model.positions import Grid
from vitrail.model.recording import disable_compilation

Reduced = TypeVar("Reduced")

MOST_BYTES = 12_000_000
"""The most similarities between patches in a report, at a byte each: four layers, eight images, the finest grid."""
MOST_PLACES = 576
"""The most places of a grid that a report compares each with each: 24×24."""
LEAST_LAYERS = 4
"""A report shows at least so many layers, if the model has them; grids are made coarser to fit."""
MOST_STATES = 128 << 20
"""Bytes that the outputs of all layers may take: they limit how many images are compared at a time."""
MOST_IMAGES, LEAST_IMAGES = 32, 4
"""Images in a batch; the unbiased estimate divides by n − 3."""
AT_ONCE = 1 << 16
"""Values of each image that are converted to float64 at a time."""
SAME = 1e-6
"""States that differ by less than this share of the largest value count as equal: it is rounding."""


def token_similarity(model: ImageModel, images: Tensor, layer: int | None = -1) -> Array:
    """Return the cosine similarity between a layer's outputs for the patches of each image.

    `layer=None` compares the `patch_features` of a model: `token_similarity(model, images, None)[0, 3, 5]` is the map
    of how similar the patch in row 3 and column 5 of the first image is to every patch of it.

    Args:
        model: any model; for a ResNet, the places of the feature map take the part of patches.
        images: (B, C, height, width), normalised, on the model's device and of its dtype.
        layer: number of the layer, from 0; negative numbers count from the end. None for what follows the last norm,
            or the last layer of a network without one.

    Returns:
        (B, rows, columns, rows, columns), from −1 to 1.
    """
    model = anatomy.unwrap_model(model)
    model.check_images(images)
    if layer is None:
        return _compare_tokens(model, images, [*anatomy.list_states(model)][-1:])[0]
    names = list(anatomy.list_layers(model))
    if not -len(names) <= layer < len(names):
        raise ConfigError(f"layer {layer} of a model with {len(names)}: give 0 to {len(names) - 1}, or −1 for the last")
    return _compare_tokens(model, images, [names[layer]])[0]


def measure_tokens(model: ImageModel, images: Tensor, most_bytes: int = MOST_BYTES) -> Tokens:
    """Measure `token_similarity` of as many layers as fit into `most_bytes`, evenly spread and with the last.

    The last norm counts as a layer: its outputs are the features of a Vision Transformer.

    A grid of more than 576 places is made coarser first: the outputs of blocks of 2×2, 3×3, … patches are averaged,
    with the smallest blocks that suffice; where the grid does not divide, blocks share a row or a column. The same
    happens if fewer than four layers would fit.
    """
    model = anatomy.unwrap_model(model)
    model.check_images(images)
    states = list(anatomy.list_states(model))
    grids = _reduce_layers(model, images[:1], lambda state: _find_grid(model, images[:1], state), states)
    names = [name for name, grid in grids.items() if grid]
    if not names:
        raise NotApplicableError(f"the layers of {anatomy.describe_kind(model)} output no map of the image")
    least = min(LEAST_LAYERS, len(names))
    places = min(MOST_PLACES, math.isqrt(most_bytes // (least * len(images))))
    sizes = {name: len(images) * math.prod(_coarsen_grid(grid, places)) ** 2 for name, grid in grids.items() if grid}
    for count in range(len(names), least - 1, -1):
        chosen = [names[place] for place in _spread_layers(len(names), count)]
        if sum(sizes[name] for name in chosen) <= most_bytes:
            break
    return Tokens(tuple(chosen), tuple(_compare_tokens(model, images, chosen, places)))


def layer_similarity(
    model: ImageModel, images: Tensor, other: ImageModel | None = None, other_images: Tensor | None = None
) -> Array:
    """Return the linear CKA between layers, over all of their output tokens.

    CKA is 1 if one layer's output is the other's, rotated and scaled; about 0 if they have nothing in common; and 0 for
    a layer with the same output for every image. Its terms are unbiased estimates, the HSIC₁ of Song et al., summed
    over small batches of images; so it may be slightly below 0.

    Args:
        model: the model whose layers are compared.
        images: (B, C, height, width), normalised, on the model's device and of its dtype; at least 4.
        other: a second model to compare with; by default the layers of `model` are compared with each other.
        other_images: the same pictures as the second model takes them; by default `images`.

    Returns:
        (layers, other layers).
    """
    if other is None and other_images is not None:
        raise ConfigError("other_images were given without the model that they are for: give other, too")
    if other is None:
        return measure_layers(model, images).cka
    return measure_layers_between(model, images, other, images if other_images is None else other_images).cka


def measure_layers(model: ImageModel, images: Tensor) -> Layers:
    """Measure `layer_similarity` between the layers of one model."""
    model = anatomy.unwrap_model(model)
    sizes = _split_evenly(len(images), _choose_batch_size(model, images))
    names, grams = _compute_grams(model, images, sizes)
    return Layers(names, names, _compute_cka(grams, grams), len(images))


def measure_layers_between(a: ImageModel, images_a: Tensor, b: ImageModel, images_b: Tensor) -> Layers:
    """Measure `layer_similarity` between the layers of two models, with one pass through each."""
    if len(images_a) != len(images_b):
        raise InputError(
            f"{len(images_a)} images for one model and {len(images_b)} for the other: give both the same pictures"
        )
    a, b = anatomy.unwrap_model(a), anatomy.unwrap_model(b)
    sizes = _split_evenly(len(images_a), min(_choose_batch_size(a, images_a), _choose_batch_size(b, images_b)))
    names, ours = _compute_grams(a, images_a, sizes)
    others, theirs = _compute_grams(b, images_b, sizes)
    return Layers(names, others, _compute_cka(ours, theirs), len(images_a))


def cosine_similarity(vectors: Tensor) -> Array:
    """Return the cosine similarity of vectors, (…, N, D) → (…, N, N); of zeros, 1 with themselves and 0 with others."""
    directions = F.normalize(vectors.detach().cpu().double(), dim=-1, eps=1e-300)
    similarity: Array = (directions @ directions.mT).clamp(-1, 1).numpy()
    every = np.arange(similarity.shape[-1])
    similarity[..., every, every] = 1.0
    return similarity


# States


@torch.no_grad()
def _reduce_layers(
    model: ImageModel,
    images: Tensor,
    reduce: Callable[[Tensor], Reduced],
    names: Collection[str] | None = None,
    buffers: Mapping[str, Any] | None = None,
) -> dict[str, Reduced]:
    """Apply `reduce` to the output of each layer while the layer runs, so that no output is stored; return by name.

    Args:
        model: any model.
        images: (B, C, height, width).
        reduce: called with the output of a layer.
        names: of `anatomy.list_states`; by default all layers, without the last norm. Layers of timm that output
            several tensors, or do not run as modules, are left out.
        buffers: arrays, by name, for the results.
    """
    results: dict[str, Reduced] = {}

    def make_hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and len(output) == len(images):
                results[name] = reduce(output)
                if buffers is not None:
                    buffers[name][:] = results[name]
                    results[name] = buffers[name]

        return hook

    layers = anatomy.list_layers(model)
    if names is not None:
        layers = {name: part for name, part in anatomy.list_states(model).items() if name in names}
    with anatomy.evaluation_mode(model), disable_compilation(), contextlib.ExitStack() as stack:
        for name, part in layers.items():
            stack.callback(part.register_forward_hook(make_hook(name)).remove)
        model.forward_features(images)
    if not results:
        raise NotApplicableError(f"the layers of {anatomy.describe_kind(model)} output no single tensor")
    return {name: results[name] for name in layers if name in results}


# Patches


def _find_grid(model: ImageModel, images: Tensor, state: Tensor) -> Grid | None:
    """Return the grid that a state lies on, or None."""
    try:
        _, rows, columns, _ = anatomy.arrange_on_grid(model, images, state).shape
    except NotApplicableError:
        return None
    return rows, columns


def _coarsen_grid(grid: Grid, places: int) -> Grid:
    """Return the grid divided by the smallest whole factor that leaves at most so many places."""
    for factor in range(1, max(grid)):
        rows, columns = (-(-side // factor) for side in grid)
        if rows * columns <= places:
            return rows, columns
    return 1, 1


def _spread_layers(count: int, chosen: int) -> list[int]:
    """Return `chosen` of `count` numbers, evenly spread from the first to the last; one alone is the last."""
    return [count - 1 - round(index * (count - 1) / max(chosen - 1, 1)) for index in reversed(range(chosen))]


def _compare_tokens(model: ImageModel, images: Tensor, names: Sequence[str], places: int | None = None) -> list[Array]:
    """Return similarities, (B, rows, columns, rows, columns), of each layer; `places` limits the size of its grid."""

    def make_reduce(part: Tensor) -> Callable[[Tensor], Array]:
        def compare(state: Tensor) -> Array:
            tokens = anatomy.arrange_on_grid(model, part, state)
            _, rows, columns, _ = tokens.shape
            grid = (rows, columns) if places is None else _coarsen_grid((rows, columns), places)
            if grid != (rows, columns):
                tokens = F.adaptive_avg_pool2d(tokens.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
            return cosine_similarity(tokens.flatten(1, 2)).reshape(-1, *grid, *grid)

        return compare

    parts = [_reduce_layers(model, part, make_reduce(part), names) for part in anatomy.split_batch(model, images)]
    return [np.concatenate([part[name] for part in parts]) for name in names]


# Layers


def _choose_batch_size(model: ImageModel, images: Tensor) -> int:
    if len(images) < LEAST_IMAGES:
        raise NotApplicableError(
            f"layers are compared by which images they find alike, which takes at least {LEAST_IMAGES} images, but "
            f"there are {len(images)}"
        )
    model.check_images(images)
    each = sum(_reduce_layers(model, images[:1], lambda state: state.nbytes).values())
    return min(max(MOST_STATES // each, 1), MOST_IMAGES)


def _split_evenly(count: int, at_once: int) -> list[int]:
    """Return batch sizes as equal as possible. None is too small for an estimate, so one may exceed the limit."""
    batches = min(-(-count // at_once), count // LEAST_IMAGES)
    size, larger = divmod(count, batches)
    return [size + 1] * larger + [size] * (batches - larger)


def _compute_grams(model: ImageModel, images: Tensor, sizes: Sequence[int]) -> tuple[tuple[str, ...], list[Array]]:
    """Return the names of the layers, and for each batch of images the centred Gram matrices, (L, n, n)."""
    layers = list(anatomy.list_layers(model))
    # Allocated first: small arrays that stay among large ones that go would fragment the memory.
    buffers = [dict(zip(layers, np.empty((len(layers), size, size)), strict=True)) for size in sizes]
    parts = [
        _reduce_layers(model, part, _compute_gram, buffers=buffer)
        for part, buffer in zip(images.split(list(sizes)), buffers, strict=True)
    ]
    return tuple(parts[0]), [np.stack(list(part.values())) for part in parts]


def _compute_gram(state: Tensor) -> Array:
    """Return the products of the images' states, (n, …) → (n, n), centred without bias.

    Without the diagonal, all rows and columns sum to zero. The HSIC₁ of two such matrices is the sum of their products
    over n (n − 3): the definition of Song et al. in fewer terms (Székely and Rizzo, 2014).
    """
    n = len(state)
    products = torch.zeros(n, n, dtype=torch.float64)
    largest = farthest = torch.zeros((), dtype=torch.float64)
    for values in state.flatten(1).split(AT_ONCE, dim=1):  # all at once in float64 would fragment the memory
        values = values.cpu().double()
        centred = values - values.mean(dim=0)  # changes only the rounding below
        products += centred @ centred.T
        largest, farthest = torch.maximum(largest, values.abs().max()), torch.maximum(farthest, centred.abs().max())
    if farthest <= SAME * largest:
        products.zero_()
    gram: Array = products.numpy()
    np.fill_diagonal(gram, 0.0)
    sums = gram.sum(axis=1)
    gram = gram - (sums[:, None] + sums) / (n - 2) + sums.sum() / ((n - 1) * (n - 2))
    np.fill_diagonal(gram, 0.0)
    return gram


def _compute_cka(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    """Return CKA, (L, other L), from the Gram matrices of each batch: sum HSIC₁ over batches, then divide."""
    both = _sum_hsic(ours, theirs)
    scale = np.sqrt(np.outer(_sum_hsic(ours, ours).diagonal(), _sum_hsic(theirs, theirs).diagonal()))
    return np.divide(both, scale, out=np.zeros_like(both), where=scale != 0)


def _sum_hsic(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    total = np.zeros((len(ours[0]), len(theirs[0])))
    for a, b in zip(ours, theirs, strict=True):
        n = a.shape[1]
        total += np.tensordot(a, b, axes=((1, 2), (1, 2))) / (n * (n - 3))
    return total
