"""Dropout, layer scale and stochastic depth of fused training on a GPU, for kernel_check.py.

    python benchmarks/kernel_check.py --only dropouts random_models

Shapes are B/16's. Masks are read back and compared with the generator in int64; everything else uses the same masks.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitrail
from vitrail.fast.gpu.kernels.backward import gelu_backward, norm_backward
from vitrail.fast.gpu.kernels.dropout import DropoutMask, activate_and_drop, read_mask
from vitrail.fast.gpu.kernels.norm import add_norm, assemble_norm
from vitrail.fast.gpu.masks import Place, StepMasks, make_key
from vitrail.fast.gpu.training import FusedTraining
from vitrail.fast.timing import relative_distance as distance
from vitrail.model.cost import count_tokens

HALF, IMAGES, TOKENS, WIDTH = 6e-3, 16, 197, 768
"""How far bf16 may be off; B/16's sizes."""


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def dropouts() -> dict[str, tuple[float, float]]:
    """Dropout inside the kernels against masks that are read back, and those against the generator in int64."""
    found = {}
    mask = DropoutMask.from_rate(make_key(0xF123456789ABCDEF, 1000), 61, 0.1)
    assert mask is not None
    mask = mask._replace(key=mask.key.cuda())
    wide = read_mask(mask, IMAGES, TOKENS, 4 * WIDTH).flatten(0, 1)
    scale = wide[:, :WIDTH].contiguous()
    found["read_mask"] = distance(wide, compute_mask(mask, IMAGES, TOKENS, 4 * WIDTH).flatten(0, 1)), 0.0
    found["read_mask, share dropped"] = abs(float((wide == 0).double().mean()) - 0.1), 1e-3
    later = read_mask(mask._replace(key=mask.key + torch.tensor([0, 3], device="cuda")), 1, TOKENS, 4 * WIDTH)
    found["read_mask, from the fourth image on"] = distance(later[0], wide.unflatten(0, (IMAGES, TOKENS))[3]), 0.0

    z, branch, dy, dz = (random(IMAGES * TOKENS, WIDTH) for _ in range(4))
    weight, bias, own = (torch.randn(WIDTH, device="cuda") for _ in range(3))
    for name, keep in (("", None), (", thinned", torch.tensor([0.0, 2.0] * (IMAGES // 2), device="cuda"))):
        exact = [each.double().requires_grad_() for each in (z, branch, weight, bias, own)]
        factor = scale.double() if keep is None else scale.double() * keep.double().repeat_interleave(TOKENS)[:, None]
        total = exact[0] + (exact[1] + exact[4]) * factor
        y = F.layer_norm(total, (WIDTH,), exact[2], exact[3], 1e-6)
        gradients = torch.autograd.grad([y, total], exact, [dy.double(), dz.double()])
        options = {"keep": keep, "mask": mask, "tokens": TOKENS}
        made = add_norm(z.float(), branch, weight, bias, 1e-6, branch_bias=own, dtype=torch.bfloat16, **options)
        back = norm_backward(dy, dz, total.detach().float(), weight, 1e-6, **options)
        found[f"add_norm with dropout{name}, z"] = distance(made.z, total), 1e-5
        found[f"add_norm with dropout{name}"] = distance(made.y, y), HALF
        for part, value, expected in zip(back._fields, back, gradients, strict=True):
            found[f"norm_backward with dropout{name}, {part}"] = distance(value, expected), HALF
    few = add_norm(z[:TOKENS].float(), branch[:TOKENS], weight, bias, 1e-6, mask=mask, tokens=TOKENS).z
    found["add_norm with dropout, one image"] = distance(few, z[:TOKENS] + branch[:TOKENS] * scale[:TOKENS]), 1e-5

    table, patches = torch.randn(TOKENS, WIDTH, device="cuda"), random(IMAGES * (TOKENS - 1), WIDTH)
    whole = torch.cat([torch.zeros(IMAGES, 1, WIDTH, device="cuda"), patches.view(IMAGES, -1, WIDTH)], 1) + table
    made = assemble_norm(
        table, patches, weight, bias, 1e-6, prefix=1, stream=torch.float32, dtype=torch.bfloat16, mask=mask
    )
    found["assemble_norm with dropout"] = distance(made.z, whole.flatten(0, 1) * scale), 1e-5
    for form, approximate in ((1, "tanh"), (2, "none")):
        before, dh = random(IMAGES * TOKENS, 4 * WIDTH), random(IMAGES * TOKENS, 4 * WIDTH)
        exact_before = before.double().requires_grad_()
        hidden = F.gelu(exact_before, approximate=approximate) * wide
        (gradient,) = torch.autograd.grad(hidden, exact_before, dh.double())
        found[f"activate_and_drop {form}"] = distance(activate_and_drop(before, form, mask, TOKENS), hidden), HALF
        total = gelu_backward(dh, before, form, mask=mask, tokens=TOKENS)
        found[f"gelu_backward with dropout {form}"] = distance(dh, gradient), HALF
        found[f"gelu_backward with dropout {form}, sums"] = distance(total, gradient.sum(0)), HALF
    return found


def compute_mask(mask: DropoutMask, images: int, tokens: int, channels: int) -> Tensor:
    """Return what `read_mask` should: Philox4x32 with 7 rounds on (channel / 8, token, image, place), in int64."""
    most = 0xFFFFFFFF
    key, first = (int(each) for each in mask.key)
    low, high = key & most, key >> 32 & most
    shape = images, tokens, channels // 8
    a, b, c = (torch.arange(count, device="cuda") for count in reversed(shape))
    a, b = a.expand(shape), b[:, None].expand(shape)
    c, d = (c + first)[:, None, None].expand(shape), torch.full(shape, mask.place, device="cuda")
    for _ in range(7):
        first_high, first_low = multiply_words(0xD2511F53, a)
        second_high, second_low = multiply_words(0xCD9E8D57, c)
        a, b, c, d = second_high ^ b ^ low, second_low, first_high ^ d ^ high, first_low
        low, high = low + 0x9E3779B9 & most, high + 0xBB67AE85 & most
    words = torch.stack([a, b, c, d], -1)
    bits = torch.stack([words & 0xFFFF, words >> 16], -1).flatten(2)
    return (bits >= mask.dropped) * (65536 / (65536 - mask.dropped))


def multiply_words(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits of a product of 32-bit numbers, without leaving int64."""
    low, high = words * (factor & 0xFFFF), words * (factor >> 16)
    total = (low >> 16) + high
    return total >> 16, (total << 16 | low & 0xFFFF) & 0xFFFFFFFF


class FixedDropout(nn.Module):
    """Multiplies by one mask after the other, in place of a dropout layer."""

    def __init__(self, *masks: Tensor | None) -> None:
        super().__init__()
        self.masks, self.calls = masks, 0

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks[self.calls % len(self.masks)]
        self.calls += 1
        return x if mask is None else x * mask


def random_models() -> dict[str, tuple[float, float]]:
    """B/16 of four blocks with dropout, layer scale and stochastic depth: gradients with the same masks in float32."""
    found = {}
    images, labels = torch.randn(8, 3, 224, 224, device="cuda"), torch.arange(8, device="cuda")
    masks = StepMasks(make_key(5, 16).cuda())
    for name, options in {
        "dropout": {"dropout": 0.1},
        "layer scale and stochastic depth": {"layer_scale": 0.1, "stochastic_depth": 0.3},
        "everything, average pool": {"dropout": 0.1, "layer_scale": 0.1, "stochastic_depth": 0.3, "pool": "average"},
    }.items():
        model = vitrail.create_model("B/16", depth=4, seed=0, **options).cuda().train()
        torch.nn.init.normal_(model.head.weight, std=0.03)
        fixed = copy.deepcopy(model)
        fix_masks(model, fixed, masks, len(images))

        def gradients(logits: Tensor, model: nn.Module) -> Tensor:
            loss = F.cross_entropy(logits.float(), labels)
            return torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))])

        exact = gradients(fixed(images), fixed)
        with torch.autocast("cuda", torch.bfloat16):
            found[f"gradients with {name}, autocast"] = distance(gradients(fixed(images), fixed), exact), 3e-2
        for kind, fp8, most in (("fused", False, 3e-2), ("fused, FP8", True, 0.3)):
            fused = FusedTraining(model, fp8=fp8)
            fused.set_step(5, 16)
            found[f"gradients with {name}, {kind}"] = distance(gradients(fused(images), model), exact), most
    return found


def fix_masks(model: nn.Module, fixed: nn.Module, masks: StepMasks, images: int) -> None:
    """Put the masks that a fused model draws in place of the random layers of its copy `fixed`."""
    a = model.architecture

    def read(mask: DropoutMask | None, channels: int) -> Tensor | None:
        return None if mask is None else read_mask(mask, images, count_tokens(a), channels)

    def depth(drop: nn.Module, number: int, place: Place) -> Tensor | None:
        keep = masks.draw_depth(drop, number, place, images)
        return None if keep is None else keep[:, None, None]

    fixed.dropout = FixedDropout(read(masks.mask_tokens(model.dropout), a.width))
    for number, (block, copied) in enumerate(zip(model.encoder.blocks, fixed.encoder.blocks, strict=True)):
        copied.dropout = FixedDropout(read(masks.mask_in_block(block.dropout, number, Place.ATTENTION), a.width))
        copied.mlp.dropout = FixedDropout(
            read(masks.mask_in_block(block.mlp.dropout, number, Place.HIDDEN), a.mlp_dim),
            read(masks.mask_in_block(block.mlp.dropout, number, Place.MLP), a.width),
        )
        copied.drop = FixedDropout(
            depth(block.drop, number, Place.ATTENTION_DEPTH), depth(block.drop, number, Place.MLP_DEPTH)
        )
