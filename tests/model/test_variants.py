"""Names and options: what they stand for, and what is said about wrong ones."""

from __future__ import annotations

import inspect
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest

import vitrail
from vitrail.model.architecture import BACKBONE_OPTIONS, VitArchitecture
from vitrail.model.variants import make_architecture

SMALL_ROOT = make_architecture("BiT-R26x1", root="small").backbone


@pytest.mark.parametrize(
    ("name", "blocks", "stride"),
    [
        ("R50+B/16", (3, 4, 9), 16),
        ("R50+L/32", (3, 4, 6, 3), 32),
        ("R26+S/32", (2, 2, 2, 2), 32),
        ("R26+S/16", (2, 2, 4), 16),
    ],
)
def test_both_forms_of_hybrid(name, blocks, stride):
    arch = make_architecture(name)
    assert (arch.backbone.blocks, arch.stride, arch.patch_size) == (blocks, stride, 1)
    assert make_architecture(name, patch_size=2, image_size=256).stride == 2 * stride


@pytest.mark.parametrize(("name", "stride"), [("R26+Ti/16", 4), ("R26+Ti/32", 8), ("BiT-R26x1", 8)])
def test_a_small_root_leaves_a_quarter_of_the_stride(name, stride):
    arch = make_architecture(name, root="small", image_size=32)
    assert getattr(arch, "stride", arch.backbone.stride) == stride
    assert arch.backbone.blocks == make_architecture(name).backbone.blocks
    assert make_architecture(name).backbone.stride == 4 * stride


def test_a_thin_resnet():
    arch = make_architecture("BiT-R14x2", stage_channels=32, blocks=[1, 3], root="small", image_size=32)
    backbone = arch.backbone
    assert (backbone.root_channels, backbone.out_channels, backbone.blocks, backbone.stride) == (64, 512, (1, 3), 2)
    assert make_architecture("BiT-R14x1").backbone.blocks == (1, 1, 1, 1)


def test_any_patch_size_and_the_papers_spelling():
    assert make_architecture("S/8").patch_size == 8
    assert make_architecture("ViT-L/16") == make_architecture("L/16")
    assert make_architecture("R50+ViT-B/16") == make_architecture("R50+B/16")
    assert make_architecture("B/7").grid((224, 224)) == (32, 32)


def test_the_b_of_figure_4_is_half_of_B():
    """All hidden sizes, so the heads stay as many and become half as wide. Letters differ by case."""
    small, base = make_architecture("b/16"), make_architecture("B/16")
    assert (small.depth, small.num_heads) == (base.depth, base.num_heads) == (12, 12)
    assert (2 * small.width, 2 * small.mlp_dim) == (base.width, base.mlp_dim)
    assert 2 * (small.width // small.num_heads) == base.width // base.num_heads
    assert make_architecture("ViT-b/16") == small
    assert make_architecture("R50+b/16").width == 384
    assert make_architecture("S/16", num_heads=12) == small


def test_sizes_can_be_overridden():
    arch = make_architecture("B/32", depth=8, width=1024, mlp_dim=2048, num_heads=16)
    assert (arch.depth, arch.width, arch.mlp_dim, arch.num_heads) == (8, 1024, 2048, 16)
    assert make_architecture("S/16", image_size=np.int64(96)).image_size == (96, 96)


def test_an_architecture_survives_json():
    for name, options in [
        ("S/16", {"conv_stem": [(24, 3, 4), (48, 3, 4, "none", "gelu")], "image_size": (96, 160)}),
        ("R50+B/16", {"pool": "average"}),
        ("BiT-R152x4", {}),
        ("BiT-R14x1", {"root": "small", "stage_channels": 32, "blocks": (1, 2)}),
    ]:
        arch = make_architecture(name, **options)
        assert type(arch).model_validate_json(arch.model_dump_json()) == arch


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("B/17x", {}, "did you mean 'B/16'"),
        ("b16", {}, r"did you mean 'b/16' or 'B/16'\?"),
        ("B16", {}, r"did you mean 'B/16'\?"),
        ("g14", {}, r"did you mean 'g/14' or 'G/14'\?"),
        ("resnet", {}, "unknown model 'resnet'"),
        ("R51+B/16", {}, "R51.*R26, R50, R101"),
        ("R50+B/14", {}, "must end in /16 or /32"),
        ("BiT-R99x1", {}, "unknown ResNet R99"),
        ("B/16", {"image_size": 225}, "225 .* 224 and 240"),
        ("B/16", {"image_size": (224, 230)}, "224 and 224×240"),
        ("R50+B/32", {"image_size": 240}, "224 and 256"),
        ("B/16", {"pool": "mean"}, "pool = 'mean': input should be 'class', 'average', 'attention'"),
        ("B/16", {"position": "rotary"}, "position = 'rotary': input should be 'none'"),
        ("B/16", {"num_heads": 7}, "num_heads 7"),
        ("B/16", {"num_classes": -1}, "num_classes = -1"),
        ("B/16", {"depth": "deep"}, "depth = 'deep'"),
        ("B/16", {"dropout": 1.5}, "dropout = 1.5"),
        ("B/16", {"class_token": False}, 'pool "class" reads the class token'),
        ("B/16", {"block": "axial"}, 'use pool "average" or "attention"'),
        ("B/16", {"conv_stem": [(24, 3, 2)]}, "conv_stem multiply to 2"),
        ("B/16", {"conv_stem": [(24, 2, 1), (24, 3, 16)]}, "an even kernel"),
        ("R50+B/16", {"conv_stem": [(24, 3, 2)]}, "choose one"),
        ("B/16", {"position": "relative", "position_at": "shared"}, "leave position_at alone"),
        ("BiT-R50x1", {"pool": "average"}, "unknown option 'pool'"),
        ("B/16", {"root": "small"}, "'B/16' has no ResNet, so it takes no root: .*R26\\+B/16"),
        ("B/16", {"root": "large"}, "it takes no root"),
        ("S/8", {"blocks": (1, 1), "stage_channels": 32}, "takes no stage_channels and no blocks"),
        ("BiT-R26x1", {"root": "tiny"}, "root = 'tiny': input should be 'large' or 'small'"),
        ("BiT-R26x1", {"stage_channels": 48}, "stage_channels = 48.* multiple of 32"),
        ("R26+S/16", {"stage_channels": 0}, "stage_channels = 0"),
        ("BiT-R26x1", {"blocks": ()}, "at least one stage"),
        ("BiT-R26x1", {"blocks": (1,) * 20}, "20 stages.* give fewer"),
        ("BiT-R26x1", {"root": "small", "backbone": SMALL_ROOT}, "put root into it"),
        ("BiT-R26x1", {"root": "small", "image_size": 7}, "image size 7 is below the least, 8"),
        ("R26+S/16", {"root": "small", "image_size": 30}, "patches of 4: .* 28 and 32"),
    ],
)
def test_wrong_names_and_options_get_one_clear_sentence(name, options, sentence):
    with pytest.raises(vitrail.ConfigError, match=sentence) as caught:
        vitrail.create_model(name, **options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, vitrail.VitrailError)
    assert isinstance(caught.value, ValueError)


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="imagesize"):
        vitrail.create_model("B/16", imagesize=224)
    with pytest.raises(vitrail.ConfigError, match="did you mean 'image_size'"):
        make_architecture("B/16", imagesize=224)


def test_the_signature_shows_every_option_with_the_default_of_the_architecture():
    parameters = inspect.signature(vitrail.create_model).parameters
    others = ["name", "seed", "head_bias", "device", "dtype"]
    assert {name for name in parameters if name not in others} == {*VitArchitecture.model_fields, *BACKBONE_OPTIONS}
    decided_elsewhere = {"backbone", "class_token"}  # by the name, and by `pool`
    for name, field in VitArchitecture.model_fields.items():
        expected = None if field.is_required() or name in decided_elsewhere else field.default
        assert parameters[name].default == (224 if name == "image_size" else expected), name
    assert all(parameters[name].default is None for name in BACKBONE_OPTIONS)  # the name decides
    assert vitrail.create_model("B/16", device="meta").architecture == make_architecture("B/16")


def test_the_signature_offers_the_words_that_the_architecture_knows():
    hints = get_type_hints(vitrail.create_model)
    for name, field in VitArchitecture.model_fields.items():
        if get_origin(field.annotation) is Literal:
            assert get_args(hints[name]) == get_args(field.annotation), name


def test_a_bad_resize_leaves_the_model_as_it_was():
    model = vitrail.create_model("Ti/16", depth=1)
    with pytest.raises(vitrail.ConfigError, match="224 and 240"):
        model.resize(225)
    assert (model.image_size, model.grid) == ((224, 224), (14, 14))


def test_a_missing_field_is_named():
    with pytest.raises(vitrail.ConfigError, match="patch_size is required"):
        VitArchitecture(width=8, depth=1, mlp_dim=8, num_heads=1)
