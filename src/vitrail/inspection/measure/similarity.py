"""How alike states inside a model are: the patches of an image after a layer, and the layers of models.

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
from vitrail.model.recording import uncompiled

Reduced = TypeVar("Reduced")

MOST_BYTES = 12_000_000
"""Of similarities between patches in a report, at a byte each: four layers for eight images on the finest grid."""
MOST_PLACES = 576
"""Of a grid whose places a report compares each with each: 24×24."""
LEAST_LAYERS = 4
"""In a report, of a model that has so many: rather coarser grids than fewer."""
MOST_STATES = 128 << 20
"""Bytes that all layers give out for a batch, by which images are compared at a time."""
MOST_IMAGES, LEAST_IMAGES = 32, 4
"""In a batch; the unbiased estimate divides by n − 3."""
AT_ONCE = 1 << 16
"""Numbers of each image that go to float64 at a time."""
SAME = 1e-6
"""States that differ by less than this share of the largest are one state, rounded."""


def token_similarity(model: ImageModel, images: Tensor, layer: int = -1) -> Array:
    """(B, rows, columns, rows, columns): cosine similarity of what a layer gives out for the patches of each image.

    Of a ResNet, for the places of its feature map. Layers are counted from 0 as `anatomy.layers` names them, negative
    ones from the end.
    """
    model = anatomy.image_model(model)
    model.check_images(images)
    names = list(anatomy.layers(model))
    if not -len(names) <= layer < len(names):
        raise ConfigError(f"layer {layer} of a model with {len(names)}: give 0 to {len(names) - 1}, or −1 for the last")
    return _tokens(model, images, [names[layer]])[0]


def tokens_of(model: ImageModel, images: Tensor, most_bytes: int = MOST_BYTES) -> Tokens:
    """`token_similarity` of as many layers as fit into so many bytes, at a byte each, evenly spread and with the last.

    A grid of more than 576 places is made coarser before its places are compared: what a layer gives out for patches
    side by side is averaged over blocks of 2×2, of 3×3, …, the smallest that suffice; where the grid does not divide,
    blocks share a row or a column. The same is done where fewer than four layers would fit otherwise.
    """
    model = anatomy.image_model(model)
    model.check_images(images)
    grids = _of_layers(model, images[:1], lambda state: _grid(model, images[:1], state))
    names = [name for name, grid in grids.items() if grid]
    if not names:
        raise NotApplicableError(f"the layers of {anatomy.kind_of(model)} give out no map of the image")
    least = min(LEAST_LAYERS, len(names))
    places = min(MOST_PLACES, math.isqrt(most_bytes // (least * len(images))))
    sizes = {name: len(images) * math.prod(_coarser(grid, places)) ** 2 for name, grid in grids.items() if grid}
    for count in range(len(names), least - 1, -1):
        chosen = [names[place] for place in _spread(len(names), count)]
        if sum(sizes[name] for name in chosen) <= most_bytes:
            break
    return Tokens(tuple(chosen), tuple(_tokens(model, images, chosen, places)))


def layer_similarity(
    model: ImageModel, images: Tensor, other: ImageModel | None = None, other_images: Tensor | None = None
) -> Array:
    """(layers, other layers): linear CKA of what they give out for images, prefix and patches together.

    1 where one is the other turned and scaled, around 0 where they have nothing in common, and 0 for a layer that gives
    the same for every image. Its terms are unbiased estimates, the HSIC₁ of Song et al., summed over small batches of
    images; so it may lie somewhat below 0.

    Args:
        other: another model, with the same pictures as it wants them in `other_images`; else the layers of `model` are
            compared with each other.
    """
    if other is None and other_images is not None:
        raise ConfigError("other_images were given without the model that they are for: give other, too")
    if other is None:
        return layers_of(model, images).cka
    return layers_between(model, images, other, images if other_images is None else other_images).cka


def layers_of(model: ImageModel, images: Tensor) -> Layers:
    """`layer_similarity` of a model's layers with each other."""
    model = anatomy.image_model(model)
    sizes = _batches(len(images), _images_at_once(model, images))
    names, grams = _grams(model, images, sizes)
    return Layers(names, names, _cka(grams, grams), len(images))


def layers_between(a: ImageModel, images_a: Tensor, b: ImageModel, images_b: Tensor) -> Layers:
    """`layer_similarity` of the layers of one model with those of another. One pass through each."""
    if len(images_a) != len(images_b):
        raise InputError(
            f"{len(images_a)} images for one model and {len(images_b)} for the other: give both the same pictures"
        )
    a, b = anatomy.image_model(a), anatomy.image_model(b)
    sizes = _batches(len(images_a), min(_images_at_once(a, images_a), _images_at_once(b, images_b)))
    names, ours = _grams(a, images_a, sizes)
    others, theirs = _grams(b, images_b, sizes)
    return Layers(names, others, _cka(ours, theirs), len(images_a))


def cosine_similarity(vectors: Tensor) -> Array:
    """(…, N, D) → (…, N, N). Zeros are like themselves (1) and like nothing else (0)."""
    directions = F.normalize(vectors.detach().cpu().double(), dim=-1, eps=1e-300)
    similarity: Array = (directions @ directions.mT).clamp(-1, 1).numpy()
    every = np.arange(similarity.shape[-1])
    similarity[..., every, every] = 1.0
    return similarity


# States


@torch.no_grad()
def _of_layers(
    model: ImageModel,
    images: Tensor,
    reduce: Callable[[Tensor], Reduced],
    names: Collection[str] | None = None,
    rooms: Mapping[str, Any] | None = None,
) -> dict[str, Reduced]:
    """`reduce` of what each layer gives out for a batch, by name; computed as the layer runs, so no state is kept.

    Some layers of timm's give out several tensors, or do not run as modules: they are left out. `rooms`: arrays, by
    name, that take what is computed.
    """
    found: dict[str, Reduced] = {}

    def hook_of(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if isinstance(output, Tensor) and len(output) == len(images):
                found[name] = reduce(output)
                if rooms is not None:
                    rooms[name][:] = found[name]
                    found[name] = rooms[name]

        return hook

    layers = {name: part for name, part in anatomy.layers(model).items() if names is None or name in names}
    with anatomy.evaluating(model), uncompiled(), contextlib.ExitStack() as stack:
        for name, part in layers.items():
            stack.callback(part.register_forward_hook(hook_of(name)).remove)
        model.forward_features(images)
    if not found:
        raise NotApplicableError(f"the layers of {anatomy.kind_of(model)} give out no single tensor to look at")
    return {name: found[name] for name in layers if name in found}


# Patches


def _grid(model: ImageModel, images: Tensor, state: Tensor) -> Grid | None:
    """That a state lies on, if it lies on any."""
    try:
        _, rows, columns, _ = anatomy.on_grid(model, images, state).shape
    except NotApplicableError:
        return None
    return rows, columns


def _coarser(grid: Grid, places: int) -> Grid:
    """One with at most so many places, by the smallest whole factor; a single place always fits."""
    for factor in range(1, max(grid)):
        rows, columns = (-(-side // factor) for side in grid)
        if rows * columns <= places:
            return rows, columns
    return 1, 1


def _spread(count: int, chosen: int) -> list[int]:
    """`chosen` of `count` places, evenly spread from the first to the last; the last, where it is one."""
    return [count - 1 - round(index * (count - 1) / max(chosen - 1, 1)) for index in reversed(range(chosen))]


def _tokens(model: ImageModel, images: Tensor, names: Sequence[str], places: int | None = None) -> list[Array]:
    """(B, rows, columns, rows, columns) for each of the layers; on a coarser grid, where its own has more places."""

    def alike_in(part: Tensor) -> Callable[[Tensor], Array]:
        def alike(state: Tensor) -> Array:
            tokens = anatomy.on_grid(model, part, state)
            _, rows, columns, _ = tokens.shape
            grid = (rows, columns) if places is None else _coarser((rows, columns), places)
            if grid != (rows, columns):
                tokens = F.adaptive_avg_pool2d(tokens.permute(0, 3, 1, 2), grid).permute(0, 2, 3, 1)
            return cosine_similarity(tokens.flatten(1, 2)).reshape(-1, *grid, *grid)

        return alike

    parts = [_of_layers(model, part, alike_in(part), names) for part in anatomy.few_at_a_time(model, images)]
    return [np.concatenate([part[name] for part in parts]) for name in names]


# Layers


def _images_at_once(model: ImageModel, images: Tensor) -> int:
    if len(images) < LEAST_IMAGES:
        raise NotApplicableError(
            f"layers are compared by which images they find alike, which takes at least {LEAST_IMAGES} images and not "
            f"{len(images)}"
        )
    model.check_images(images)
    each = sum(_of_layers(model, images[:1], lambda state: state.nbytes).values())
    return min(max(MOST_STATES // each, 1), MOST_IMAGES)


def _batches(count: int, at_once: int) -> list[int]:
    """Sizes of batches, as equal as can be; none too small for an estimate, even if that exceeds the limit a little."""
    batches = min(-(-count // at_once), count // LEAST_IMAGES)
    size, larger = divmod(count, batches)
    return [size + 1] * larger + [size] * (batches - larger)


def _grams(model: ImageModel, images: Tensor, sizes: Sequence[int]) -> tuple[tuple[str, ...], list[Array]]:
    """The names of the layers, and for each batch of images their centred Gram matrices, (L, n, n)."""
    layers = list(anatomy.layers(model))
    # Made beforehand: small things that stay between large ones that go would scatter the memory.
    rooms = [dict(zip(layers, np.empty((len(layers), size, size)), strict=True)) for size in sizes]
    parts = [
        _of_layers(model, part, _gram, rooms=room) for part, room in zip(images.split(list(sizes)), rooms, strict=True)
    ]
    return tuple(parts[0]), [np.stack(list(part.values())) for part in parts]


def _gram(state: Tensor) -> Array:
    """(n, …) → (n, n): products of the images' states, centred without bias.

    Without the diagonal, all rows and columns sum to zero. The HSIC₁ of two such matrices is the sum of their products
    over n (n − 3): the definition of Song et al. in fewer terms (Székely and Rizzo, 2014).
    """
    n = len(state)
    products = torch.zeros(n, n, dtype=torch.float64)
    largest = farthest = torch.zeros((), dtype=torch.float64)
    for values in state.flatten(1).split(AT_ONCE, dim=1):  # all at once in float64, they would scatter the memory
        values = values.cpu().double()
        centred = values - values.mean(dim=0)  # changes nothing below but the rounding
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


def _cka(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    """(L, other L) from the Gram matrices of each batch: sums of HSIC₁ over batches, then the quotient."""
    both = _hsic(ours, theirs)
    scale = np.sqrt(np.outer(_hsic(ours, ours).diagonal(), _hsic(theirs, theirs).diagonal()))
    return np.divide(both, scale, out=np.zeros_like(both), where=scale != 0)


def _hsic(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    total = np.zeros((len(ours[0]), len(theirs[0])))
    for a, b in zip(ours, theirs, strict=True):
        n = a.shape[1]
        total += np.tensordot(a, b, axes=((1, 2), (1, 2))) / (n * (n - 3))
    return total
