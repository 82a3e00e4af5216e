"""Dropout, stochastic depth and layer scale of fused training, in Triton's interpreter, with the masks read back."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitrail
from vitrail.fast.timing import relative_distance

pytest.importorskip("triton", reason="Triton, in whose interpreter the kernels run, is not installed")
if torch.cuda.is_available():
    pytest.skip("here is a GPU: benchmarks/kernel_check.py checks the kernels there", allow_module_level=True)

from vitrail.fast.gpu.kernels.backward import Walk, gelu_backward, norm_backward
from vitrail.fast.gpu.kernels.dropout import DropoutMask, activate_and_drop, read_mask
from vitrail.fast.gpu.kernels.norm import add_norm, assemble_norm
from vitrail.fast.gpu.masks import Place, StepMasks, make_key
from vitrail.fast.gpu.training import FusedTraining

KEY = 0xF123456789ABCDEF
SMALL = {"image_size": 8, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 48, "num_classes": 5, "seed": 0}


def make_mask(rate: float = 0.3, place: int = 4, first: int = 0, key: int = KEY) -> DropoutMask:
    mask = DropoutMask.from_rate(make_key(key, first), place, rate)
    assert mask is not None
    return mask


def close(found: Tensor, exact: Tensor, most: float = 1e-5) -> None:
    assert found.shape == exact.shape
    found, exact = found.detach().double(), exact.detach().double()
    assert (found - exact).abs().max() <= most * max(1.0, float(exact.abs().max()))


def philox(counters: list[int], key: int, rounds: int = 7) -> list[int]:
    """Philox4x32 in whole numbers, as its authors write it."""
    (a, b, c, d), low, high, most = counters, key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF
    for _ in range(rounds):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ low, second & most, first >> 32 ^ d ^ high, first & most
        low, high = low + 0x9E3779B9 & most, high + 0xBB67AE85 & most
    return [a, b, c, d]


def test_the_reference_is_the_authors_generator():
    assert [f"{word:08x}" for word in philox([0] * 4, 0)] == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]
    assert [f"{word:08x}" for word in philox([0] * 4, 0, 10)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_every_value_of_a_mask():
    """Sixteen bits a channel, of the counter (channel / 8, token, image, place)."""
    found = read_mask(make_mask(place=61, first=(1 << 32) - 2), 3, 2, 20)
    for image, token, channel in np.ndindex(3, 2, 20):
        words = philox([channel // 8, token, (image - 2) % (1 << 32), 61], KEY)
        bits = words[channel % 8 // 2] >> 16 * (channel % 2) & 0xFFFF
        assert found[image, token, channel] == (65536 / (65536 - 19661) if bits >= 19661 else 0)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate_and_scale(rate):
    found = read_mask(make_mask(rate), 4, 8, 1024)
    dropped = round(rate * 65536) / 65536
    assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / (1 - dropped)).item()}
    deviations = ((found == 0).double() - dropped) / math.sqrt(dropped * (1 - dropped))
    assert abs(deviations.mean()) < 4 / math.sqrt(found.numel())
    for dim in ((0, 1), (0, 2), (1, 2)):  # channels, tokens and images: their shares differ as chance has it
        chances = deviations.mean(dim).square() * found.numel() / len(deviations.mean(dim))
        assert abs(chances.mean() - 1) < 5 * math.sqrt(2 / len(chances))


def test_a_rate_below_the_resolution_drops_nothing():
    key = make_key(KEY, 0)
    assert DropoutMask.from_rate(key, 1, 0.0) is None
    assert DropoutMask.from_rate(key, 1, 1e-6) is None
    assert DropoutMask.from_rate(key, 1, 1 - 1e-9).dropped == 65535


def test_masks_are_not_correlated():
    """Between places, steps, images, tokens, and channels that share a word."""
    mask = make_mask(0.5)
    base = read_mask(mask, 4, 4, 1024) - 1
    others = {f"place {n}": read_mask(mask._replace(place=n), 4, 4, 1024) - 1 for n in (3, 5)}
    others |= {f"key {n}": read_mask(make_mask(0.5, key=n), 4, 4, 1024) - 1 for n in (KEY + 1, KEY ^ 1 << 40)}
    others |= {"next image": base.roll(1, 0), "next token": base.roll(1, 1)}
    others |= {f"{n} channels on": base.roll(n, 2) for n in (1, 2, 7, 8, 64)}
    for name, other in others.items():
        assert (base * other).mean().abs() < 4 / math.sqrt(base.numel()), name


def test_a_batch_in_two_halves_has_the_same_masks():
    whole = read_mask(make_mask(), 8, 2, 40)
    assert torch.equal(whole[:4], read_mask(make_mask(), 4, 2, 40))
    assert torch.equal(whole[4:], read_mask(make_mask(first=4), 4, 2, 40))
    assert torch.equal(whole[:, :1, :24], read_mask(make_mask(), 8, 1, 24))  # a part of the tokens and channels


@pytest.mark.parametrize("thinned", [True, False])
def test_add_norm_and_its_gradient(thinned):
    torch.manual_seed(0)
    mask, keep = make_mask(first=3), torch.tensor([0.0, 1.5]) if thinned else None
    z, branch, weight, bias, own = (
        torch.randn(*shape).double().requires_grad_() for shape in ((6, 40), (6, 40), (40,), (40,), (40,))
    )
    scale = read_mask(mask, 2, 3, 40).double().flatten(0, 1)
    assert 0 < (scale == 0).sum() < scale.numel()
    if keep is not None:
        scale = scale * keep.double().repeat_interleave(3)[:, None]
    total = z + (branch + own) * scale
    y = F.layer_norm(total, (40,), weight, bias, 1e-6)
    given = [each.detach().float() for each in (z, branch, weight, bias)]
    made = add_norm(*given, 1e-6, branch_bias=own.detach().float(), keep=keep, mask=mask, tokens=3)
    close(made.z, total)
    close(made.y, y)
    dy, dz = torch.randn(6, 40).double(), torch.randn(6, 40).double()
    exact = torch.autograd.grad([y, total], [z, branch, weight, bias, own], [dy, dz])
    found = norm_backward(
        dy.float(), dz.float(), made.z, given[2], 1e-6, keep=keep, mask=mask, tokens=3, walk=Walk(2, 0, 1, 2)
    )
    for value, expected in zip(found, exact, strict=True):
        close(value, expected)


def test_assemble_norm_drops_tokens():
    torch.manual_seed(0)
    table, patches, weight, bias = torch.randn(5, 32), torch.randn(2 * 3, 32), torch.randn(32), torch.randn(32)
    mask = make_mask(first=1)
    options = {"prefix": 2, "stream": torch.float32, "dtype": torch.float32, "mask": mask}
    made = assemble_norm(table, patches, weight, bias, 1e-6, **options)
    whole = table + torch.cat([torch.zeros(2, 2, 32), patches.view(2, 3, 32)], 1)
    close(made.z, (whole * read_mask(mask, 2, 5, 32)).view(10, 32))
    close(made.y, F.layer_norm(made.z, (32,), weight, bias, 1e-6))


@pytest.mark.parametrize("form", [1, 2])
def test_gelu_and_its_gradient(form):
    torch.manual_seed(0)
    mask = make_mask(first=2)
    before, dh = (3 * torch.randn(9, 300)).double().requires_grad_(), torch.randn(9, 300)
    exact = F.gelu(before, approximate={1: "tanh", 2: "none"}[form]) * read_mask(mask, 3, 3, 300).flatten(0, 1)
    close(activate_and_drop(before.detach().float(), form, mask, 3), exact, 3e-5)
    (gradient,) = torch.autograd.grad(exact, before, dh.double())
    total = gelu_backward(dh, before.detach().float(), form, Walk(2, 128, 1, 6), mask=mask, tokens=3)
    close(dh, gradient)
    close(total, gradient.sum(0))


class Fixed(nn.Module):
    """Multiplies by one mask after the other, in place of a dropout layer."""

    def __init__(self, *masks: Tensor | None) -> None:
        super().__init__()
        self.masks = list(masks)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks.pop(0)
        return x if mask is None else x * mask.double()


def fix_masks(model: nn.Module, masks: StepMasks, images: int, tokens: int) -> nn.Module:
    """Return a copy of a model in float64 with the masks of a step in place of dropout and stochastic depth."""
    exact, a = copy.deepcopy(model).double(), model.architecture

    def read(mask: DropoutMask | None, channels: int) -> Tensor | None:
        return None if mask is None else read_mask(mask, images, tokens, channels)

    def depth(drop: nn.Module, number: int, place: Place) -> Tensor | None:
        keep = masks.draw_depth(drop, number, place, images)
        return None if keep is None else keep[:, None, None]

    exact.dropout = Fixed(read(masks.mask_tokens(model.dropout), a.width))
    for number, (block, fixed) in enumerate(zip(model.encoder.blocks, exact.encoder.blocks, strict=True)):
        fixed.dropout = Fixed(read(masks.mask_in_block(block.dropout, number, Place.ATTENTION), a.width))
        fixed.mlp.dropout = Fixed(
            read(masks.mask_in_block(block.mlp.dropout, number, Place.HIDDEN), a.mlp_dim),
            read(masks.mask_in_block(block.mlp.dropout, number, Place.MLP), a.width),
        )
        fixed.drop = Fixed(depth(block.drop, number, Place.ATTENTION_DEPTH), depth(block.drop, number, Place.MLP_DEPTH))
    return exact


def build(**options) -> nn.Module:
    model = vitrail.create_model("Ti/4", **{**SMALL, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases, norms and heads begin at 0 or 1: stirred
            if parameter.ndim == 1 or "head" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model.train()


def slow(options):
    return pytest.param(options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.2, "stochastic_depth": 0.5, "layer_scale": 0.1},
        slow({"dropout": 0.2, "pool": "average", "layer_scale": 0.1}),
        slow({"dropout": 0.3, "pool": "distilled", "registers": 1, "gelu": "exact", "depth": 3}),
        slow({"layer_scale": 0.5, "stochastic_depth": 0.4, "depth": 3}),
        slow({"layer_scale": 0.0}),
    ],
    ids=str,
)
def test_gradients_of_a_model_with_the_same_masks(options):
    torch.manual_seed(0)
    model = build(**options)
    count = 4 if "depth" in options else 2
    images, labels = torch.randn(count, 3, 8, 8), torch.arange(count)
    fused = FusedTraining(model, dtype=torch.float32)
    fused.set_step(KEY, 10)
    exact = fix_masks(model, StepMasks(make_key(KEY, 10)), count, model.prefix + 4)
    expected = exact(images.double())
    F.cross_entropy(expected, labels).backward()
    found = fused(images)
    F.cross_entropy(found, labels).backward()
    most = 1e-4 if options.get("gelu") == "exact" else 1e-5  # the kernels fit the exact form
    assert relative_distance(found.detach(), expected.detach()) < most
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert relative_distance(parameter.grad, reference.grad) < most, name


@pytest.mark.slow
def test_a_batch_is_the_same_in_two_halves():
    """As on two ranks: a batch of 8 is computed as 2 × 4."""
    torch.manual_seed(0)
    model, images = build(dropout=0.2, stochastic_depth=0.5, patch_size=8), torch.randn(8, 3, 8, 8)
    fused = FusedTraining(model, dtype=torch.float32)

    def compute(part: slice) -> Tensor:
        fused.set_step(KEY, part.start)
        return fused(images[part])

    whole = compute(slice(0, 8))
    assert torch.allclose(whole, torch.cat([compute(slice(0, 4)), compute(slice(4, 8))]), atol=1e-6)


def test_without_a_step_the_generator_decides():
    model, images = build(dropout=0.2, depth=1), torch.randn(2, 3, 8, 8)
    fused, logits = FusedTraining(model, dtype=torch.float32), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        logits.append(fused(images).detach())
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-3)


def test_layers_in_evaluation_mode_drop_nothing():
    model, images = build(dropout=0.5, stochastic_depth=0.5), torch.randn(2, 3, 8, 8)
    for part in (model.dropout, model.encoder):
        part.eval()
    plain = copy.deepcopy(model).eval()(images)
    assert torch.allclose(FusedTraining(model, dtype=torch.float32)(images), plain, atol=1e-5)
