"""What an int8 encoder is computed by: in torch, and by the kernels in int8_kernels/.

Shapes: R rows (tokens of all images), D width, F hidden width of the MLP, B images of T tokens, A of them asked for,
H heads, d = D/H.

A quantised row is x = scale · (q − 128), with q a byte without a sign; behind a GELU, whose least value is known, it is
x = scale · q + LEAST, which wastes nothing on values that cannot be. A scale for each row: a token with large values
costs no other token its digits, and no image depends on its neighbours in a batch. A product leaves the scale out
(`raw`), and whoever reads it next computes scale · raw + bias.
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
from vitrail.fast.cpu.compiler import library
from vitrail.model.encoder import QuickGELU

CENTRE, MOST = 128, 255
LEAST = -0.1701
"""Below every value of the GELU, in all its forms: the least is −0.17004, of the tanh form."""
LANES = 16
"""Widths that the kernels take are multiples of it."""
FORMS = {"tanh": 0, "none": 1, "quick": 2}
"""Of the GELU: torch's names, and CLIP's."""


@dataclass(frozen=True)
class Bytes:
    """Quantised rows."""

    values: Tensor
    """(R, D) uint8."""
    scale: Tensor
    """(R,) float32."""

    def first(self, count: int, of: int) -> Bytes:
        """The first rows of every image."""
        values = self.values.unflatten(0, (-1, of))[:, :count].flatten(0, 1)
        return Bytes(values.contiguous(), self.scale.view(-1, of)[:, :count].flatten().contiguous())


@dataclass(frozen=True)
class Product:
    """What a quantised product gave: scale · raw + bias."""

    raw: Tensor
    """(R, out) of the steps' type, or float32."""
    scale: Tensor
    """(R,): of the input."""
    bias: Tensor
    """(out,) float32."""


@dataclass(frozen=True)
class Norm:
    """A LayerNorm, or an RMSNorm, which is not centred and has no offset."""

    gain: Tensor
    offset: Tensor | None
    eps: float

    @classmethod
    def of(cls, norm: nn.Module) -> Norm:
        """The numbers of a module."""
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        assert norm.eps is not None
        offset = norm.bias.detach().clone() if isinstance(norm, nn.LayerNorm) else None
        return cls(norm.weight.detach().clone(), offset, norm.eps)


Multiply = Callable[[Tensor], Tensor]
"""(R, in) uint8 → (R, out): a product with a kernel."""


class Steps(Protocol):
    """Products, and the work between them. Tensors are contiguous, but where it says so."""

    dtype: torch.dtype
    """Of products that are read once and not added to the residual stream."""

    def product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        """q → (q · kernelᵀ) · scale + correction, for a kernel (out, in) int8, in float32 or the steps' own type."""

    def norm(self, z: Tensor, norm: Norm) -> Bytes:
        """(R, D) float32 → its norm."""

    def add(self, z: Tensor, product: Product) -> None:
        """Add a product to z, in place."""

    def add_and_norm(self, z: Tensor, product: Product, norm: Norm) -> Bytes:
        """Both."""

    def gelu(self, product: Product, form: str) -> Bytes:
        """(R, F) → its GELU, in bytes from LEAST on."""

    def attention(self, queries: Product, keys_and_values: Product, images: int, heads: int) -> Bytes:
        """(B·A, D or more), (B·T, 2D) → (B·A, D). The queries are the first D columns; their rows may lie apart."""


class TorchSteps:
    """In plain torch: slower, anywhere, and what the kernels are tested against."""

    dtype = torch.float32

    def product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        """By oneDNN, whose products are fast where the bytes have no sign and no zero point."""
        operators: Any = torch.ops.onednn
        multiply, packed = operators.qlinear_pointwise, operators.qlinear_prepack(kernel, None)
        zeros = torch.zeros(len(kernel), dtype=torch.int32)
        behind: tuple[Any, ...] = (1.0, 0, dtype, "none", [], "")

        def product(values: Tensor) -> Tensor:
            found: Tensor = multiply(values, 1.0, 0, packed, scale, zeros, correction, *behind)
            return found

        return product

    def norm(self, z: Tensor, norm: Norm) -> Bytes:
        """(R, D) float32 → its norm."""
        if norm.offset is None:
            return quantised(F.rms_norm(z, z.shape[1:], norm.gain, norm.eps))
        return quantised(F.layer_norm(z, z.shape[1:], norm.gain, norm.offset, norm.eps))

    def add(self, z: Tensor, product: Product) -> None:
        """Add a product to z, in place."""
        z += restored(product)

    def add_and_norm(self, z: Tensor, product: Product, norm: Norm) -> Bytes:
        """Both."""
        self.add(z, product)
        return self.norm(z, norm)

    def gelu(self, product: Product, form: str) -> Bytes:
        """(R, F) → its GELU, in bytes from LEAST on."""
        x = restored(product)
        y = QuickGELU()(x) if form == "quick" else F.gelu(x, approximate=form)
        scale = (y.amax(dim=1).clamp_(min=0) - LEAST).div_(MOST)
        return Bytes(y.sub_(LEAST).div_(scale[:, None]).round_().to(torch.uint8), scale)

    def attention(self, queries: Product, keys_and_values: Product, images: int, heads: int) -> Bytes:
        """(B·A, D), (B·T, 2D) → (B·A, D)."""
        q = restored(queries).view(images, -1, heads, queries.raw.shape[1] // heads).transpose(1, 2)
        k, v = restored(keys_and_values).view(images, -1, 2, heads, q.shape[3]).permute(2, 0, 3, 1, 4).unbind(0)
        return quantised(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1))


def quantised(x: Tensor) -> Bytes:
    """(R, D) → bytes about the middle."""
    scale = torch.maximum(x.amax(dim=1), -x.amin(dim=1)).div_(MOST - CENTRE)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return Bytes(x.div(scale[:, None]).round_().add_(CENTRE).to(torch.uint8), scale)


def restored(product: Product) -> Tensor:
    """scale · raw + bias."""
    return torch.addcmul(product.bias, product.raw.float(), product.scale[:, None])


class CompiledSteps:
    """By kernels compiled for this processor. Every number is read once and written once."""

    dtype = torch.bfloat16

    def __init__(self) -> None:
        self._kernels = library(Path(__file__).with_name("int8_kernels"))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._kernels, name)
            function.restype, function.argtypes = result, arguments

    def product(self, kernel: Tensor, scale: Tensor, correction: Tensor, dtype: torch.dtype) -> Multiply:
        """By a kernel of ours: all of the processor's speed, at any number of rows."""
        packed, (width, depth), short = panels(kernel), kernel.shape, dtype == torch.bfloat16

        def product(values: Tensor) -> Tensor:
            out = torch.empty(len(values), width, dtype=dtype)
            pointers = (tensor.data_ptr() for tensor in (values, packed, scale, correction, out))
            self._kernels.multiply_bytes(*pointers, short, len(values), width, depth, torch.get_num_threads())
            return out

        return product

    def norm(self, z: Tensor, norm: Norm) -> Bytes:
        """(R, D) float32 → its norm."""
        return self._add_and_norm(z, None, norm)

    def add(self, z: Tensor, product: Product) -> None:
        """Add a product to z, in place."""
        self._add_and_norm(z, product, None)

    def add_and_norm(self, z: Tensor, product: Product, norm: Norm) -> Bytes:
        """Both."""
        return self._add_and_norm(z, product, norm)

    def gelu(self, product: Product, form: str) -> Bytes:
        """(R, F) → its GELU, in bytes from LEAST on."""
        out = _empty(product.raw.shape)
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

    def attention(self, queries: Product, keys_and_values: Product, images: int, heads: int) -> Bytes:
        """(B·A, D), (B·T, 2D) → (B·A, D)."""
        width, threads = queries.raw.shape[1], torch.get_num_threads()
        asked, tokens, size = len(queries.raw) // images, len(keys_and_values.raw) // images, width // heads
        scratch = torch.empty(threads * self._kernels.attention_scratch(tokens, size), dtype=torch.uint8)
        mixed = torch.empty(images * asked, width)
        sides = [
            (side.raw.data_ptr(), side.raw.stride(0), side.scale.data_ptr(), side.bias.data_ptr())
            for side in (queries, keys_and_values)
        ]
        self._kernels.attention(
            *sides[0],
            *sides[1],
            mixed.data_ptr(),
            scratch.data_ptr(),
            *(images, tokens, heads, size, asked, threads),
        )
        out = _empty(mixed.shape)
        self._kernels.quantise(
            mixed.data_ptr(), out.values.data_ptr(), out.scale.data_ptr(), *mixed.shape, torch.get_num_threads()
        )
        return out

    def _add_and_norm(self, z: Tensor, product: Product | None, norm: Norm | None) -> Bytes:
        out = _empty(z.shape if norm is not None else (0, 0))
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


def panels(kernel: Tensor) -> Tensor:
    """(out, in) int8 → panels of 64 outputs, the last one narrower, each as (in / 4, outputs, 4), end to end."""
    parts = [part.unflatten(1, (-1, 4)).transpose(0, 1).flatten() for part in kernel.split(4 * LANES)]
    return torch.cat(parts)


def _empty(shape: tuple[int, ...]) -> Bytes:
    return Bytes(torch.empty(shape, dtype=torch.uint8), torch.empty(shape[0]))


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


def steps_for(width: int, hidden: int, heads: int) -> Steps:
    """The fastest that this machine has for such an encoder."""
    if any(size % LANES for size in (width, hidden, width // heads)):
        return TorchSteps()
    try:
        return CompiledSteps()
    except (NotApplicableError, AttributeError):  # the latter from a library that is not what it is called
        return TorchSteps()
