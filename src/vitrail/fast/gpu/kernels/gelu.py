"""The GELU and its derivative, for use inside kernels.

Every form is computed as x/2 · (1 + tanh(x · (a + b x² + c x⁴))), because tanh is one instruction on the chip. For the
tanh form and the quick form this is exact. For the exact form it is a fit with an error of at most 2.5e-5; bf16 rounds
numbers near 1 to 4e-3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vitrail.errors import NotApplicableError

FORMS = {"none": 0, "tanh": 1, "exact": 2, "quick": 3}
SWIGLU = 4
"""Number of SwiGLU where it stands in place of a GELU: it makes one column of two, a gate and a value."""


def number_gelu(form: str) -> int:
    """Return the number of a form by its name in an architecture, such as "tanh"."""
    if form not in FORMS:
        raise NotApplicableError(f"there is no kernel for a GELU of the form {form!r}")
    return FORMS[form]


@triton.jit
def _tanh(x, chip: tl.constexpr):
    if chip:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        power = tl.exp(-2 * tl.abs(x))
        return tl.where(x < 0, -1, 1) * (1 - power) / (1 + power)


@triton.jit
def gelu(x, form: tl.constexpr, chip: tl.constexpr):
    """Return the GELU of x; x itself for form 0."""
    if form == 0:
        return x
    elif form == 1:
        return 0.5 * x * (1 + _tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x), chip))
    elif form == 2:
        square = tl.minimum(x * x, 36.0)  # the fit is wrong beyond; tanh is 1 there
        inner = x * (0.797507884 + square * (0.037005646 - 0.000351516792 * square))
        return 0.5 * x * (1 + _tanh(inner, chip))
    else:
        return 0.5 * x * (1 + _tanh(0.851 * x, chip))


@triton.jit
def silu(x, chip: tl.constexpr):
    """Return x · sigmoid(x)."""
    return 0.5 * x * (1 + _tanh(0.5 * x, chip))


@triton.jit
def gelu_derivative(x, form: tl.constexpr, chip: tl.constexpr):
    """Return d gelu(x) / dx, for forms 1 to 3."""
    if form == 1:
        t = _tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x), chip)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (0.7978845608028654 + 3 * 0.035677408136300125 * x * x)
    elif form == 2:
        t = tl.erf(0.7071067811865476 * x)  # the fit does not hold for the derivative
        return 0.5 * (1 + t) + x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    else:
        t = _tanh(0.851 * x, chip)
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.851
