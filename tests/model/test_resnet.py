"""Weight-standardised ResNets against plain references."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import vitrail
from samples import images, randomise
from vitrail.model.architecture import Backbone
from vitrail.model.resnet import BitUnit, HybridUnit, ResNetBackbone, StdConv
from vitrail.model.variants import BIT, HYBRID

FORMS = {"hybrid": HYBRID, "bit": BIT}


def backbone(form: str, blocks=(1, 2)) -> Backbone:
    return Backbone(blocks=blocks, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_standardised_weight_against_loops(form):
    convolution = randomise(StdConv(3, 5, 3, 1, backbone(form)).double())
    applied = convolution.standardise_weight()
    for index, kernel in enumerate(convolution.weight.detach()):
        values = kernel.flatten().tolist()
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / len(values)
        scale = variance**0.5 + 1e-5 if form == "hybrid" else (variance + 1e-10) ** 0.5
        torch.testing.assert_close(applied[index], (kernel - mean) / scale, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 2), (1, 1)])
def test_hybrids_pad_as_tensorflow_does(kernel, stride):
    """SAME: output ⌈n / s⌉, and where the padding is odd the larger half is right and below."""
    n = 8
    convolution = randomise(StdConv(1, 1, kernel, stride, backbone("hybrid")).double())
    x = images(1, (n, n), 1, dtype=torch.float64)
    total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
    before = total // 2
    weight = convolution.standardise_weight()[0, 0]
    out = convolution(x)[0, 0]
    assert out.shape == (-(-n // stride),) * 2
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            expected = 0.0
            for a in range(kernel):
                for b in range(kernel):
                    r, c = i * stride + a - before, j * stride + b - before
                    if 0 <= r < n and 0 <= c < n:
                        expected += weight[a, b] * x[0, 0, r, c]
            torch.testing.assert_close(out[i, j], torch.as_tensor(expected), rtol=0, atol=1e-12)


def test_bit_pads_symmetrically():
    convolution = randomise(StdConv(2, 3, 3, 2, backbone("bit")))
    expected = F.conv2d(images(1, (9, 8), 2), convolution.standardise_weight(), stride=2, padding=1)
    assert torch.equal(convolution(images(1, (9, 8), 2)), expected)


@pytest.mark.parametrize(("in_channels", "stride"), [(256, 1), (128, 1), (256, 2)])
def test_units_against_their_formulas(in_channels, stride):
    x = images(2, (8, 8), in_channels, dtype=torch.float64)
    u = randomise(HybridUnit(in_channels, 64, stride, backbone("hybrid")).double())
    y = F.relu(u.norm1(u.conv1(x)))
    y = F.relu(u.norm2(u.conv2(y)))
    projected = u.shortcut[1](u.shortcut[0](x)) if len(u.shortcut) else x
    torch.testing.assert_close(u(x), F.relu(u.norm3(u.conv3(y)) + projected))
    assert bool(len(u.shortcut)) == (in_channels != 256 or stride != 1)

    v = randomise(BitUnit(in_channels, 64, stride, backbone("bit")).double())
    pre = F.relu(v.norm1(x))
    y = v.conv3(F.relu(v.norm3(v.conv2(F.relu(v.norm2(v.conv1(pre)))))))
    torch.testing.assert_close(v(x), y + (v.shortcut(pre) if v.shortcut is not None else x))
    assert (v.shortcut is not None) == (in_channels != 256 or stride != 1)


def test_root_pools_with_zeros_around_the_edge():
    """In BiT the first norm comes later, so a border of zeros can win over negative pixels; it was trained so."""
    net = randomise(ResNetBackbone(3, backbone("bit", blocks=(1,)))).double()
    net.units = torch.nn.ModuleList()
    x = images(1, (16, 16), dtype=torch.float64)
    root = net.root(x)
    expected = torch.full((4, 4), -torch.inf, dtype=torch.float64)
    for i in range(4):
        for j in range(4):
            for a in range(3):
                for b in range(3):
                    r, c = 2 * i + a - 1, 2 * j + b - 1
                    value = root[0, 0, r, c] if 0 <= r < 8 and 0 <= c < 8 else torch.tensor(0.0)
                    expected[i, j] = max(expected[i, j], value)
    torch.testing.assert_close(net(x)[0, 0], expected)


@pytest.mark.slow
def test_a_bit_resnet_has_the_same_seams():
    model = randomise(vitrail.create_model("BiT-R50x1", num_classes=5, image_size=64))
    batch = images(1, (64, 96))
    features = model.forward_features(batch)
    assert features.shape == (1, 2048, 2, 3)
    torch.testing.assert_close(model.embed(batch), features.mean(dim=(2, 3)))
    assert torch.equal(model.forward_head(features), model(batch))
    assert model(batch).shape == (1, 5)
    assert model(images(1, (33, 47))).shape == (1, 5)
    assert model.resize((96, 64)).preprocessing.image_size == (96, 64)
    assert model.replace_head(3).embed(batch).shape == (1, 2048)
    assert (model(batch) == 0).all()
    with pytest.raises(vitrail.InputError, match="at least 32×32"):
        model(images(1, (16, 64)))
    with pytest.raises(vitrail.InputError, match="must have shape"):
        model(images(1, (64, 64), channels=1))
