"""The operations of an int8 encoder, twice: in plain torch, and by the C++ kernels in int8_kernels/.

A quantised row is x = scale · (q − 128), where q is an unsigned byte. After a GELU, whose smallest value is known, it
is x = scale · q + LEAST, so that no byte stands for an impossible value. Every row has its own scale: large values of a
token do not make other tokens less exact, and no image depends on the rest of its batch. A product leaves out the
scale (`raw`); the next operation computes scale · raw + bias.

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
from vitrail.fast.cpu.compiler import load_library
from vitrail.model.mlp import QuickGELU

CENTRE, MOST = 128, 255
LEAST = -0.1701
"""Below every value of the GELU in all its forms: the smallest is −0.17004, of the tanh form."""
LANES = 16
"""The kernels take only widths that are multiples of this."""
FORMS = {"tanh": 0, "none": 1, "quick": 2}
"""Numbers of the forms of the GELU: torch's names "tanh" and "none", and CLIP's "quick"."""


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of unsigned bytes, with a scale each."""

    values: Tensor
    """(R, D) uint8."""
    scale: Tensor
    """(R,) float32."""

    def take_first(self, count: int, tokens: int) -> QuantisedRows:
        """Return the first `count` of the `tokens` rows of every image."""
        values = self.values.unflatten(0, (-1, tokens))[:, :count].flatten(0, 1)
        return QuantisedRows(values.contiguous(), self.scale.view(-1, tokens)[:, :count].flatten().contiguous())


@dataclass(frozen=True)
class Int8Product:
    """The result of a quantised product: scale · raw + bias."""

    raw: Tensor
    """(R, out), float32 or the `dtype` of the operations."""
    scale: Tensor
    """(R,), the scale of the input rows."""
    bias: Tensor
    """(out,) float32."""


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


Multiply = Callable[[Tensor], Tensor]
"""(R, in) uint8 → (R, out): the product with one weight."""


class Int8Operations(Protocol):
    """Products, and the work between them. Tensors must be contiguous unless stated otherwise."""

    dtype: torch.dtype
    """Type of products that are not added to the residual stream."""

    def prepare_product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        """Return the function q → (q · kernelᵀ) · scale + correction, for a weight `kernel` (out, in) int8.

        `dtype`: type of the result, float32 or `self.dtype`.
        """

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        """Return the norm of z (R, D) float32, quantised."""

    def add(self, z: Tensor, product: Int8Product) -> None:
        """Add a product to z, in place."""

    def add_and_norm(self, z: Tensor, product: Int8Product, norm: NormWeights) -> QuantisedRows:
        """Add a product to z, in place, and return the norm of the sum, quantised."""

    def gelu(self, product: Int8Product, form: str) -> QuantisedRows:
        """Return the GELU of a product (R, F), quantised so that byte 0 is LEAST."""

    def attention(self, queries: Int8Product, keys_and_values: Int8Product, images: int, heads: int) -> QuantisedRows:
        """(B·A, D) and (B·T, 2D) → (B·A, D). Both may be some columns of wider matrices."""


class TorchOperations:
    """Plain torch: slower, runs everywhere, and the reference for tests of the kernels."""

    dtype = torch.float32

    def prepare_product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        # oneDNN is fast for unsigned bytes without a zero point.
        operators: Any = torch.ops.onednn
        multiply, packed = operators.qlinear_pointwise, operators.qlinear_prepack(kernel, None)
        zeros = torch.zeros(len(kernel), dtype=torch.int32)
        options: tuple[Any, ...] = (1.0, 0, dtype, "none", [], "")

        def product(values: Tensor) -> Tensor:
            result: Tensor = multiply(values, 1.0, 0, packed, scale, zeros, correction, *options)
            return result

        return product

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        if norm.offset is None:
            return quantise_rows(F.rms_norm(z, z.shape[1:], norm.gain, norm.eps))
        return quantise_rows(F.layer_norm(z, z.shape[1:], norm.gain, norm.offset, norm.eps))

    def add(self, z: Tensor, product: Int8Product) -> None:
        z += dequantise(product)

    def add_and_norm(self, z: Tensor, product: Int8Product, norm: NormWeights) -> QuantisedRows:
        self.add(z, product)
        return self.norm(z, norm)

    def gelu(self, product: Int8Product, form: str) -> QuantisedRows:
        x = dequantise(product)
        y = QuickGELU()(x) if form == "quick" else F.gelu(x, approximate=form)
        scale = (y.amax(dim=1).clamp_(min=0) - LEAST).div_(MOST)
        return QuantisedRows(y.sub_(LEAST).div_(scale[:, None]).round_().to(torch.uint8), scale)

    def attention(self, queries: Int8Product, keys_and_values: Int8Product, images: int, heads: int) -> QuantisedRows:
        q = dequantise(queries).view(images, -1, heads, queries.raw.shape[1] // heads).transpose(1, 2)
        k, v = dequantise(keys_and_values).view(images, -1, 2, heads, q.shape[3]).permute(2, 0, 3, 1, 4).unbind(0)
        return quantise_rows(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))


def quantise_rows(x: Tensor) -> QuantisedRows:
    """(R, D) → bytes around `CENTRE`."""
    scale = torch.maximum(x.amax(dim=1), -x.amin(dim=1)).div_(MOST - CENTRE)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return QuantisedRows(x.div(scale[:, None]).round_().add_(CENTRE).to(torch.uint8), scale)


def dequantise(product: Int8Product) -> Tensor:
    """scale · raw + bias."""
    return torch.addcmul(product.bias, product.raw.float(), product.scale[:, None])


class CompiledOperations:
    """C++ kernels compiled for this processor. They read and write every number once."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._kernels = load_library(Path(__file__).with_name("int8_kernels"))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._kernels, name)
            function.restype, function.argtypes = result, arguments

    def prepare_product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        packed, (width, depth), is_bf16 = pack_panels(kernel), kernel.shape, dtype == torch.bfloat16

        def product(values: Tensor) -> Tensor:
            out = torch.empty(len(values), width, dtype=dtype)
            pointers = (tensor.data_ptr() for tensor in (values, packed, scale, correction, out))
            self._kernels.multiply_bytes(*pointers, is_bf16, len(values), width, depth, torch.get_num_threads())
            return out

        return product

    def norm(self, z: Tensor, norm: NormWeights) -> QuantisedRows:
        return self._add_and_norm(z, None, norm)

    def add(self, z: Tensor, product: Int8Product) -> None:
        self._add_and_norm(z, product, None)

    def add_and_norm(self, z: Tensor, product: Int8Product, norm: NormWeights) -> QuantisedRows:
        return self._add_and_norm(z, product, norm)

    def gelu(self, product: Int8Product, form: str) -> QuantisedRows:
        out = _allocate(product.raw.shape)
        self._kernels.gelu_quantise(
            product.raw.data_ptr(),
            product.scale.data_ptr(),
            product.bias.data_ptr(),
            FORMS[form],
            LEAST,
            out.values.data_ptr(),
            out.scale.data_ptr(),
            *product.raw.shape,
            torch.get_num_threads(),
        )
        return out

    def attention(self, queries: Int8Product, keys_and_values: Int8Product, images: int, heads: int) -> QuantisedRows:
        width, threads = queries.raw.shape[1], torch.get_num_threads()
        read_count, tokens, size = len(queries.raw) // images, len(keys_and_values.raw) // images, width // heads
        scratch = torch.empty(threads * self._kernels.attention_scratch(tokens, size), dtype=torch.uint8)
        mixed = torch.empty(images * read_count, width)
        sides = [
            (side.raw.data_ptr(), side.raw.stride(0), side.scale.data_ptr(), side.bias.data_ptr())
            for side in (queries, keys_and_values)
        ]
        self._kernels.attention(
            *sides[0],
            *sides[1],
            mixed.data_ptr(),
            scratch.data_ptr(),
            *(images, tokens, heads, size, read_count, threads),
        )
        out = _allocate(mixed.shape)
        self._kernels.quantise(
            mixed.data_ptr(), out.values.data_ptr(), out.scale.data_ptr(), *mixed.shape, torch.get_num_threads()
        )
        return out

    def _add_and_norm(self, z: Tensor, product: Int8Product | None, norm: NormWeights | None) -> QuantisedRows:
        out = _allocate(z.shape if norm is not None else (0, 0))
        self._kernels.add_norm_quantise(
            z.data_ptr(),
            *((None,) * 3 if product is None else (t.data_ptr() for t in (product.raw, product.scale, product.bias))),
            None if norm is None else norm.gain.data_ptr(),
            None if norm is None or norm.offset is None else norm.offset.data_ptr(),
            0.0 if norm is None else norm.eps,
            norm is not None and norm.offset is not None,
            None if norm is None else out.values.data_ptr(),
            None if norm is None else out.scale.data_ptr(),
            *z.shape,
            torch.get_num_threads(),
        )
        return out


def pack_panels(kernel: Tensor) -> Tensor:
    """(out, in) int8 → panels of up to 64 outputs, each stored as (in / 4, outputs, 4), one after the other."""
    parts = [part.unflatten(1, (-1, 4)).transpose(0, 1).flatten() for part in kernel.split(4 * LANES)]
    return torch.cat(parts)


def _allocate(shape: tuple[int, ...]) -> QuantisedRows:
    return QuantisedRows(torch.empty(shape, dtype=torch.uint8), torch.empty(shape[0]))


_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_ROWS = [_LONG, _INT, _INT]  # rows, width, threads
_SIDE = [_POINTER, _LONG, _POINTER, _POINTER]
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "multiply_bytes": (None, [*[_POINTER] * 5, _INT, _LONG, _LONG, _LONG, _INT]),
    "add_norm_quantise": (None, [*[_POINTER] * 6, _FLOAT, _INT, _POINTER, _POINTER, *_ROWS]),
    "gelu_quantise": (None, [*[_POINTER] * 3, _INT, _FLOAT, _POINTER, _POINTER, *_ROWS]),
    "quantise": (None, [*[_POINTER] * 3, *_ROWS]),
    "attention_scratch": (_LONG, [_INT, _INT]),
    "attention": (None, [*_SIDE, *_SIDE, _POINTER, _POINTER, *[_INT] * 6]),
}


def choose_operations(width: int, hidden: int, heads: int) -> Int8Operations:
    """Return the compiled operations where this machine and these widths allow them, else the plain ones."""
    if any(size % LANES for size in (width, hidden, width // heads)):
        return TorchOperations()
    try:
        return CompiledOperations()
    except (NotApplicableError, AttributeError):  # AttributeError: a cached library without our functions
        return TorchOperations()
