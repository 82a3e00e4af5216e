"""Find near duplicates between two sets of images: resized, recompressed, slightly cropped, brighter, or mirrored.

Every image is kept as a grey thumbnail of 32×32 pixels. Three steps leave fewer and fewer pairs:

1. 8×8 thumbnails correlate. A product of matrices compares all pairs.
2. The details of 16×16 thumbnails correlate after a small shift. Fourier transforms try all shifts at once.
3. 32×32 thumbnails, aligned by shift and stretch, correlate, and so do their details. Unrelated images may have the
   same large shapes, such as a dark object on a bright ground, but not the same detail.

A: the first set, B: the second, P: pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

SIDE = 32
"""Height and width of a thumbnail in pixels."""
COARSE, MIDDLE = 8, 16
"""Sides of the smaller thumbnails of the first two steps."""
LEAST_COARSE, LEAST_SHIFTED, LEAST_ROUGH = 0.8, 0.45, 0.4
"""The least correlations of the first two steps, and of details after the first half of the third."""
LEAST_WHOLE, LEAST_DETAIL = 0.8, 0.65
"""The least correlations of aligned 32×32 thumbnails, and of their details."""
FLATTEST = 3.0
"""Thumbnails whose 8×8 pixels deviate by less, in grey levels, are too uniform to compare."""
SMALLEST = 16
"""Images with a shorter side below this many pixels are too small to compare."""
MOST_SHIFT = 2
"""How far details are shifted in the second step, in pixels of 16."""
MOST_STRETCH, MOST_MOVED = 1.25, 0.25
"""Aligned images may be stretched by this factor, and moved by this share of half a side."""
DETAIL = 5
"""Details are what differs from an average of so many pixels squared."""
NOISE = 4.0
"""Details that deviate by less, in grey levels, count little: compression changes them."""
ROWS, PAIRS = 1024, 256
"""How many images of A, and how many pairs, are compared at a time: as many as fit into a processor's cache."""

Thumbnails = NDArray[np.uint8]
"""(images, SIDE²)."""


class NearPairs(NamedTuple):
    """Pairs of near duplicates."""

    first: NDArray[np.int64]
    """(P,) places in A."""
    second: NDArray[np.int64]
    """(P,) places in B."""
    is_mirrored: NDArray[np.bool_]
    similarity: NDArray[np.float32]
    """(P,) the correlation of the details after alignment, up to 1."""


def make_thumbnail(image: Image.Image) -> NDArray[np.uint8]:
    """Return (SIDE²,) grey pixels of an RGB image, squashed to a square; black for an image that is too small.

    Of very few pixels many unrelated images look alike, such as digits of 8×8.
    """
    if min(image.size) < SMALLEST:
        return np.zeros(SIDE * SIDE, np.uint8)
    grey = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(grey, dtype=np.uint8).reshape(-1)


def find_near_duplicates(first: Thumbnails, second: Thumbnails) -> Iterator[tuple[int, NearPairs]]:
    """Compare each thumbnail of A with each of B; yield how many of A are done, and new pairs."""
    if not len(second):
        yield len(first), _NO_PAIRS
        return
    upright = _prepare(second)
    mirrored = _prepare(np.ascontiguousarray(second.reshape(-1, SIDE, SIDE)[:, :, ::-1]).reshape(second.shape))
    for start in range(0, len(first), ROWS):
        rows = _prepare(first[start : start + ROWS])
        with _use_one_thread():
            found = [_compare(rows, other, start, flag) for flag, other in ((False, upright), (True, mirrored))]
        yield len(rows.thumbnails), join_pairs(found)


def join_pairs(parts: list[NearPairs]) -> NearPairs:
    """Join pairs; of a pair that is found upright and mirrored, only the more similar one stays. Sorted by place."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((-columns[3], columns[1], columns[0]))
    columns = [column[order] for column in columns]
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (np.diff(columns[0]) != 0) | (np.diff(columns[1]) != 0)
    return NearPairs(*(column[is_new] for column in columns))


def find_flat(thumbnails: Thumbnails) -> NDArray[np.bool_]:
    """Return (images,) whether a thumbnail is too uniform to be compared."""
    result: NDArray[np.bool_] = _shrink(thumbnails, COARSE).std(axis=1) < FLATTEST
    return result


_NO_PAIRS = NearPairs(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.float32))


class _Prepared(NamedTuple):
    """What is computed once of each thumbnail."""

    thumbnails: Thumbnails
    coarse: NDArray[np.float32]
    """(images, COARSE²) of mean 0 and length 1; zeros if a thumbnail is flat."""
    details: Tensor
    """(images, MIDDLE, …) the Fourier transforms of the details, of length 1."""


def _prepare(thumbnails: Thumbnails) -> _Prepared:
    coarse = _normalise(_shrink(thumbnails, COARSE))
    coarse[find_flat(thumbnails)] = 0
    middle = torch.from_numpy(_shrink(thumbnails, MIDDLE)).view(-1, 1, MIDDLE, MIDDLE)
    details = _normalise((middle - _blur(middle, DETAIL)).flatten(1).numpy())
    return _Prepared(thumbnails, coarse, torch.fft.rfft2(torch.from_numpy(details).view(-1, MIDDLE, MIDDLE)))


def _compare(rows: _Prepared, other: _Prepared, start: int, is_mirrored: bool) -> NearPairs:
    """Return the pairs between some thumbnails of A, the first of which has the number `start`, and all of B."""
    first, second = np.nonzero(rows.coarse @ other.coarse.T >= LEAST_COARSE)
    parts = []
    for begin in range(0, len(first), PAIRS):
        ones, twos = first[begin : begin + PAIRS], second[begin : begin + PAIRS]
        parts.append(np.stack([ones, twos])[:, _shift_details(rows.details[ones], other.details[twos])])
    likely = np.concatenate(parts, axis=1) if parts else np.empty((2, 0), np.int64)
    found = [_align(rows, other, *likely[:, begin : begin + PAIRS]) for begin in range(0, likely.shape[1], PAIRS)]
    if not found:
        return _NO_PAIRS
    first, second, similarity = (np.concatenate(column) for column in zip(*found, strict=True))
    return NearPairs(first + start, second, np.full(len(first), is_mirrored), similarity)


def _shift_details(first: Tensor, second: Tensor) -> NDArray[np.bool_]:
    """Return (P,) whether the details of two images, given as Fourier transforms, correlate after a small shift."""
    shifted = torch.fft.irfft2(first * second.conj(), s=(MIDDLE, MIDDLE))
    near = [*range(MOST_SHIFT + 1), *range(-MOST_SHIFT, 0)]
    result: NDArray[np.bool_] = (shifted[:, near][:, :, near].amax(dim=(1, 2)) >= LEAST_SHIFTED).numpy()
    return result


def _align(
    rows: _Prepared, other: _Prepared, ones: NDArray[np.int64], twos: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return the pairs that are near duplicates, and how similar their details are."""
    whole, detail = align_pairs(rows.thumbnails[ones], other.thumbnails[twos])
    is_near = (whole >= LEAST_WHOLE) & (detail >= LEAST_DETAIL)
    return ones[is_near], twos[is_near], detail[is_near]


def _shrink(thumbnails: Thumbnails, side: int) -> NDArray[np.float32]:
    """Return (images, side²) averages of squares of a thumbnail."""
    factor = SIDE // side
    squares = thumbnails.reshape(-1, side, factor, side, factor)
    result: NDArray[np.float32] = squares.mean(axis=(2, 4), dtype=np.float32).reshape(-1, side * side)
    return result


def _normalise(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors with mean 0 and length 1."""
    vectors = vectors - vectors.mean(axis=1, keepdims=True)
    result: NDArray[np.float32] = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return result


def align_pairs(first: Thumbnails, second: Thumbnails) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Shift and stretch B's thumbnails until they fit A's; return (P,) correlations of the whole and of the details.

    Gauss-Newton steps over shift and stretch in both directions, contrast and brightness: at 16×16 for all pairs, then
    at 32×32 for those that look alike by then. The others have correlations of 0.
    """
    small = [torch.from_numpy(_shrink(part, MIDDLE)).view(-1, 1, MIDDLE, MIDDLE) for part in (first, second)]
    change = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat(len(first), 1)  # stretch and shift across, then down
    for width in (3, 3, 3, 1, 1):
        change = _improve(_blur(small[0], width), _blur(small[1], width), change)
    whole, detail = _correlate_aligned(small[0], small[1], change)
    likely = torch.nonzero(detail >= LEAST_ROUGH).flatten()
    large = [torch.from_numpy(part).view(-1, 1, SIDE, SIDE)[likely].float() for part in (first, second)]
    change = change[likely]
    for width in (3, 1):
        change = _improve(_blur(large[0], width), _blur(large[1], width), change)
    results = []
    for rough, fine in zip((whole, detail), _correlate_aligned(large[0], large[1], change), strict=True):
        results.append(torch.zeros_like(rough).index_copy(0, likely, fine).numpy())
    return results[0], results[1]


def _improve(a: Tensor, b: Tensor, change: Tensor) -> Tensor:
    """Return the change of B after one Gauss-Newton step; if that leaves the allowed range, the one before."""
    side = a.shape[-1]
    warped, inside = _warp(b, change)
    x, y = (slope * (side / 2) for slope in _compute_slopes(warped))  # per half a side, the unit of the grid
    across = _list_centres(side)
    columns = [across * x, x, across.mT * y, y, warped, torch.ones_like(warped)]
    parts = torch.cat(columns, dim=1).flatten(2)  # (P, 6, pixels)
    weighted = parts * inside.flatten(2)
    products = weighted @ parts.mT
    products += torch.diag_embed(1e-4 * products.diagonal(dim1=1, dim2=2) + 1e-3)
    solved = torch.linalg.solve(products, weighted @ a.flatten(2).mT).squeeze(-1)
    stepped = change + (solved[:, :4] / solved[:, 4:5].clamp(min=0.2)).clamp(-0.1, 0.1)
    stretch, moved = stepped[:, 0::2], stepped[:, 1::2]
    is_allowed = (stretch < MOST_STRETCH) & (stretch > 1 / MOST_STRETCH) & (moved.abs() < MOST_MOVED)
    return torch.where(is_allowed.all(dim=1, keepdim=True), stepped, change)


def _correlate_aligned(a: Tensor, b: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return (P,) the correlations of A's images with B's after a change, and of their details.

    Details must agree in the centre too: images that share nothing but a frame are no duplicates.
    """
    warped, inside = _warp(b, change)
    details = _extract_details(a), _extract_details(warped)
    margin = a.shape[-1] // 5
    centre = torch.zeros_like(inside)
    centre[..., margin:-margin, margin:-margin] = inside[..., margin:-margin, margin:-margin]
    return _correlate(a, warped, inside), torch.minimum(_correlate(*details, inside), _correlate(*details, centre))


def _extract_details(images: Tensor) -> Tensor:
    """Return what differs from an average around each pixel, as strong everywhere as contrast allows.

    Otherwise a few strong edges, such as a white frame, would decide alone.
    """
    details = images - _blur(images, DETAIL)
    return details / (_blur(details**2, DETAIL).sqrt() + NOISE)


def _warp(images: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Return images (P, 1, side, side) after a change (P, 4), and 1 where a pixel comes from inside, else 0."""
    side = images.shape[-1]
    centres = _list_centres(side).flatten()
    across = (change[:, :1] * centres + change[:, 1:2]).view(-1, 1, side).expand(-1, side, -1)
    down = (change[:, 2:3] * centres + change[:, 3:]).view(-1, side, 1).expand(-1, -1, side)
    warped = F.grid_sample(images, torch.stack([across, down], -1), padding_mode="border", align_corners=False)
    return warped, ((across.abs() <= 1) & (down.abs() <= 1)).unsqueeze(1).float()


def _list_centres(side: int) -> Tensor:
    """Return (1, 1, 1, side) the places of pixels from −1 to 1."""
    return ((torch.arange(side) + 0.5) * 2 / side - 1).view(1, 1, 1, -1)


def _compute_slopes(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the derivatives of (P, 1, side, side) images to the right and downwards, per pixel."""
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    return (padded[..., 1:-1, 2:] - padded[..., 1:-1, :-2]) / 2, (padded[..., 2:, 1:-1] - padded[..., :-2, 1:-1]) / 2


def _blur(images: Tensor, width: int) -> Tensor:
    """Return images whose pixels are averages of `width`² pixels."""
    return images if width == 1 else F.avg_pool2d(images, width, 1, width // 2, count_include_pad=False)


def _correlate(first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
    """Return (P,) the correlations of images (P, 1, side, side) where the weights are 1."""
    first, second, weights = (part.flatten(1) for part in (first, second, weights))
    total = weights.sum(dim=1, keepdim=True).clamp(min=1)
    first, second = ((part - (part * weights).sum(dim=1, keepdim=True) / total) * weights for part in (first, second))
    lengths = torch.linalg.vector_norm(first, dim=1) * torch.linalg.vector_norm(second, dim=1)
    result: Tensor = (first * second).sum(dim=1) / lengths.clamp(min=1e-6)
    return result


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Compute with one thread of torch in the block: its operations are too small to share."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
