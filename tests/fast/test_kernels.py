"""Kernels in Triton's interpreter, against float64. Compiled ones: `benchmarks/kernel_check.py`, on a GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import vitrail

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from vitrail.fast.gpu.kernels.attention import MOST_TOKENS, attention, split_tokens
from vitrail.fast.gpu.kernels.backward import Walk, gelu_backward, join_qkv_gradients, norm_backward
from vitrail.fast.gpu.kernels.few_rows import multiply_few_rows
from vitrail.fast.gpu.kernels.merged import ResidualStream, multiply_and_add, normalise_and_multiply
from vitrail.fast.gpu.kernels.norm import FP8, add_norm, assemble_norm
from vitrail.fast.gpu.kernels.patches import cut_patches
from vitrail.fast.gpu.kernels.product import Tiling, product
from vitrail.fast.gpu.kernels.quantise import quantise, quantise_weight
from vitrail.fast.gpu.kernels.read_attention import read_backward, read_forward, read_with_torch

GELUS = {
    0: lambda x: x,
    1: lambda x: F.gelu(x, approximate="tanh"),
    2: F.gelu,
    3: lambda x: x * torch.sigmoid(1.702 * x),
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close_in_fp8(found: Tensor, scaled: Tensor) -> None:
    """The interpreter forgets the carry where rounding up reaches the next power of two: a few in a hundred."""
    assert found.dtype == FP8
    exact = scaled.to(FP8).float()
    assert (found.float() == exact).double().mean() > 0.9
    assert ((found.float() - exact).abs() <= exact.abs() / 2).all()


def close(found: Tensor, exact: Tensor, most: float = 1e-5) -> None:
    assert found.shape == exact.shape
    found, exact = found.detach().double(), exact.detach().double()
    assert (found - exact).abs().max() <= most * max(1.0, float(exact.abs().max()))


@given(st.integers(1, MOST_TOKENS))
def test_pieces_cover_the_tokens_closely(tokens):
    found = [size for size in split_tokens(tokens) if size]
    assert tokens <= sum(found) < max(2 * tokens, 17)
    assert all(size >= 16 and size & (size - 1) == 0 for size in found)
    assert all(a > b for a, b in pairwise(found))


def test_pieces_of_the_papers_models():
    assert (split_tokens(197), split_tokens(257), split_tokens(50)) == ((128, 64, 16), (256, 16, 0), (64, 0, 0))


@pytest.mark.parametrize(("tokens", "heads", "width"), [(5, 1, 16), (37, 2, 16), (65, 3, 32)])
def test_attention(tokens, heads, width):
    qkv = torch.randn(2 * tokens, 3 * heads * width)
    q, k, v = qkv.double().view(2, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    exact = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2 * tokens, -1)
    close(attention(qkv, tokens, heads, tile=16), exact)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, in which the interpreter computes, remarks on them
def test_attention_does_not_look_at_the_next_image():
    qkv = torch.randn(2 * 17, 3 * 16)
    alone = attention(qkv[:17].contiguous(), 17, 1, tile=16)
    qkv[17:] = torch.nan
    assert torch.equal(attention(qkv, 17, 1, tile=16)[:17], alone)


@pytest.mark.parametrize("centred", [True, False])
def test_add_norm_with_everything(centred):
    z, branch = torch.randn(6, 48), torch.randn(6, 48)
    weight, bias, own, factor = (torch.randn(48) for _ in range(4))
    keep = torch.tensor([0.0, 1.5])
    made = add_norm(
        z, branch, weight, bias if centred else None, 1e-6, branch_bias=own, factor=factor, keep=keep, tokens=3
    )
    exact = z + (branch + own) * factor * keep.repeat_interleave(3)[:, None]
    close(made.z, exact)
    norm = F.layer_norm(exact, (48,), weight, bias, 1e-6) if centred else F.rms_norm(exact, (48,), weight, 1e-6)
    close(made.y, norm)


def test_add_norm_without_a_branch_leaves_z_alone():
    z = torch.randn(3, 20)
    made = add_norm(z, None, torch.ones(20), torch.zeros(20), 1e-6)
    assert made.z is z
    close(made.y, F.layer_norm(z, (20,), eps=1e-6))


def test_add_norm_in_half_saturates():
    z = torch.full((1, 16), 6e4).half()
    assert add_norm(z, z, torch.ones(16), torch.zeros(16), 1e-6).z.max() == 65504


def test_add_norm_in_fp8_and_beside_it():
    z, weight, bias = torch.randn(5, 40), torch.randn(40), torch.randn(40)
    exact = F.layer_norm(z, (40,), weight, bias, 1e-6)
    alone = add_norm(z, None, weight, bias, 1e-6, dtype=FP8)
    both = add_norm(z, None, weight, bias, 1e-6, twin=True)
    close(both.y, exact)
    assert torch.equal(alone.y.float(), both.twin.float())
    close_in_fp8(alone.y, exact / alone.scales)
    close(alone.scales[:, 0], exact.abs().amax(1) / 448)


def test_assemble_norm():
    table, patches = torch.randn(5, 32), torch.randn(2 * 3, 32)
    weight, bias = torch.randn(32), torch.randn(32)
    made = assemble_norm(table, patches, weight, bias, 1e-6, prefix=2, stream=torch.float32, dtype=torch.float32)
    exact = (table + torch.cat([torch.zeros(2, 2, 32), patches.view(2, 3, 32)], 1)).view(10, 32)
    close(made.z, exact)
    close(made.y, F.layer_norm(exact, (32,), weight, bias, 1e-6))


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_norm_backward(centred, used):
    z, branch, weight, bias = (
        torch.randn(*shape).double().requires_grad_() for shape in ((6, 40), (6, 40), (40,), (40,))
    )
    keep = torch.tensor([0.0, 1.5]).double()
    total = z + branch * keep.repeat_interleave(3)[:, None]
    y = F.layer_norm(total, (40,), weight, bias, 1e-6) if centred else F.rms_norm(total, (40,), weight, 1e-6) + 0 * bias
    dy, dz = torch.randn(6, 40).double(), torch.randn(6, 40).double()
    exact = torch.autograd.grad([y, total], [z, branch, weight, bias], [dy, dz if used else torch.zeros_like(dz)])
    found = norm_backward(
        dy.float(), dz.float() if used else None, total.detach().float(), weight.detach().float(), 1e-6,
        centred=centred, keep=keep.float(), tokens=3, walk=Walk(2, 0, 1, 2),
    )  # fmt: skip
    for value, expected in zip(found, [*exact, exact[1].sum(0)], strict=True):
        if centred or value is not found.bias:
            close(value, expected)


@pytest.mark.parametrize("form", [1, 2, 3])
def test_gelu_backward(form):
    before = (4 * torch.randn(9, 300)).double().requires_grad_()
    dh = torch.randn(9, 300)
    (exact,) = torch.autograd.grad(GELUS[form](before), before, dh.double())
    total = gelu_backward(dh, before.detach().float(), form, Walk(2, 128, 1, 6))
    close(dh, exact)
    close(total, exact.sum(0))


@pytest.mark.parametrize("form", GELUS)
@pytest.mark.parametrize("parts", [1, 2])
def test_product(form, parts):
    x, w, bias = torch.randn(20, 40), torch.randn(48, 40), torch.randn(48)
    before = torch.full((20, 48), torch.nan)
    y = product(x, w, bias, Tiling(16, 32, 32, 4, 2, parts=parts), form=form, before=before, dtype=torch.float32)
    close(before, F.linear(x, w, bias))
    close(y, GELUS[form](F.linear(x, w, bias)), 3e-5)


@pytest.mark.parametrize("form", GELUS)
@pytest.mark.parametrize(("rows", "width"), [(1, 40), (3, 1100)])
def test_few_rows(form, rows, width):
    x, w, bias = torch.randn(rows, width), torch.randn(21, width), torch.randn(21)
    close(multiply_few_rows(x, w, bias, form), GELUS[form](F.linear(x.double(), w.double(), bias.double())), 3e-5)
    close(multiply_few_rows(x, w, None), F.linear(x.double(), w.double()))


@pytest.mark.parametrize("splits", [2, 3])
def test_a_split_product_is_added_up_by_the_norm(splits):
    x, w, bias, z = torch.randn(20, 96), torch.randn(48, 96), torch.randn(48), torch.randn(20, 48)
    parts = product(x, w, bias, Tiling(16, 32, 16, 4, 2, splits=splits), dtype=torch.float32)
    assert parts.shape == (splits, 20, 48)
    assert all(part.abs().mean() > 1 for part in parts)
    exact = F.linear(x.double(), w.double(), bias.double())
    close(parts.sum(0), exact)
    made = add_norm(z, parts, torch.ones(48), torch.zeros(48), 1e-6)
    close(made.z, z + exact)
    close(made.y, F.layer_norm(z + exact, (48,), eps=1e-6))


TILES = [Tiling(16, 16, 32, 4, 2), Tiling(32, 16, 16, 4, 2), Tiling(16, 64, 16, 4, 2)]


def statistics(z: Tensor, columns: int) -> Tensor:
    """Of each row over each tile's columns: the mean, and the sum of squared deviations from it."""
    tiles = z.double().split(columns, 1)
    means = torch.stack([tile.mean(1) for tile in tiles])
    squares = torch.stack([(tile - tile.mean(1, keepdim=True)).square().sum(1) for tile in tiles])
    return torch.stack([means, squares])


@pytest.mark.parametrize("tiling", TILES, ids=str)
@pytest.mark.parametrize(("biased", "scaled"), [(True, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_joins_z(tiling, biased, scaled, dtype):
    x, w, z = torch.randn(21, 48), torch.randn(40, 48), (30 + torch.randn(21, 40)).to(dtype)
    bias, factor = torch.randn(40) if biased else None, torch.randn(40) if scaled else None
    made = multiply_and_add(x, w, bias, z, tiling, factor=factor)
    branch = F.linear(x.double(), w.double(), None if bias is None else bias.double())
    close(made.z, z + (branch if factor is None else branch * factor), 1e-6 if dtype == torch.float32 else 2**-11)
    assert made.z.dtype == dtype
    assert made.columns == tiling.columns
    close(made.statistics, statistics(made.z, tiling.columns))  # of what is stored, rounded as it is


def test_a_product_that_joins_z_saturates():
    z = torch.full((3, 24), 6e4).half()
    z[1] = -6e4
    made = multiply_and_add(z / 1e4, torch.ones(24, 24).half(), None, z, TILES[0], factor=torch.full((24,), 1e3))
    assert made.z.tolist() == [[65504.0] * 24, [-65504.0] * 24, [65504.0] * 24]
    close(made.statistics, statistics(made.z, 16))


@pytest.mark.parametrize("tiling", TILES, ids=str)
@pytest.mark.parametrize("form", [0, 1])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_product_norms_first(tiling, form, centred, dtype):
    """From statistics of four parts, the last one narrower; most of z is one large mean."""
    z, w = (30 + torch.randn(21, 56)).to(dtype), (torch.randn(40, 56) / 7).to(dtype)
    constant = torch.randn(40)
    stream = ResidualStream(z, statistics(z, 16).float(), 16)
    sums = w.float().sum(1)
    found = normalise_and_multiply(
        stream, w, sums, constant, 1e-6, tiling, centred=centred, form=form, dtype=torch.float32
    )
    norm = (F.layer_norm if centred else F.rms_norm)(z.double(), (56,), eps=1e-6)
    close(found, GELUS[form](F.linear(norm, w.double(), constant.double())), 5e-5)


@pytest.mark.parametrize("centred", [True, False])
def test_the_sum_and_the_norm_inside_two_products(centred):
    """One after the other, against what they stand for."""
    x, z, first, second = torch.randn(19, 32), torch.randn(19, 40), torch.randn(40, 32), torch.randn(24, 40)
    weight, shift, own, bias = torch.randn(40), torch.randn(40), torch.randn(40), torch.randn(24)
    exact = (z + F.linear(x, first, own)).double()
    norm = F.layer_norm(exact, (40,), weight.double(), shift.double(), 1e-6)
    norm = norm if centred else F.rms_norm(exact, (40,), weight.double(), 1e-6)
    stream = multiply_and_add(x, first, own, z, TILES[0])
    w, constant = weight * second, bias + second @ shift if centred else bias
    found = normalise_and_multiply(stream, w, w.sum(1), constant, 1e-6, TILES[1], centred=centred, dtype=torch.float32)
    close(found, F.linear(norm, second.double(), bias.double()))


def test_pack():
    parts = [torch.randn(3, 4, 2, 16).transpose(1, 2) for _ in range(3)]
    side_by_side = torch.cat([part.transpose(1, 2).reshape(12, 32) for part in parts], 1)
    for given_parts in (parts, [part.contiguous() for part in parts]):
        packed, total = join_qkv_gradients(*given_parts, walk=Walk(2, 16, 1, 6))
        assert torch.equal(packed, side_by_side)
        close(total, side_by_side.sum(0))


@pytest.mark.parametrize("side", [4, 6])
def test_cut_is_what_the_model_cuts(side):
    model = vitrail.create_model(
        "Ti/4", patch_size=side, image_size=2 * side, width=16, depth=1, num_heads=1, mlp_dim=16, num_classes=0
    )
    images = torch.randn(2, 3, 2 * side, 3 * side)
    assert torch.equal(cut_patches(images, side, torch.float32), model.patch_embed.split_patches(images).flatten(0, 1))


def test_quantise():
    x = torch.randn(5, 70)
    x[3] = 0
    y, scales = quantise(x)
    close_in_fp8(y, x / scales)
    close(scales[:3, 0], x[:3].abs().amax(1) / 448)
    assert not y[3].float().any()
    rows, each = quantise_weight(x)
    close(rows.float() * each[:, None], x, 2**-4)  # three bits after the point


@pytest.mark.parametrize("read", [1, 2])
def test_reading(read):
    images, tokens, heads, width = 2, 7, 2, 24
    q = torch.randn(images, read, heads * width).double().requires_grad_()
    kv = torch.randn(images, tokens, 2 * heads * width).double().requires_grad_()
    k, v = kv.view(images, tokens, 2, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q.view(images, read, heads, width).transpose(1, 2), k, v)
    y = y.transpose(1, 2).flatten(2)
    dy = torch.randn_like(y)
    exact = torch.autograd.grad(y, [q, kv], dy)
    close(read_forward(q.detach().float(), kv.detach().float(), heads), y)
    close(read_with_torch(q, kv, heads), y)
    for found, expected in zip(
        read_backward(dy.float(), q.detach().float(), kv.detach().float(), heads), exact, strict=True
    ):
        close(found, expected)


def test_reading_from_parts_of_wider_rows():
    qkv = torch.randn(2, 5, 3 * 32)
    q, kv = qkv[:, :1, :32], qkv[:, :, 32:]
    assert torch.equal(read_forward(q, kv, 2), read_forward(q.contiguous(), kv.contiguous(), 2))
