"""The operations of an int8 encoder, twice: in plain torch, and by the C++ kernels in int8_kernels/.

A quantised row is x = scale · q + least, where q is an unsigned byte. Every row has its own scale and least value:
large values of a token do not make other tokens less exact, and no image depends on the rest of its batch.

Shapes: R rows (tokens of all images), D width, F hidden width of the MLP, B images of T tokens, A tokens that are read,
H heads, d = D/H.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.errors import NotApplicableError
from vitrail.model.mlp import QuickGELU
from vitrail.system.compiler import load_library

MOST = 255
LEAST = -0.1701
"""Below every value of the GELU in all its forms: the smallest is −0.17004, of the tanh form."""
LANES = 16
"""The kernels take only widths that are multiples of this."""
FORMS = {"tanh": 0, "none": 1, "quick": 2}
"""Numbers of the forms of the GELU: torch's names "tanh" and "none", and CLIP's "quick"."""
RESULTS, ADDED = {torch.float32: 0, torch.bfloat16: 1}, 2
"""Numbers of what becomes of a product: its type in a new tensor, or added to one that is given."""


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of unsigned bytes: scale · values + least."""

    values: Tensor
    """(R, D) uint8."""
    scale: Tensor
    """(R,) float32."""
    least: Tensor
    """(R,) float32."""

    def take_first(self, count: int, tokens: int) -> QuantisedRows:
        """Return the first `count` of the `tokens` rows of every image."""
        parts = (self.values, self.scale, self.least)
        return QuantisedRows(*(part.unflatten(0, (-1, tokens))[:, :count].flatten(0, 1).contiguous() for part in parts))


@dataclass(frozen=True)
class Int8Weight:
    """A quantised weight, kernel · scale, with a bias. The product with rows x is

    x.scale · (x.values · kernelᵀ) · scale + x.least · sums + bias.
    """

    kernel: Tensor
    """(out, in) int8."""
    scale: Tensor
    """(out,) float32, like the other two."""
    sums: Tensor
    """Of the inputs' weights."""
    bias: Tensor


@dataclass(frozen=True)
class NormWeights:
    """Weights of a LayerNorm, or of an RMSNorm, which has no offset."""

    gain: Tensor
    offset: Tensor | None
    eps: float

    @classmethod
    def from_module(cls, norm: nn.Module) -> NormWeights:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        offset = norm.bias.detach().clone() if isinstance(norm, nn.LayerNorm) else None
        return cls(norm.weight.detach().clone(), offset, norm.eps)


Multiply = Callable[[QuantisedRows], Tensor]
"""(R, in) → (R, out): the product with one weight."""
AddProduct = Callable[[QuantisedRows, Tensor], None]
"""Adds such a product to a (R, out) float32 tensor, in place."""


class Int8Operations(Protocol):
    """Products, and the work between them. Tensors must be contiguous unless stated otherwise."""

    dtype: torch.dtype
    """Type of what GELU and attention read."""

    def prepare_product(self, weight: Int8Weight, dtype: torch.dtype) -> Multiply:
        """Return the product with a weight as a function. `dtype`: type of the result, float32 or `self.dtype`."""

    def prepare_addition(self, weight: Int8Weight) -> AddProduct:
        """Return the function that adds the product with a weight to the residual stream."""

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        """Return the norm of z (R, D) float32, quantised."""

    def gelu(self, x: Tensor, form: str) -> QuantisedRows:
        """Return the GELU of x (R, F), quantised so that byte 0 is LEAST."""

    def attention(self, queries: Tensor, keys_and_values: Tensor, images: int, heads: int) -> QuantisedRows:
        """(B·A, D) and (B·T, 2D) → (B·A, D). Both may be some columns of wider matrices."""


class TorchOperations:
    """Plain torch: slower, runs everywhere, and the reference for tests of the kernels."""

    dtype = torch.float32

    def prepare_product(self, weight: Int8Weight, dtype: torch.dtype) -> Multiply:
        # oneDNN is fast for unsigned bytes without a zero point.
        operators: Any = torch.ops.onednn
        multiply, packed = operators.qlinear_pointwise, operators.qlinear_prepack(weight.kernel, None)
        zeros = torch.zeros(len(weight.kernel), dtype=torch.int32)
        options: tuple[Any, ...] = (1.0, 0, dtype, "none", [], "")

        def product(x: QuantisedRows) -> Tensor:
            raw: Tensor = multiply(x.values, 1.0, 0, packed, weight.scale, zeros, None, *options)
            return torch.addcmul(weight.bias, x.least[:, None], weight.sums).addcmul_(raw, x.scale[:, None])

        return product

    def prepare_addition(self, weight: Int8Weight) -> AddProduct:
        multiply = self.prepare_product(weight, torch.float32)

        def add_product(x: QuantisedRows, z: Tensor) -> None:
            z += multiply(x)

        return add_product

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        if norm.offset is None:
            return quantise_rows(F.rms_norm(z, z.shape[1:], norm.gain, norm.eps))
        return quantise_rows(F.layer_norm(z, z.shape[1:], norm.gain, norm.offset, norm.eps))

    def gelu(self, x: Tensor, form: str) -> QuantisedRows:
        y = QuickGELU()(x) if form == "quick" else F.gelu(x, approximate=form)
        return _quantise(y, torch.full((len(y),), LEAST), y.amax(dim=1).clamp_(min=0))

    def attention(self, queries: Tensor, keys_and_values: Tensor, images: int, heads: int) -> QuantisedRows:
        q = queries.reshape(images, -1, heads, queries.shape[1] // heads).transpose(1, 2)
        k, v = keys_and_values.reshape(images, -1, 2, heads, q.shape[3]).permute(2, 0, 3, 1, 4).unbind(0)
        return quantise_rows(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))


def quantise_rows(x: Tensor) -> QuantisedRows:
    """(R, D) → bytes between the least and the largest value of each row."""
    return _quantise(x, x.amin(dim=1), x.amax(dim=1))


def _quantise(x: Tensor, least: Tensor, most: Tensor) -> QuantisedRows:
    scale = most.sub(least).div_(MOST)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return QuantisedRows(x.sub(least[:, None]).div_(scale[:, None]).round_().to(torch.uint8), scale, least)


class CompiledOperations:
    """C++ kernels compiled for this processor. They read and write every number once."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._kernels = load_library(Path(__file__).with_name("int8_kernels"), "-fopenmp")
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._kernels, name)
            function.restype, function.argtypes = result, arguments

    def prepare_product(self, weight: Int8Weight, dtype: torch.dtype) -> Multiply:
        multiply, width = self._prepare(weight, RESULTS[dtype]), len(weight.kernel)

        def product(x: QuantisedRows) -> Tensor:
            out = torch.empty(len(x.values), width, dtype=dtype)
            multiply(x, out)
            return out

        return product

    def prepare_addition(self, weight: Int8Weight) -> AddProduct:
        return self._prepare(weight, ADDED)

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        out = _allocate(z.shape)
        self._kernels.norm_quantise(
            z.data_ptr(),
            norm.gain.data_ptr(),
            None if norm.offset is None else norm.offset.data_ptr(),
            norm.eps,
            norm.offset is not None,
            *_point_to(out),
            *z.shape,
            torch.get_num_threads(),
        )
        return out

    def gelu(self, x: Tensor, form: str) -> QuantisedRows:
        out = _allocate(x.shape)
        self._kernels.gelu_quantise(
            x.data_ptr(), FORMS[form], LEAST, *_point_to(out), *x.shape, torch.get_num_threads()
        )
        return out

    def attention(self, queries: Tensor, keys_and_values: Tensor, images: int, heads: int) -> QuantisedRows:
        width, threads = queries.shape[1], torch.get_num_threads()
        read_count, tokens, size = len(queries) // images, len(keys_and_values) // images, width // heads
        scratch = torch.empty(threads * self._kernels.attention_scratch(tokens, size, read_count), dtype=torch.uint8)
        mixed = torch.empty(images * read_count, width)
        self._kernels.attention(
            queries.data_ptr(),
            queries.stride(0),
            keys_and_values.data_ptr(),
            keys_and_values.stride(0),
            mixed.data_ptr(),
            scratch.data_ptr(),
            *(images, tokens, heads, size, read_count, threads),
        )
        out = _allocate(mixed.shape)
        self._kernels.quantise(mixed.data_ptr(), *_point_to(out), *mixed.shape, threads)
        return out

    def _prepare(self, weight: Int8Weight, result: int) -> AddProduct:
        packed, (width, depth) = pack_panels(weight.kernel), weight.kernel.shape
        constants = (packed, weight.scale, weight.sums, weight.bias)
        pointers = tuple(tensor.data_ptr() for tensor in constants)

        def multiply(x: QuantisedRows, out: Tensor, constants: tuple[Tensor, ...] = constants) -> None:
            """`constants` keep the memory that `pointers` point to."""
            self._kernels.multiply_bytes(
                *_point_to(x), *pointers, out.data_ptr(), result, len(x.values), width, depth, torch.get_num_threads()
            )

        return multiply


def pack_panels(kernel: Tensor) -> Tensor:
    """(out, in) int8 → panels of up to 64 outputs, each stored as (in / 4, outputs, 4), one after the other."""
    parts = [part.unflatten(1, (-1, 4)).transpose(0, 1).flatten() for part in kernel.split(4 * LANES)]
    return torch.cat(parts)


def _allocate(shape: tuple[int, ...]) -> QuantisedRows:
    return QuantisedRows(torch.empty(shape, dtype=torch.uint8), torch.empty(shape[0]), torch.empty(shape[0]))


def _point_to(rows: QuantisedRows) -> tuple[int, int, int]:
    return rows.values.data_ptr(), rows.scale.data_ptr(), rows.least.data_ptr()


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_OUT = [*[_POINTER] * 3, _LONG, _INT, _INT]  # quantised rows; their number, width, threads
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "multiply_bytes": (None, [*[_POINTER] * 8, _INT, _LONG, _LONG, _LONG, _INT]),
    "norm_quantise": (None, [*[_POINTER] * 3, _FLOAT, _INT, *_OUT]),
    "gelu_quantise": (None, [_POINTER, _INT, _FLOAT, *_OUT]),
    "quantise": (None, [_POINTER, *_OUT]),
    "attention_scratch": (_LONG, [_INT] * 3),
    "attention": (None, [_POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, *[_INT] * 6]),
}


def choose_operations(width: int, hidden: int, heads: int) -> Int8Operations:
    """Return the compiled operations where this machine and these widths allow them, else the plain ones."""
    if any(size % LANES for size in (width, hidden, width // heads)):
        return TorchOperations()
    try:
        return CompiledOperations()
    except (NotApplicableError, AttributeError):  # AttributeError: a cached library without our functions
        return TorchOperations()
