"""Norm and rotate queries and keys where they lie in a product's result: forward and backward, one pass over memory.

A head of width d holds d/2 pairs of numbers; a rotation turns every pair (a, b) to (a·cos − b·sin, b·cos + a·sin). One
program takes all heads of a token, queries before keys, so that the token's cosines and sines are read once. Values are
not touched.

Shapes: B images, T tokens, M = B·T, H heads, d their width, U heads that are transformed (up to 2·H), P programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.fast.gpu.kernels.overlap import begin, is_compiled, overlap_options
from vitrail.fast.gpu.kernels.product import count_multiprocessors

PAIRS_PER_WARP = 512
"""16 for each thread: they fit into its registers."""
MOST_WARPS = 8
BACKWARD_PROGRAMS = 8
"""On each multiprocessor."""


class HeadTransform(NamedTuple):
    """What happens to queries and keys between their product and attention: a norm, a rotation, or both."""

    heads: int
    """H: so many queries, and as many keys."""
    width: int
    """d, an even number."""
    cos: Tensor | None = None
    """(1, T, d/2), or (H, T, d/2) if each head turns on its own; float32. None: nothing turns."""
    sin: Tensor | None = None
    paired: bool = True
    """Which numbers turn together: 2i and 2i + 1; if False, i and i + d/2."""
    q_weight: Tensor | None = None
    """(d,), of the norm on queries; None: there are no norms."""
    q_bias: Tensor | None = None
    """(d,); None for an RMSNorm, which does not subtract the mean."""
    k_weight: Tensor | None = None
    k_bias: Tensor | None = None
    eps: float = 1e-6
    """Of both norms."""


class HeadGradients(NamedTuple):
    """Gradients of the parameters of a transform, and of the bias of the product before it; all float32."""

    bias: Tensor
    """(U·d,)"""
    q_weight: Tensor
    """(d,), like the three others; meaningless without norms."""
    q_bias: Tensor
    k_weight: Tensor
    k_bias: Tensor


@triton.jit
def _load_pairs(
    x, units: tl.constexpr, padded_units: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, paired: tl.constexpr
):  # fmt: skip
    """Load heads that lie side by side as the first and the second numbers of their pairs, each (U, d/2), float32."""
    unit, pair = tl.arange(0, padded_units)[:, None], tl.arange(0, padded)[None, :]
    if paired:
        column = tl.arange(0, 2 * padded)[None, :]
        whole = tl.load(x + unit * width + column, mask=(unit < units) & (column < width), other=0.0)
        a, b = tl.split(tl.reshape(whole.to(tl.float32), (padded_units, padded, 2)))
    else:
        mask = (unit < units) & (pair < width // 2)
        a = tl.load(x + unit * width + pair, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x + unit * width + width // 2 + pair, mask=mask, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_pairs(
    y, a, b,
    units: tl.constexpr, padded_units: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, paired: tl.constexpr,
):  # fmt: skip
    """Do the reverse of `_load_pairs`, in y's type."""
    unit, pair = tl.arange(0, padded_units)[:, None], tl.arange(0, padded)[None, :]
    if paired:
        column = tl.arange(0, 2 * padded)[None, :]
        whole = tl.reshape(tl.join(a, b), (padded_units, 2 * padded)).to(y.dtype.element_ty)
        tl.store(y + unit * width + column, whole, mask=(unit < units) & (column < width))
    else:
        mask = (unit < units) & (pair < width // 2)
        tl.store(y + unit * width + pair, a.to(y.dtype.element_ty), mask=mask)
        tl.store(y + unit * width + width // 2 + pair, b.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_angles(
    cos, sin, token, tokens,
    units: tl.constexpr, padded_units: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, tables: tl.constexpr,
):  # fmt: skip
    """Load a token's cosines and sines, (1, d/2), or (U, d/2) where there are several tables."""
    pair = tl.arange(0, padded)[None, :]
    mask = pair < width // 2
    place = token * (width // 2) + pair
    if tables > 1:
        unit = tl.arange(0, padded_units)[:, None]
        mask = mask & (unit < units)
        place = (unit % tables) * tokens * (width // 2) + place
    return tl.load(cos + place, mask=mask, other=1.0), tl.load(sin + place, mask=mask, other=0.0)


@triton.jit
def _load_norm_pairs(
    q, k, queries: tl.constexpr, padded_units: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    paired: tl.constexpr,
):  # fmt: skip
    """Load the weights of both norms, q and k (d,), as pairs for every head: the first `queries` take q, others k."""
    is_query = tl.arange(0, padded_units)[:, None] < queries
    pair = tl.arange(0, padded)[None, :]
    mask = pair < width // 2
    if paired:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, width // 2 + pair
    a = tl.where(is_query, tl.load(q + first, mask=mask, other=0.0), tl.load(k + first, mask=mask, other=0.0))
    b = tl.where(is_query, tl.load(q + second, mask=mask, other=0.0), tl.load(k + second, mask=mask, other=0.0))
    return a, b


@triton.jit
def _normalise(a, b, width: tl.constexpr, padded: tl.constexpr, eps: tl.constexpr, centred: tl.constexpr):
    """Return the pairs of every head without mean and with variance 1, and what they were multiplied by (U, 1)."""
    if centred:
        inside = tl.arange(0, padded)[None, :] < width // 2
        mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / width)[:, None]
        a = tl.where(inside, a - mean, 0.0)
        b = tl.where(inside, b - mean, 0.0)
    inverse = (1 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / width + eps))[:, None]
    return a * inverse, b * inverse, inverse


@triton.jit
def transform_kernel(
    x, y, cos, sin, q_weight, q_bias, k_weight, k_bias, tokens, x_step, y_step,
    units: tl.constexpr, padded_units: tl.constexpr, queries: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    tables: tl.constexpr, eps: tl.constexpr, normed: tl.constexpr, centred: tl.constexpr, paired: tl.constexpr,
    chip: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the heads of one token."""
    # x, y: M rows, x_step and y_step values apart, that begin with U heads of d; cos, sin (tables, T, d/2), tables = 0:
    # no rotation; weights and biases (d,). units = U, width = d, padded: next powers of two, of d/2.
    begin(chip)
    row = tl.program_id(0).to(tl.int64)
    a, b = _load_pairs(x + row * x_step, units, padded_units, width, padded, paired)
    if normed:
        a, b, _ = _normalise(a, b, width, padded, eps, centred)
        wa, wb = _load_norm_pairs(q_weight, k_weight, queries, padded_units, width, padded, paired)
        a, b = a * wa, b * wb
        if centred:
            ba, bb = _load_norm_pairs(q_bias, k_bias, queries, padded_units, width, padded, paired)
            a, b = a + ba, b + bb
    if tables > 0:
        c, s = _load_angles(cos, sin, row % tokens, tokens, units, padded_units, width, padded, tables)
        a, b = a * c - b * s, b * c + a * s
    _store_pairs(y + row * y_step, a, b, units, padded_units, width, padded, paired)


@triton.jit
def transform_backward_kernel(
    dy, x, cos, sin, q_weight, k_weight, bias_sums, norm_sums, count, tokens, dy_step, x_step,
    units: tl.constexpr, padded_units: tl.constexpr, queries: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    tables: tl.constexpr, eps: tl.constexpr, normed: tl.constexpr, centred: tl.constexpr, paired: tl.constexpr,
):  # fmt: skip
    """Replace the gradient after the transform by the one before it, and sum over tokens."""
    # dy: as y above, changed in place; x: what went in, read only for norms; bias_sums (P, U·d);
    # norm_sums (P, 2, 2, d): of queries and of keys, weight and bias. count = M.
    unit = tl.arange(0, padded_units)[:, None]
    total_a = tl.zeros((padded_units, padded), dtype=tl.float32)
    total_b = tl.zeros((padded_units, padded), dtype=tl.float32)
    weight_a = tl.zeros((padded_units, padded), dtype=tl.float32)
    weight_b = tl.zeros((padded_units, padded), dtype=tl.float32)
    shift_a = tl.zeros((padded_units, padded), dtype=tl.float32)
    shift_b = tl.zeros((padded_units, padded), dtype=tl.float32)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        a, b = _load_pairs(dy + row * dy_step, units, padded_units, width, padded, paired)
        if tables > 0:
            c, s = _load_angles(cos, sin, row % tokens, tokens, units, padded_units, width, padded, tables)
            a, b = a * c + b * s, b * c - a * s
        if normed:
            xa, xb = _load_pairs(x + row * x_step, units, padded_units, width, padded, paired)
            xa, xb, inverse = _normalise(xa, xb, width, padded, eps, centred)
            weight_a += a * xa
            weight_b += b * xb
            shift_a += a
            shift_b += b
            wa, wb = _load_norm_pairs(q_weight, k_weight, queries, padded_units, width, padded, paired)
            a, b = a * wa, b * wb
            along = ((tl.sum(a * xa, 1) + tl.sum(b * xb, 1)) / width)[:, None]
            if centred:
                mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / width)[:, None]
                a, b = a - mean, b - mean
            a, b = (a - xa * along) * inverse, (b - xb * along) * inverse
        _store_pairs(dy + row * dy_step, a, b, units, padded_units, width, padded, paired)
        total_a += a
        total_b += b
    _store_pairs(
        bias_sums + tl.program_id(0) * units * width, total_a, total_b, units, padded_units, width, padded, paired
    )
    if normed:
        for kind in tl.static_range(2):
            mine = unit < queries
            if kind == 1:
                mine = (unit >= queries) & (unit < units)
            base = norm_sums + (tl.program_id(0) * 4 + kind * 2) * width
            ga, gb = tl.where(mine, weight_a, 0.0), tl.where(mine, weight_b, 0.0)
            _store_pairs(base, tl.sum(ga, 0)[None, :], tl.sum(gb, 0)[None, :], 1, 1, width, padded, paired)
            ga, gb = tl.where(mine, shift_a, 0.0), tl.where(mine, shift_b, 0.0)
            _store_pairs(base + width, tl.sum(ga, 0)[None, :], tl.sum(gb, 0)[None, :], 1, 1, width, padded, paired)


def transform_heads(
    x: Tensor, transform: HeadTransform, *, queries: bool = True, keys: bool = True, out: Tensor | None = None
) -> Tensor:
    """Norm and rotate the heads at the beginning of every row.

    Args:
        x: (M, columns): queries (H·d), then keys (H·d), then anything; images one after the other.
        transform: What to do with them.
        queries: Whether x has queries.
        keys: Whether x has keys.
        out: Receives the heads, (M, columns of its own); x itself if None.

    Returns:
        `out`.
    """
    out = x if out is None else out
    assert x.is_contiguous()
    assert out.is_contiguous()
    shape = _measure(transform, queries, keys)
    transform_kernel[(len(x),)](
        x, out, transform.cos, transform.sin, transform.q_weight, transform.q_bias, transform.k_weight,
        transform.k_bias, _count_tokens(transform), x.shape[1], out.shape[1], *shape, is_compiled(),
        num_warps=_count_warps(shape), **overlap_options(),
    )  # fmt: skip
    return out


def transform_heads_backward(dy: Tensor, x: Tensor, transform: HeadTransform) -> HeadGradients:
    """Turn the gradient of what `transform_heads` returned into the gradient of x, in place.

    Args:
        dy: (M, columns), contiguous, beginning with queries and keys.
        x: What went in; read only if there are norms.
        transform: As it was; its tables get no gradient.
    """
    assert dy.is_contiguous()
    assert x.is_contiguous()
    shape, width = _measure(transform, True, True), transform.width
    programs = min(len(dy), BACKWARD_PROGRAMS * count_multiprocessors(dy.device))
    bias_sums = torch.empty(programs, 2 * transform.heads * width, dtype=torch.float32, device=dy.device)
    norm_sums = torch.empty(programs, 4, width, dtype=torch.float32, device=dy.device)
    transform_backward_kernel[(programs,)](
        dy, x, transform.cos, transform.sin, transform.q_weight, transform.k_weight, bias_sums, norm_sums,
        len(dy), _count_tokens(transform), dy.shape[1], x.shape[1], *shape,
        num_warps=_count_warps(shape),
    )  # fmt: skip
    return HeadGradients(bias_sums.sum(0), *norm_sums.sum(0))


def _measure(transform: HeadTransform, queries: bool, keys: bool) -> tuple[int | float | bool, ...]:
    """Return the sizes and options of a transform, in the order in which both kernels take them."""
    units = transform.heads * (queries + keys)
    return (
        units, triton.next_power_of_2(units), transform.heads * queries,
        transform.width, triton.next_power_of_2(transform.width // 2),
        0 if transform.cos is None else len(transform.cos), transform.eps, transform.q_weight is not None,
        transform.q_bias is not None, transform.paired,
    )  # fmt: skip


def _count_tokens(transform: HeadTransform) -> int:
    return 1 if transform.cos is None else transform.cos.shape[1]


def _count_warps(shape: tuple[int | float | bool, ...]) -> int:
    return int(min(MOST_WARPS, max(1, shape[1] * shape[4] // PAIRS_PER_WARP)))
