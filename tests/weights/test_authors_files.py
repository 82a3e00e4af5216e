"""The authors' own files: the same numbers as transformers' models under the names that the authors use."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers_models import ALL_SIZES, SMALL, Case, build, run

import vitrail
from peer_models import images_for
from peers import transformers as t
from vitrail.weights.load import FORMATS
from vitrail.weights.save import save, write_model

Tensors = dict[str, Tensor]


def joined(state: Tensors, pattern: str, target: str) -> None:
    """Replace q, k and v by one tensor; keys without a bias get one of zeros."""
    for name in [name for name in state if re.fullmatch(pattern.format("q", "(weight|bias)"), name)]:
        kind, layer = name.rpartition(".")[2], re.search(r"\d+", name).group()
        parts = [state.pop(re.sub(r"(?<=[._])q(?=_proj)", part, name), None) for part in "qkv"]
        filler = torch.zeros_like(parts[0])
        state[target.format(layer, kind)] = torch.cat([filler if part is None else part for part in parts])


def renamed(state: Tensors, *swaps: tuple[str, str]) -> Tensors:
    def rename(name: str) -> str:
        for pattern, words in swaps:
            name = re.sub(pattern, words, name)
        return name

    return {rename(name): tensor for name, tensor in state.items()}


def clip(gelu: str) -> tuple[Any, Tensors]:
    config = t.CLIPVisionConfig(**{**SMALL, "num_attention_heads": 1}, hidden_act=gelu, projection_dim=24)
    model = build(Case(lambda: t.CLIPVisionModelWithProjection(config)))
    state = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    joined(state, r"encoder\.layers\.\d+\.self_attn\.{}_proj\.{}", "transformer.resblocks.{}.attn.in_proj_{}")
    state = renamed(
        state,
        (r"encoder\.layers\.", "transformer.resblocks."),
        ("self_attn", "attn"),
        ("layer_norm", "ln_"),
        (r"mlp\.fc1", "mlp.c_fc"),
        (r"mlp\.fc2", "mlp.c_proj"),
        ("embeddings.class_embedding", "class_embedding"),
        ("embeddings.patch_embedding", "conv1"),
        ("embeddings.position_embedding.weight", "positional_embedding"),
        ("pre_layrnorm", "ln_pre"),
        ("post_layernorm", "ln_post"),
    )
    state["proj"] = state.pop("visual_projection.weight").T.contiguous()
    text = {"transformer.resblocks.0.attn.in_proj_weight": torch.zeros(6, 2), "logit_scale": torch.zeros(())}
    return model, {**{f"visual.{name}": tensor for name, tensor in state.items()}, **text}


@pytest.mark.parametrize("gelu", ["quick_gelu", "gelu"])
@torch.no_grad()
def test_openai_and_openclip(gelu, tmp_path):
    model, state = clip(gelu)
    if gelu == "quick_gelu":
        state["input_resolution"] = torch.tensor(48)
    torch.save(state, tmp_path / "clip.pt")
    loaded = vitrail.load(tmp_path / "clip.pt")
    assert loaded.origin.format == "openclip"
    assert loaded.architecture.position_resize == "bicubic-antialias"  # open_clip's way; transformers' is plain
    known = vitrail.load(tmp_path / "clip.pt", known={"position_resize": "bicubic"})
    for size in ALL_SIZES:
        images = images_for(size).double()
        theirs = run(model, Case(None, tower="vision_model"), images)
        assert theirs.pooler_output.std() > 0.1
        torch.testing.assert_close(known.forward_features(images), theirs.last_hidden_state, rtol=0, atol=1e-10)
        torch.testing.assert_close(known(images), theirs.pooler_output, rtol=0, atol=1e-10)
    assert loaded.preprocessing.mean == (0.48145466, 0.4578275, 0.40821073)
    assert list(loaded.unused_tensors) == ["visual.proj"]

    write_model(vitrail.load(save(loaded, tmp_path / "native")), FORMATS["openclip"], tmp_path / "back")
    back = torch.load(tmp_path / "back" / "model.pth", weights_only=True)
    assert back.keys() == {name for name in state if name.startswith("visual.")}
    assert all(torch.equal(state[name], tensor) for name, tensor in back.items())
    assert vitrail.load(tmp_path / "back").architecture == loaded.architecture


def test_the_config_of_openclip_says_heads_gelu_and_statistics(tmp_path):
    _, state = clip("quick_gelu")
    torch.save(state, tmp_path / "open_clip_pytorch_model.bin")
    config = {
        "model_cfg": {"quick_gelu": True, "vision_cfg": {"head_width": 16}},
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    loaded = vitrail.load(tmp_path)
    assert (loaded.architecture.num_heads, loaded.architecture.gelu) == (4, "quick")
    assert loaded.preprocessing.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("name", ["visual.attn_pool.query", "visual.class_embedding"])
def test_towers_with_the_same_names_and_other_layers_are_refused(name, tmp_path):
    _, state = clip("gelu")
    state = {**state, name: torch.zeros(3)} if "pool" in name else {k: v for k, v in state.items() if k != name}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(vitrail.WeightsError, match="timm"):
        vitrail.load(tmp_path / "other.pt")


def make_periods(base: float) -> Tensor:
    """As Meta's code computes them for heads of 64 channels."""
    return base ** (2 * torch.arange(16) / 32)


def dinov3(gated: bool, base: float = 100.0) -> tuple[Case, Any, Tensors]:
    act = {"use_gated_mlp": True, "hidden_act": "silu"} if gated else {}
    config = t.DINOv3ViTConfig(**{**SMALL, "num_attention_heads": 1}, num_register_tokens=4, rope_theta=base, **act)
    case = Case(lambda: t.DINOv3ViTModel(config), kind="plain")
    model = build(case)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    joined(state, r"layer\.\d+\.attention\.{}_proj\.{}", "blocks.{}.attn.qkv.{}")
    state = renamed(
        state,
        (r"^layer\.", "blocks."),
        (r"attention\.o_proj", "attn.proj"),
        (r"layer_scale(\d)\.lambda1", r"ls\1.gamma"),
        *([("gate_proj", "w1"), ("up_proj", "w2"), ("down_proj", "w3")] if gated else []),
        *([] if gated else [("up_proj", "fc1"), ("down_proj", "fc2")]),
        (r"embeddings\.patch_embeddings", "patch_embed.proj"),
        (r"embeddings\.register_tokens", "storage_tokens"),
        (r"embeddings\.", ""),
    )
    mask = torch.cat([torch.ones(64), torch.zeros(64), torch.ones(64)]).double()
    state |= {f"blocks.{i}.attn.qkv.bias_mask": mask.clone() for i in range(3)}
    state |= {"rope_embed.periods": make_periods(base), "mask_token": state["mask_token"][0]}
    return case, model, state


@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_meta_dinov3(gated, tmp_path):
    case, model, state = dinov3(gated)
    torch.save({**state, "local_cls_norm.weight": torch.ones(64)}, tmp_path / "dinov3.pth")
    loaded = vitrail.load(tmp_path / "dinov3.pth")
    assert (loaded.origin.format, loaded.architecture.key_bias, loaded.image_size) == ("meta", False, (224, 224))
    for size in ALL_SIZES:
        images = images_for(size).double()
        theirs = run(model, case, images)
        torch.testing.assert_close(loaded.forward_features(images), theirs.last_hidden_state, rtol=0, atol=1e-10)
        torch.testing.assert_close(loaded(images), theirs.pooler_output, rtol=0, atol=1e-10)

    write_model(vitrail.load(save(loaded, tmp_path / "native")), FORMATS["meta"], tmp_path / "back")
    back = torch.load(tmp_path / "back" / "model.pth", weights_only=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in back.items())
    result = vitrail.convert(tmp_path / "dinov3.pth", tmp_path / "hf", "huggingface")
    assert result.max_difference == 0


@torch.no_grad()
def test_the_mask_of_meta_hides_what_the_bias_of_keys_is(tmp_path):
    case, model, state = dinov3(gated=False)
    state["blocks.1.attn.qkv.bias"][64:128] = 7.0
    torch.save(state, tmp_path / "dinov3.pth")
    images = images_for((48, 48)).double()
    theirs = run(model, case, images).pooler_output
    loaded = vitrail.load(tmp_path / "dinov3.pth")
    torch.testing.assert_close(loaded(images), theirs, rtol=0, atol=1e-10)
    assert any("written back as 0: blocks.1.attn.qkv.bias" in note for note in loaded.origin.notes)
    state["blocks.1.attn.qkv.bias"][64:128] = 0
    torch.save(state, tmp_path / "dinov3.pth")
    assert not any("written back" in note for note in vitrail.load(tmp_path / "dinov3.pth").origin.notes)


@torch.no_grad()
def test_the_periods_of_meta_say_the_base(tmp_path):
    case, model, state = dinov3(gated=False, base=30.0)
    torch.save(state, tmp_path / "dinov3.pth")
    loaded = vitrail.load(tmp_path / "dinov3.pth")
    assert loaded.architecture.rotary.base == pytest.approx(30, rel=1e-5)
    assert any("base 30" in note for note in loaded.origin.notes)
    images = images_for((48, 48)).double()
    torch.testing.assert_close(loaded(images), run(model, case, images).pooler_output, rtol=0, atol=1e-4)
    write_model(vitrail.load(save(loaded, tmp_path / "native")), FORMATS["meta"], tmp_path / "back")
    assert vitrail.load(tmp_path / "back").architecture == loaded.architecture


def test_periods_in_bfloat16_are_the_usual_ones(tmp_path):
    _, _, state = dinov3(gated=False)
    state["rope_embed.periods"] = state["rope_embed.periods"].bfloat16()
    torch.save(state, tmp_path / "dinov3.pth")
    loaded = vitrail.load(tmp_path / "dinov3.pth")
    assert loaded.architecture.rotary.base == 100.0
    assert not any("base" in note for note in loaded.origin.notes)


@pytest.mark.parametrize(
    ("periods", "words"),
    [
        (2 * make_periods(100), "powers of one base"),  # as from a smallest and a largest period
        (torch.zeros(16), "powers of one base"),
        (-make_periods(100), "powers of one base"),
        (1e300 * make_periods(100).double(), "powers of one base"),
        (torch.full((16,), torch.nan), "powers of one base"),
        (make_periods(100)[:7], "heads of 28 channels"),
        (torch.tensor(1.0), "periods"),
    ],
)
def test_periods_that_vitrail_does_not_have(periods, words, tmp_path):
    _, _, state = dinov3(gated=False)
    torch.save({**state, "rope_embed.periods": periods}, tmp_path / "dinov3.pth")
    with pytest.raises(vitrail.WeightsError, match=words):
        vitrail.load(tmp_path / "dinov3.pth")


def test_dinov3_from_elsewhere_is_not_written_as_meta(tmp_path):
    model = build(Case(lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, num_register_tokens=4))))
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(vitrail.WeightsError, match="bias_mask"):
        vitrail.convert(tmp_path / "hf", tmp_path / "meta", "meta")


@torch.no_grad()
def test_meta_dinov2_giant(tmp_path):
    config = t.Dinov2Config(**{**SMALL, "num_attention_heads": 1}, use_swiglu_ffn=True)
    case = Case(lambda: t.Dinov2Model(config), kind="plain")
    model = build(case)
    model.save_pretrained(tmp_path / "hf")
    state = vitrail.load(tmp_path / "hf").state_dict()
    theirs = renamed(
        state,
        (r"^encoder\.blocks", "blocks"),
        (r"^encoder\.norm", "norm"),
        ("attention.qkv", "attn.qkv"),
        ("attention.out", "attn.proj"),
        (r"scale(\d)\.factor", r"ls\1.gamma"),
        ("mlp.fc1", "mlp.w12"),
        ("mlp.fc2", "mlp.w3"),
        ("patch_embed.projection", "patch_embed.proj"),
        ("class_token", "cls_token"),
        (r"position_embedding\.0\.table", "pos_embed"),
    )
    theirs |= {name: theirs[name][None] for name in ("cls_token", "pos_embed")}
    theirs["patch_embed.proj.weight"] = theirs["patch_embed.proj.weight"].unflatten(1, (3, 8, 8))
    torch.save({**theirs, "mask_token": torch.zeros(1, 64)}, tmp_path / "giant.pth")
    loaded = vitrail.load(tmp_path / "giant.pth")
    assert (loaded.architecture.mlp, loaded.architecture.position_resize) == ("swiglu", "bicubic-offset")
    images = images_for((48, 48)).double()
    torch.testing.assert_close(loaded(images), run(model, case, images).pooler_output, rtol=0, atol=1e-10)
    write_model(vitrail.load(save(loaded, tmp_path / "native")), FORMATS["meta"], tmp_path / "back")
    back = torch.load(tmp_path / "back" / "model.pth", weights_only=True)
    assert back.keys() == {*theirs, "mask_token"}
    assert all(torch.equal(theirs[name], back[name]) for name in theirs)


@torch.no_grad()
def test_the_target_encoder_of_i_jepa_is_a_part_of_its_file(tmp_path: Path):
    case = Case(lambda: t.IJepaModel(t.IJepaConfig(**{**SMALL, "num_attention_heads": 1, "layer_norm_eps": 1e-6})))
    model = build(case)
    model.save_pretrained(tmp_path / "hf")
    state = renamed(
        vitrail.load(tmp_path / "hf").state_dict(),
        (r"^encoder\.blocks", "blocks"),
        (r"^encoder\.norm", "norm"),
        ("attention.qkv", "attn.qkv"),
        ("attention.out", "attn.proj"),
        ("patch_embed.projection", "patch_embed.proj"),
        (r"position_embedding\.0\.table", "pos_embed"),
    )
    state["pos_embed"] = state["pos_embed"][None]
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].unflatten(1, (3, 8, 8))
    target = {f"module.{name}": tensor for name, tensor in state.items()}
    torch.save({"target_encoder": target, "predictor": {"module.x": torch.zeros(2)}, "epoch": 3}, tmp_path / "jepa.tar")
    loaded = vitrail.load(tmp_path / "jepa.tar", part="target_encoder")
    images = images_for((48, 48)).double()
    theirs = run(model, case, images).last_hidden_state
    torch.testing.assert_close(loaded.forward_features(images), theirs, rtol=0, atol=1e-10)
    torch.testing.assert_close(loaded(images), theirs.mean(dim=1), rtol=0, atol=1e-10)
