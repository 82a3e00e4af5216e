"""The model against the paper's equations, written out as loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reference_vit import ReferenceViT
from samples import images, small_vit

TOLERANCE = 1e-10
POSITIONS = [
    ("none", "input"),
    ("learned-1d", "input"),
    ("learned-1d", "every-layer"),
    ("learned-1d", "shared"),
    ("learned-2d", "input"),
    ("learned-2d", "every-layer"),
    ("learned-2d", "shared"),
    ("relative", "input"),
    ("sin-cos", "input"),
    ("sin-cos", "every-layer"),
    ("sin-cos", "shared"),
]


@pytest.mark.parametrize(("position", "position_at"), POSITIONS)
def test_equations_1_to_4(position, position_at):
    model = small_vit(position=position, position_at=position_at, depth=3, dtype=torch.float64)
    reference = ReferenceViT(model)
    batch = images(dtype=torch.float64)
    encoded, logits = model.forward_features(batch), model(batch)
    for index, image in enumerate(batch.numpy()):
        np.testing.assert_allclose(encoded[index].detach().numpy(), reference.encode(image), rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(logits[index].detach().numpy(), reference.logits(image), rtol=0, atol=TOLERANCE)
    assert logits.std() > 0.1


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_both_forms_of_gelu(gelu):
    model = small_vit(gelu=gelu, dtype=torch.float64)
    image = images(dtype=torch.float64)[:1]
    expected = ReferenceViT(model).y(image[0].numpy())
    np.testing.assert_allclose(model.embed(image)[0].detach().numpy(), expected, rtol=0, atol=TOLERANCE)


def test_the_reference_notices_a_wrong_parameter():
    """A reference that agreed with anything would prove nothing."""
    model = small_vit(dtype=torch.float64)
    reference = ReferenceViT(model)
    image = images(dtype=torch.float64)[:1]
    with torch.no_grad():
        model.encoder.blocks[1].attention.qkv.weight[0, 0] += 1e-3
    assert np.abs(model.embed(image)[0].detach().numpy() - reference.y(image[0].numpy())).max() > 100 * TOLERANCE
