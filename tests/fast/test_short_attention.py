"""Attention of a few tokens, forward and backward, in Triton's interpreter against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from vitrail.fast.gpu.kernels import short_attention
from vitrail.fast.gpu.kernels.short_attention import short_backward, short_forward, supports_short

IMAGES = 3


def compute_exact(qkv: Tensor, tokens: int, heads: int) -> Tensor:
    q, k, v = qkv.view(IMAGES, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(IMAGES * tokens, -1)


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 16), (16, 2, 16), (37, 2, 32), (65, 1, 64)])
def test_values_and_gradients_equal_float64(tokens, heads, width):
    torch.manual_seed(0)
    qkv, dy = torch.randn(IMAGES * tokens, 3 * heads * width), torch.randn(IMAGES * tokens, heads * width)
    exact = qkv.double().requires_grad_()
    y = compute_exact(exact, tokens, heads)
    (gradient,) = torch.autograd.grad(y, exact, dy.double())
    found, total = short_backward(dy, qkv, tokens, heads)
    torch.testing.assert_close(short_forward(qkv, tokens, heads).double(), y.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.double(), gradient, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(total.double(), gradient.sum(0), atol=1e-4, rtol=1e-5)


def test_sums_do_not_depend_on_how_images_are_shared(monkeypatch):
    torch.manual_seed(0)
    qkv, dy = torch.randn(IMAGES * 5, 3 * 16), torch.randn(IMAGES * 5, 16)
    alone = short_backward(dy, qkv, 5, 1)
    monkeypatch.setattr(short_attention, "PROGRAMS", 0)  # one program takes all images
    together = short_backward(dy, qkv, 5, 1)
    assert torch.equal(alone[0], together[0])
    torch.testing.assert_close(alone[1], together[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in which the interpreter computes, remarks on them
def test_images_do_not_look_at_each_other():
    torch.manual_seed(0)
    qkv, dy = torch.randn(IMAGES * 17, 3 * 16), torch.randn(IMAGES * 17, 16)
    y, (gradient, _) = short_forward(qkv, 17, 1), short_backward(dy, qkv, 17, 1)
    qkv[17:] = torch.nan
    assert torch.equal(short_forward(qkv, 17, 1)[:17], y[:17])
    assert torch.equal(short_backward(dy, qkv, 17, 1)[0][:17], gradient[:17])


@pytest.mark.parametrize(("tokens", "width", "is_supported"), [(128, 64, True), (129, 64, False), (64, 48, False)])
def test_what_is_supported(tokens, width, is_supported):
    assert supports_short(tokens, width) is is_supported
