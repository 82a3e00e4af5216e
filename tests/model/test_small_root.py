"""ResNets for small images: a 3×3 root without stride, thin stages; everything that depends on the backbone."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import vitrail
from samples import images, randomise
from vitrail.inspection.measure.filters import measure_filters
from vitrail.model.resnet import StdConv
from vitrail.weights.formats.native import CHECKSUM_FILE, format_checksums

THIN = {"root": "small", "stage_channels": 32, "num_classes": 5}
BIT_OPTIONS = ("BiT-R14x1", {**THIN, "blocks": (1, 2), "image_size": 32})
HYBRID_OPTIONS = (
    "R26+Ti/16",
    {**THIN, "blocks": (1, 2), "image_size": 32, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 48},
)


def make(case: tuple[str, dict]):
    name, options = case
    return randomise(vitrail.create_model(name, **options))


def convolve(x: Tensor, weight: Tensor, stride: int, form: str) -> Tensor:
    """A weight-standardised convolution, from its formula; SAME pads a side of even length right and below."""
    centred = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
    variance = centred.square().mean(dim=(1, 2, 3), keepdim=True)
    scale = variance.sqrt() + 1e-5 if form == "hybrid" else (variance + 1e-10).sqrt()
    around = weight.shape[-1] // 2
    before = 0 if form == "hybrid" and stride == 2 else around
    return F.conv2d(F.pad(x, (before, around, before, around)), centred / scale, stride=stride)


def normalise(x: Tensor, state: dict[str, Tensor], name: str, form: str) -> Tensor:
    """GroupNorm in 32 groups, from its formula."""
    groups = x.reshape(len(x), 32, -1)
    variance = groups.var(dim=2, correction=0, keepdim=True)
    groups = (groups - groups.mean(dim=2, keepdim=True)) / (variance + (1e-6 if form == "hybrid" else 1e-5)).sqrt()
    weight, bias = (state[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
    return groups.reshape(x.shape) * weight + bias


def compute_features(state: dict[str, Tensor], x: Tensor, blocks: tuple[int, ...], form: str) -> Tensor:
    """The whole backbone with a small root, written out from plain functions."""
    x = convolve(x, state["backbone.root.weight"], 1, form)
    if form == "hybrid":
        x = F.relu(normalise(x, state, "backbone.root_norm", form))
    strides = [2 if stage and not unit else 1 for stage, units in enumerate(blocks) for unit in range(units)]
    for index, stride in enumerate(strides):
        unit = f"backbone.units.{index}"
        first, second, third = (state[f"{unit}.conv{part}.weight"] for part in (1, 2, 3))
        if form == "hybrid":
            y = F.relu(normalise(convolve(x, first, 1, form), state, f"{unit}.norm1", form))
            y = F.relu(normalise(convolve(y, second, stride, form), state, f"{unit}.norm2", form))
            y = normalise(convolve(y, third, 1, form), state, f"{unit}.norm3", form)
            if f"{unit}.shortcut.0.weight" in state:
                projected = convolve(x, state[f"{unit}.shortcut.0.weight"], stride, form)
                x = normalise(projected, state, f"{unit}.shortcut.1", form)
            x = F.relu(y + x)
        else:
            z = F.relu(normalise(x, state, f"{unit}.norm1", form))
            y = F.relu(normalise(convolve(z, first, 1, form), state, f"{unit}.norm2", form))
            y = F.relu(normalise(convolve(y, second, stride, form), state, f"{unit}.norm3", form))
            if f"{unit}.shortcut.weight" in state:
                x = convolve(z, state[f"{unit}.shortcut.weight"], stride, form)
            x = convolve(y, third, 1, form) + x
    return x


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@torch.no_grad()
def test_forward_against_plain_functions(size):
    """At 32×32 and at a size that is not square; BiT also where halves are rounded."""
    for case, form in ((BIT_OPTIONS, "bit"), (HYBRID_OPTIONS, "hybrid")):
        model = make(case).double()
        x = images(2, size, dtype=torch.float64)
        expected = compute_features(model.state_dict(), x, (1, 2), form)
        assert expected.shape == (2, 256, size[0] // 2, size[1] // 2)
        torch.testing.assert_close(model.backbone(x), expected, rtol=0, atol=1e-10)
        if form == "hybrid":
            projection = model.patch_embed.projection
            tokens = expected.flatten(2).transpose(1, 2) @ projection.weight.T + projection.bias
            torch.testing.assert_close(model.tokens(x), tokens, rtol=0, atol=1e-10)
        else:
            y = F.relu(normalise(expected, model.state_dict(), "norm", form)).mean(dim=(2, 3))
            torch.testing.assert_close(model(x), y @ model.head.weight.T + model.head.bias, rtol=0, atol=1e-10)
            odd = images(1, (33, 47), dtype=torch.float64)
            expected = compute_features(model.state_dict(), odd, (1, 2), form)
            assert expected.shape[2:] == (17, 24)
            torch.testing.assert_close(model.backbone(odd), expected, rtol=0, atol=1e-10)


def test_shapes_of_the_two_calls_of_the_documentation():
    model = vitrail.create_model("BiT-R26x1", root="small", image_size=32, num_classes=10, device="meta").eval()
    assert model.forward_features(images(1, (32, 32)).to("meta")).shape == (1, 2048, 4, 4)
    assert model(images(1, (8, 9)).to("meta")).shape == (1, 10)
    with pytest.raises(vitrail.InputError, match="at least 8×8"):
        model(images(1, (7, 32)).to("meta"))
    hybrid = vitrail.create_model("R26+Ti/16", root="small", image_size=32, depth=4, device="meta").eval()
    assert (hybrid.stride, hybrid.grid, len(hybrid.encoder.blocks)) == (4, (8, 8), 4)
    assert hybrid(images(1, (32, 32)).to("meta")).shape == (1, 1000)


def test_fresh_weights():
    """LeCun normal on a fan of 27; a hybrid's residual units begin as the identity."""
    name, options = HYBRID_OPTIONS
    model = vitrail.create_model(name, **{**options, "stage_channels": 1024, "blocks": (1,)}, seed=0)
    root = model.backbone.root
    assert isinstance(root, StdConv)
    assert root.weight.shape == (1024, 3, 3, 3)
    assert root.weight.std().item() == pytest.approx(27**-0.5, rel=0.02)
    assert not model.backbone.units[0].norm3.weight.any()


@pytest.mark.parametrize("case", [BIT_OPTIONS, HYBRID_OPTIONS])
@torch.no_grad()
def test_saved_and_loaded(case, tmp_path):
    model, batch = make(case), images(2, (32, 32))
    folder = vitrail.save(model, tmp_path / "model")
    loaded = vitrail.load(folder)
    assert loaded.architecture == model.architecture
    assert torch.equal(loaded(batch), model(batch))
    card = (folder / "README.md").read_text()
    assert "a small root" in card
    assert "32 channels" in card


@pytest.mark.parametrize("name", ["BiT-R14x1", "R14+Ti/32"])
def test_a_file_from_before_these_fields_has_a_large_root(name, tmp_path):
    options = {"depth": 1, "width": 32, "num_heads": 2, "mlp_dim": 32} if "+" in name else {}
    model = randomise(vitrail.create_model(name, image_size=32, num_classes=2, blocks=(1, 1), **options))
    folder = vitrail.save(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for field in ("root", "stage_channels"):
        config["architecture"]["backbone"].pop(field, None)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / CHECKSUM_FILE).write_text(format_checksums(folder))
    loaded = vitrail.load(folder)
    assert loaded.architecture == model.architecture
    assert (loaded.architecture.backbone.root, loaded.architecture.backbone.stage_channels) == ("large", 64)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"root": "small"}, "large root"), ({"stage_channels": 32}, "64 channels"), (THIN, "large root")],
)
@pytest.mark.parametrize("to", ["timm", "google"])
def test_formats_without_such_a_resnet_refuse_it(to, options, words, tmp_path):
    """All of its tensors have names there, so nothing else would stop them."""
    plain = {"width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 48, "pool": "class"}
    for name, more in (("BiT-R14x1", {}), ("R26+Ti/32", plain)):
        model = vitrail.create_model(name, **{"image_size": 32, "blocks": (1, 1), **options, **more, "num_classes": 2})
        source = vitrail.save(model, tmp_path / name.replace("/", ""))
        with pytest.raises(vitrail.WeightsError, match=f"cannot be written as {to}: .*{words}"):
            vitrail.convert(source, tmp_path / "target", to)
        assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("case", [BIT_OPTIONS, HYBRID_OPTIONS])
@torch.no_grad()
def test_filters_of_the_root(case):
    """Three by three pixels of three colours, standardised: each is 27 numbers whose mean is 0, so 26 directions."""
    model = make(case)
    root = measure_filters(model)[-1]
    assert root.components.shape == (26, 3, 3, 3)


@pytest.mark.parametrize("case", [BIT_OPTIONS, HYBRID_OPTIONS])
@torch.no_grad()
def test_gradient_checkpointing_and_resizing(case):
    model = make(case)
    batch = images(2, (32, 32))
    expected = model(batch)
    model.set_gradient_checkpointing()
    torch.testing.assert_close(model.train()(batch), expected)
    assert model.resize(48).image_size == (48, 48)
    assert model.eval()(images(1, (48, 48))).shape == (1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("case", [BIT_OPTIONS, HYBRID_OPTIONS])
@torch.no_grad()
def test_compiled(case):
    model, batch = make(case), images(2, (32, 32))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(batch), model(batch), rtol=1e-4, atol=1e-4)
