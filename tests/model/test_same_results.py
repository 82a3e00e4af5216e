"""An image's outputs depend neither on the other images of its batch nor, up to rounding, on the number format."""

from __future__ import annotations

import pytest
import torch

from encoders import ENCODERS, small_encoder, small_hybrid
from samples import images, mark_slow
from vitrail.system.precision import choose_precision

BATCH_TOLERANCE = 1e-5
"""In float32, in units of the largest output; products of other shapes add up in another order."""
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2}
"""Against float64, in units of the largest output: two layers round some twenty times to 24 and to 8 bits."""
KINDS = mark_slow([*ENCODERS, "hybrid"], {"dinov3", "aimv2"})


def make_model(kind: str) -> torch.nn.Module:
    return small_hybrid() if kind == "hybrid" else small_encoder(kind)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_size(kind):
    model, pixels = make_model(kind), images(9, (16, 24))
    whole = model(pixels)
    scale = whole.abs().max()
    for size in (1, 2, 4, 8):
        parts = torch.cat([model(part) for part in pixels.split(size)])
        assert (parts - whole).abs().max() <= BATCH_TOLERANCE * scale
    order = torch.tensor([8, 3, 5, 0, 7, 1, 6, 2, 4])
    assert (model(pixels[order]) - whole[order]).abs().max() <= BATCH_TOLERANCE * scale


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_number_formats(kind, dtype):
    exact = make_model(kind).double()(images(4, (16, 24), dtype=torch.float64))
    model, pixels = make_model(kind), images(4, (16, 24))
    if dtype == torch.bfloat16:
        choose_precision("bf16", torch.device("cpu"))  # which prevents a crash on some processors
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        outputs = model(pixels)
    difference = (outputs.double() - exact).abs().max() / exact.abs().max()
    assert 0 < difference <= TOLERANCES[dtype], float(difference)
