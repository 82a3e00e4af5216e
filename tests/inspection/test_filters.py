"""Principal components of the filters that embed an image, against scikit-learn's and against planted ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from torch import nn

from peers import timm
from samples import randomise, small_vit
from vitrail.errors import ConfigError, NotApplicableError
from vitrail.inspection.measure.filters import embedding_filters, measure_filters
from vitrail.model.architecture import Backbone, ResNetArchitecture, TimmArchitecture, VitArchitecture
from vitrail.model.create import build_empty_model
from vitrail.model.variants import BIT, HYBRID

STEM = [(8, 3, 2, "batch", "relu"), (16, 3, 2), (32, 3, 2)]


def hybrid(**options):
    """A ResNet of two units, then patches of 2 pixels of its feature map: 512 channels at an eighth of the image."""
    fields = {"image_size": 32, "patch_size": 2, "width": 32, "depth": 1, "mlp_dim": 32, "num_heads": 2, **options}
    backbone = Backbone(blocks=(1, 1), **HYBRID)
    return randomise(
        build_empty_model(VitArchitecture(backbone=backbone, num_classes=3, **fields)).to_empty(device="cpu")
    )


def bit(**options):
    backbone = Backbone(blocks=(1, 1), **BIT)
    model = build_empty_model(ResNetArchitecture(image_size=32, num_classes=3, backbone=backbone, **options))
    return randomise(model.to_empty(device="cpu"))


@torch.no_grad()
def network(name, *layers):
    """Of timm's, without values but for the layers named."""
    own = timm.models.get_pretrained_cfg(name)
    model = build_empty_model(TimmArchitecture(name=name, image_size=own.input_size[1:], num_classes=5)).eval()
    for layer in layers:
        part = model.peer.get_submodule(layer)
        randomise(part.to_empty(device="cpu"))
    return model


def as_rows(weight):
    """(D, C, height, width) → (D, height · width · C)."""
    return weight.detach().double().permute(0, 2, 3, 1).flatten(1).numpy()


def standardise_weight(weight, eps):
    """BiT's, in float64."""
    weight = weight.detach().double()
    mean, variance = weight.mean(dim=(1, 2, 3), keepdim=True), weight.var(dim=(1, 2, 3), keepdim=True, correction=0)
    return (weight - mean) / (variance + eps).sqrt()


def assert_same_up_to_sign(found, rows, shape, atol=1e-9):
    count = len(found.components)
    expected = PCA(svd_solver="full").fit(rows)
    components = found.components.reshape(count, -1)
    assert found.components.shape == (count, *shape)
    assert found.components.dtype == found.explained.dtype == np.float64
    signs = np.sign((components * expected.components_[:count]).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(components * signs, expected.components_[:count], rtol=0, atol=atol)
    np.testing.assert_allclose(found.explained, expected.explained_variance_ratio_[:count], rtol=0, atol=atol)
    np.testing.assert_array_equal(
        np.take_along_axis(components, abs(components).argmax(axis=1)[:, None], axis=1) > 0, True
    )


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_of_the_patch_projection(channels):
    model = small_vit(width=64, in_channels=channels)
    weight = model.patch_embed.projection.weight.unflatten(1, (channels, 8, 8))
    (found,) = measure_filters(model)
    assert found.of == "patch embedding"
    assert len(found.components) == 28
    assert_same_up_to_sign(found, as_rows(weight), (8, 8, channels))
    np.testing.assert_array_equal(embedding_filters(model), found.components)


def test_a_component_lies_as_the_convolution_sees_the_patch():
    """The answer of the projection to a component's picture is what the component says, pixel for pixel."""
    model = small_vit().double()
    component = torch.from_numpy(embedding_filters(model, 1)[0])
    picture = component.permute(2, 0, 1)[None]
    embed = model.patch_embed
    answers = (embed(picture) - embed.projection.bias)[0, 0]
    rows = as_rows(embed.projection.weight.unflatten(1, (3, 8, 8)))
    np.testing.assert_allclose(answers.detach().numpy(), rows @ component.flatten().numpy(), rtol=0, atol=1e-12)


def test_of_a_hybrid_its_projection_then_its_root():
    model = hybrid()
    projection, root = measure_filters(model)
    assert (projection.of, root.of) == ("patch projection of the feature map", "root convolution")
    weight = model.patch_embed.projection.weight.unflatten(1, (512, 2, 2))
    assert_same_up_to_sign(projection, as_rows(weight), (2, 2, 512))
    assert_same_up_to_sign(root, as_rows(model.backbone.root.standardise_weight()), (7, 7, 3))
    np.testing.assert_array_equal(embedding_filters(model), projection.components)


def test_of_a_convolutional_stem_its_first_convolution():
    model = small_vit(conv_stem=STEM)
    (found,) = measure_filters(model)
    assert found.of == "first convolution of the stem"
    assert len(found.components) == 7, "eight filters, centred"
    assert_same_up_to_sign(found, as_rows(model.patch_embed.layers[0][0].weight), (3, 3, 3))


def test_of_bit_its_root_as_it_is_applied():
    model = bit()
    (found,) = measure_filters(model)
    assert found.of == "root convolution"
    weight = model.backbone.root.weight
    rows = as_rows(standardise_weight(weight, BIT["standardise_eps"]))
    assert_same_up_to_sign(found, rows, (7, 7, 3), atol=1e-5)
    assert abs(PCA().fit(as_rows(weight)).explained_variance_ratio_[:28] - found.explained).max() > 1e-4, (
        "not as stored"
    )


@pytest.mark.parametrize(
    ("name", "layer", "of"),
    [
        ("test_vit4", "patch_embed.proj", "patch embedding"),
        ("test_convnext", "stem.0", "first convolution"),
        ("swin_tiny_patch4_window7_224", "patch_embed.proj", "patch embedding"),
        ("test_efficientnet", "conv_stem", "first convolution"),
    ],
)
def test_of_networks_of_timm(name, layer, of):
    model = network(name, layer)
    (found,) = measure_filters(model)
    weight = model.peer.get_submodule(layer).weight
    assert found.of == of
    assert len(found.components) == min(28, len(weight) - 1)
    assert_same_up_to_sign(found, as_rows(weight), (*weight.shape[2:], 3))


def test_of_a_hybrid_of_timm():
    model = network("vit_tiny_r_s16_p8_224", "patch_embed.proj", "patch_embed.backbone.conv")
    projection, first = measure_filters(model)
    assert (projection.of, first.of) == ("patch projection of the feature map", "first convolution")
    assert_same_up_to_sign(projection, as_rows(model.peer.patch_embed.proj.weight), (8, 8, 64))
    assert first.components.shape == (28, 7, 7, 3)


def test_timms_own_standardised_convolutions_are_shown_as_they_are_applied():
    model = network("nf_resnet26", "stem.conv")
    convolution = model.peer.get_submodule("stem.conv")
    (found,) = measure_filters(model)
    with torch.no_grad():  # the answers to single points are the filters, whatever happens on the way
        points = torch.zeros(3, 3, 15, 15)
        points[torch.arange(3), torch.arange(3), 7, 7] = 1
        stride, convolution.stride = convolution.stride, (1, 1)
        answers = (convolution(points) - convolution.bias[:, None, None])[:, :, 4:11, 4:11].flip(2, 3)
        convolution.stride = stride
    assert_same_up_to_sign(found, as_rows(answers.transpose(0, 1)), (7, 7, 3), atol=1e-4)
    assert abs(PCA().fit(as_rows(convolution.weight)).explained_variance_ratio_[:28] - found.explained).max() > 1e-3


def test_what_sees_the_image_first_may_be_no_convolution():
    with pytest.raises(NotApplicableError, match=r"naflexvit_base_patch16_gap .*no convolution"):
        measure_filters(network("naflexvit_base_patch16_gap"))


def test_planted_patterns_are_found_in_the_order_of_their_strength():
    """Filters that mix orthogonal pictures: the strongest picture is the first component, with its share."""
    model = small_vit(width=32, in_channels=1)
    generator = np.random.default_rng(0)
    pictures = np.linalg.qr(generator.standard_normal((64, 4)))[0].T
    mixing = np.concatenate([np.ones((32, 1)), generator.standard_normal((32, 4))], axis=1)
    mixing = np.linalg.qr(mixing)[0][:, 1:]  # columns sum to zero
    strengths = np.array([4.0, 3.0, 2.0, 1.0])
    constant = generator.standard_normal(64)  # what all filters share is no component
    planted = (mixing * strengths) @ pictures + constant
    with torch.no_grad():
        model.patch_embed.projection.weight.copy_(torch.from_numpy(planted))
    (found,) = measure_filters(model)
    assert len(found.components) == 4, "what float32 rounds off is no component"
    signs = np.sign(pictures[np.arange(4), abs(pictures).argmax(axis=1)])
    np.testing.assert_allclose(found.components.reshape(4, 64), pictures * signs[:, None], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.explained, strengths**2 / 30, rtol=0, atol=1e-6)


def test_of_equal_entries_the_first_is_positive():
    model = small_vit(width=8, in_channels=1)
    picture = torch.zeros(8, 8)
    picture[2, 3], picture[5, 1] = -1, 1
    with torch.no_grad():
        model.patch_embed.projection.weight.copy_(torch.linspace(-1, 1, 8)[:, None] * picture.flatten())
    (found,) = embedding_filters(model)
    np.testing.assert_allclose(found[..., 0], -picture.numpy() / np.sqrt(2), rtol=0, atol=1e-12)


def test_as_many_as_are_asked_for():
    model = small_vit(width=64)
    every = embedding_filters(model, 1_000)
    assert every.shape == (63, 8, 8, 3)
    np.testing.assert_array_equal(embedding_filters(model, 5), every[:5])
    flat = every.reshape(63, -1)
    np.testing.assert_allclose(flat @ flat.T, np.eye(63), rtol=0, atol=1e-12)
    with pytest.raises(ConfigError, match="components = 0"):
        embedding_filters(model, 0)


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_filters_that_are_all_alike_have_none(value):
    model = small_vit()
    nn.init.constant_(model.patch_embed.projection.weight, value)
    with pytest.raises(NotApplicableError, match="all alike"):
        embedding_filters(model)


@torch.no_grad()
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_filters_that_are_not_numbers_have_none(value):
    model = small_vit()
    model.patch_embed.projection.weight[3, 5] = value
    with pytest.raises(NotApplicableError, match=r"patch embedding .*NaN.*[^.]$"):
        measure_filters(model)
    model = bit()
    model.backbone.root.weight[3, 1, 2, 2] = value
    with pytest.raises(NotApplicableError, match=r"root convolution .*NaN"):
        embedding_filters(model)
    model = network("test_vit4", "patch_embed.proj")
    model.peer.patch_embed.proj.weight[3, 1, 2, 2] = value
    with pytest.raises(NotApplicableError, match=r"patch embedding .*NaN"):
        measure_filters(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_any_precision_and_compiled_and_without_a_trace(dtype):
    model = small_vit(dtype=dtype).train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = as_rows(model.patch_embed.projection.weight.unflatten(1, (3, 8, 8)))
    assert_same_up_to_sign(measure_filters(torch.compile(model, backend="eager"))[0], rows, (8, 8, 3))
    assert model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
