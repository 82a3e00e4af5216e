"""What follows from a name of timm's, checked against the network that timm builds; and what tensors alone tell."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from timm_families import build_family, run_peer, write_folder

import vitrail
from peer_models import save_tensors
from peers import timm
from vitrail.errors import WeightsError
from vitrail.model.vit import VisionTransformer
from vitrail.weights.formats.timm_built import read_arguments
from vitrail.weights.formats.timm_names import FACTS, find_facts

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import timm_page

FEW = (
    *("vit_small_patch16_dinov3", "eva02_tiny_patch14_224", "eva02_base_patch16_clip_224", "beit_base_patch16_224"),
    *("vit_pe_core_tiny_patch16_384", "vit_pe_spatial_tiny_patch16_512", "vit_small_patch16_rope_mixed_ape_224"),
    *("vit_base_patch16_rpn_224", "vit_medium_patch16_rope_reg1_gap_256", "test_vit3", "vit_tiny_r_s16_p8_224"),
)
"""Names that are built in every test run; the others take a minute."""
REFUSED = {
    "vit_small_patch16_18x2_224": "side by side",
    "vit_pwee_patch16_reg1_gap_256": "side by side",
    "vit_dwee_patch16_reg1_gap_256": "differential",
    "vit_base_mci_224": "MobileCLIP",
    "vit_base_resnet26d_224": "batch norm",
}


def describe_twice(name):
    """Return the architecture by the name in a config.json, and by what the built network says of itself."""
    network = timm_page.build_network(name)
    config = timm_page.make_config(name, network)
    by_name = timm_page.describe_network(network, config)
    return by_name, timm_page.describe_network(network, {**config, "model_args": read_arguments(network)})


@pytest.mark.parametrize("name", FEW)
def test_a_name_says_what_the_network_says(name):
    by_name, by_network = describe_twice(name)
    assert by_name == by_network


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_name_says_what_the_network_says():
    different = []
    for file in timm_page.FILES:
        for name in timm_page.list_names(file):
            try:
                by_name, by_network = describe_twice(name)
            except WeightsError:
                continue
            if by_name != by_network:
                different.append(name)
    assert not different


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name):
    assert REFUSED[name] in timm_page.explain_name(name)


def test_keys_shared_by_heads_and_gates_are_refused():
    small = {"embed_dim": 64, "depth": 2, "num_heads": 4, "num_kv_heads": (4, 2), "img_size": 64}
    network = timm.create_model("vit_base_patch16_sapiens2", **small)
    with pytest.raises(WeightsError, match="grouped-query"):
        timm_page.describe_network(network, timm_page.make_config("vit_base_patch16_sapiens2", network))


def test_the_table_of_names_lists_timms():
    page = timm_page.PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    assert listed == [name for file in timm_page.FILES for name in timm_page.list_names(file)], "run tools/timm_page.py"
    assert f"**{page.count('| yes |')} of {len(listed)} names load**" in page
    for name in REFUSED:
        assert f"| `{name}` | no: {timm_page.explain_name(name)} |" in page


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_of_names_is_up_to_date():
    page = timm_page.PAGE.read_text(encoding="utf-8")
    assert timm_page.write_page(page) == page, "run python tools/timm_page.py"


def test_every_fact_belongs_to_a_name():
    names = [name for file in timm_page.FILES for name in timm_page.list_names(file)]
    assert [part for part in FACTS if not any(part in name for name in names)] == []


def test_perception_encoders_coordinates_are_those_of_its_name():
    assert find_facts("vit_pe_core_large_patch14_336")["ref_feat_shape"] == (24, 24)
    assert find_facts("vit_pe_core_base_patch16_224")["ref_feat_shape"] == (14, 14)


@pytest.mark.parametrize(
    "family",
    [
        *("DINOv3", "DINOv3 with biases", "DINOv3 H+, SwiGLU", "EVA-02, packed SwiGLU", "BEiT", "BEiT-3"),
        *("EVA-02, separate layers and a norm", "RoPE", "RoPE, learned", "RoPE with registers", "AIMv2"),
        *("DINOv2 giant, packed SwiGLU", "InternViT, no last norm"),
        *("Perception Encoder, lang", "Perception Encoder, spatial"),
    ],
)
def test_tensors_alone_tell_the_family(family, tmp_path):
    """What a file of these families cannot be but that: only the number of heads, of small models, must be said."""
    theirs = build_family(family)
    path = save_tensors(theirs, tmp_path / "model.safetensors")
    size = theirs.patch_embed.img_size
    ours = vitrail.load(path, num_heads=4, image_size=size)
    by_class = theirs.global_pool == "token" or family.startswith("BEiT with")
    assert ours.architecture.pool == ("class" if by_class else "average")
    expected = vitrail.load(write_folder(family, theirs, tmp_path / "folder")).architecture
    by_tensors, by_name = ours.architecture.rotary, expected.rotary
    if family.startswith("Perception"):  # its reference grid is the table's; a small model has not that of the name
        by_tensors, by_name = (rotary.model_copy(update={"reference_grid": None}) for rotary in (by_tensors, by_name))
    assert by_tensors == by_name
    assert ours.architecture.norm_eps == expected.norm_eps


def test_what_deit_iii_and_rope_ape_share_is_noted(tmp_path):
    """The tensors cannot tell them apart; a config with the name can."""
    theirs = build_family("RoPE with a table")
    path = save_tensors(theirs, tmp_path / "model.safetensors")
    (note,) = [note for note in vitrail.load(path, num_heads=4).origin.notes if "RoPE-APE" in note]
    assert note.startswith("DeiT III assumed")
    name = re.search(r'\{"architecture": "(\w+)"\}', note)[1]
    assert find_facts(name)["use_rot_pos_emb"]
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    ours = vitrail.load(path, num_heads=4)
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours.embed(images), run_peer("RoPE with a table", theirs, images)[0])
    assert not any("RoPE-APE" in note for note in ours.origin.notes)


@pytest.mark.parametrize("family", ["ViT", "EVA", "BEiT-3", "DINOv2", "RoPE, learned, with a table", "EVA of CLIP"])
def test_other_families_are_not_taken_for_deit_iii(family, tmp_path):
    ours = vitrail.load(save_tensors(build_family(family), tmp_path / "model.safetensors"), num_heads=4)
    assert not any("DeiT III" in note for note in ours.origin.notes)


@pytest.mark.parametrize(
    "family", ["DINOv3 H+, SwiGLU", "EVA-02 E, norms behind the layers", "Perception Encoder", "BEiT", "RoPE, learned"]
)
def test_timm_may_load_it_for_us(family, monkeypatch):
    """`timm:name` reads what the tensors do not show from the network that timm has built."""
    theirs = build_family(family)
    name = theirs.pretrained_cfg["architecture"]
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: theirs)
    ours = vitrail.load(f"timm:{name}")
    assert isinstance(ours, VisionTransformer)
    images = torch.randn(2, 3, *theirs.patch_embed.img_size, dtype=torch.float64)
    _, expected = run_peer(family, theirs, images)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["Perception Encoder, lang", "Perception Encoder, spatial"])
def test_the_name_of_a_perception_encoder_says_its_pooling(family, tmp_path):
    """As in a config.json without `global_pool`: timm's own default is the average."""
    theirs = build_family(family)
    folder = write_folder(family, theirs, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("global_pool", None)
    (folder / "config.json").write_text(json.dumps(config))
    assert theirs.global_pool == "avg"
    assert vitrail.load(folder).architecture.pool == "average"


def test_perception_encoder_is_known_by_its_tensors(tmp_path):
    theirs = build_family("Perception Encoder")
    ours = vitrail.load(save_tensors(theirs, tmp_path / "model.safetensors"), num_heads=2)
    a = ours.architecture
    assert (a.rotary.first, a.rotary.offset, a.rotary.reference_grid) == ("column", 1.0, (6, 6))
    assert (a.pool, a.pool_heads, a.pool_prefix, a.norm_eps) == ("attention", 8, True, 1e-5)


def test_older_files_hold_tables_that_are_computed(tmp_path):
    state = build_family("BEiT").state_dict()
    state["blocks.0.attn.relative_position_index"] = torch.zeros(37, 37, dtype=torch.long)
    torch.save(state, tmp_path / "beit.pth")
    ours = vitrail.load(tmp_path / "beit.pth")
    assert ours.architecture.num_heads == 4
    assert any("relative_position_index" in note for note in ours.origin.notes)


def test_a_table_and_relative_positions_are_refused(tmp_path):
    model = timm.create_model("beit_base_patch16_224", embed_dim=64, depth=1, num_heads=4, use_abs_pos_emb=True)
    with pytest.raises(WeightsError, match="one of the two"):
        vitrail.load(save_tensors(model, tmp_path / "model.safetensors"))


@torch.no_grad()
def build_timm_hybrid(blocks, channels):
    """Build timm's hybrid with a ResNet that none of its names has: `channels` in the root and in the first stage."""
    convolution = functools.partial(timm.layers.StdConv2dSame, eps=1e-8)
    options = {"stem_type": "same", "preact": False, "conv_layer": convolution}
    stages = tuple(4 * channels * 2**stage for stage in range(len(blocks)))
    if blocks:
        options |= {"channels": stages, "stem_chs": channels, "num_classes": 0, "global_pool": ""}
        backbone = timm.models.resnetv2.ResNetV2(list(blocks), output_stride=4 * 2 ** (len(blocks) - 1), **options)
    else:
        backbone = timm.models.resnetv2.create_resnetv2_stem(3, channels, **options)
    network = timm.models.VisionTransformer(
        img_size=128,
        patch_size=1,
        embed_dim=32,
        depth=1,
        num_heads=2,
        num_classes=3,
        embed_layer=functools.partial(timm.layers.HybridEmbed, backbone=backbone),
    )
    for name, parameter in network.named_parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2
        parameter.copy_(1 + noise if parameter.ndim == 1 and not name.endswith("bias") else noise)
    return network.double().eval()


@pytest.mark.parametrize(
    ("blocks", "stage_channels"),
    [((), 64), ((1,), 32), ((2, 1), 96), pytest.param((1, 1, 1, 1, 1), 64, marks=pytest.mark.slow)],
    ids=str,
)
def test_hybrids_of_any_stages_and_channels(blocks, stage_channels, tmp_path):
    theirs = build_timm_hybrid(blocks, stage_channels)
    loaded = vitrail.load(save_tensors(theirs, tmp_path / "model.safetensors"), num_heads=2)
    backbone = loaded.architecture.backbone
    assert (backbone.blocks, backbone.stage_channels) == (blocks, stage_channels)
    assert loaded.image_size == (128, 128)
    images = torch.randn(1, 3, 128, 128, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 1e-3
        torch.testing.assert_close(loaded(images), expected, rtol=1e-10, atol=1e-10)
