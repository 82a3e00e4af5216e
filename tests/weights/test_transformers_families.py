"""Every family of transformers: the same numbers in float64 at four sizes, the same bits on the way back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers_models import CLASSIFIERS, ENCODERS, SMALL, TEXT, Case, build, pooled, run

import vitrail
from peer_models import images_for
from peers import transformers
from vitrail.weights.load import FORMATS
from vitrail.weights.save import save, write_model

TOLERANCE = 1e-10


def assert_same(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    assert theirs.dtype == ours.dtype == torch.float64
    assert theirs.shape == ours.shape
    assert theirs.std() >= 0.05
    assert (theirs - ours).abs().max() <= TOLERANCE * max(theirs.abs().max().item(), 1.0)


def written(model: object, folder) -> object:
    """What `save_pretrained` writes."""
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_encoders_compute_the_same_at_every_size(name, tmp_path):
    case = ENCODERS[name]
    model = build(case)
    loaded = vitrail.load(written(model, tmp_path))
    for size in case.sizes:
        images = images_for(size).double()
        theirs = run(model, case, images)
        assert_same(theirs.last_hidden_state, loaded.forward_features(images))
        assert_same(pooled(case, theirs), loaded(images))
        if loaded.architecture.representation_size is None:  # else the pooler's tanh layer comes after `embed`
            assert_same(pooled(case, theirs), loaded.embed(images))
    for option, value in (case.architecture or {}).items():
        assert getattr(loaded.architecture, option) == value


@pytest.mark.parametrize("name", CLASSIFIERS)
@torch.no_grad()
def test_classifiers_compute_the_same_at_every_size(name, tmp_path):
    case = CLASSIFIERS[name]
    model = build(case)
    loaded = vitrail.load(written(model, tmp_path))
    for size in case.sizes:
        images = images_for(size).double()
        assert_same(run(model, case, images).logits, loaded(images))
    assert loaded.labels == tuple(f"class {i}" for i in range(10))


def go_there_and_back(case: Case, tmp_path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], object]:
    """transformers' folder → native → transformers' folder; return both files' tensors and the peer."""
    model = build(case)
    before = load_file(written(model, tmp_path / "theirs") / "model.safetensors")
    save(vitrail.load(tmp_path / "theirs"), tmp_path / "native")
    write_model(vitrail.load(tmp_path / "native"), FORMATS["huggingface"], tmp_path / "back")
    return before, load_file(tmp_path / "back" / "model.safetensors"), model


CASES = {**ENCODERS, **{f"{name}, classifier": case for name, case in CLASSIFIERS.items()}}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_round_trips_keep_names_and_bits_and_transformers_reads_them(name, tmp_path):
    case = CASES[name]
    before, after, model = go_there_and_back(case, tmp_path)
    if name == "AIMv2 out of two towers":  # transformers reads a tower alone only without prefix and projection
        before = {key.removeprefix("vision_model."): tensor for key, tensor in before.items()}
        before = {key: tensor for key, tensor in before.items() if not key.startswith(("head.", "visual_projection."))}
    left_out = [key for key in before if key not in after]
    assert all(key.startswith(("text_model.", "text_projection.", "logit_")) for key in left_out)
    assert bool(left_out) == ("two towers" in name)
    assert after.keys() <= before.keys()
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())

    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == [case.written_as or type(model).__name__]
    peer = getattr(transformers, config["architectures"][0])
    again = peer.from_pretrained(tmp_path / "back", dtype=torch.float64).eval()
    report = peer.from_pretrained(tmp_path / "back", output_loading_info=True)[1]
    assert not [key for key in report["missing_keys"] if name != "ViTMSN" or not key.startswith("pooler.")]
    for key, tensor in model.named_buffers():  # what rounds to float32 when it is built
        if key not in model.state_dict() and not case.tower:
            again.get_buffer(key).data = tensor
    images = images_for((48, 48)).double()
    inner = Case(again, kind=case.kind, tower=case.tower if hasattr(again, case.tower or " ") else "")
    theirs, ours = run(model, case, images), run(again, inner, images)
    output = "logits" if hasattr(theirs, "logits") else "last_hidden_state"
    torch.testing.assert_close(getattr(ours, output), getattr(theirs, output), rtol=0, atol=1e-11)


def test_the_text_tower_is_left_out_with_a_note(tmp_path):
    loaded = vitrail.load(written(build(ENCODERS["CLIP out of two towers"]), tmp_path))
    assert any(("left out" in note and "text_model" in note) or "logit_scale" in note for note in loaded.origin.notes)
    assert any("projection into the space of texts" in note for note in loaded.origin.notes)
    assert list(loaded.unused_tensors) == ["visual_projection.weight"]


def test_a_config_of_two_towers_may_leave_out_what_is_the_default(tmp_path):
    vision = {**SMALL, "hidden_size": 96, "num_attention_heads": 12}
    config = transformers.CLIPConfig(vision_config=vision, text_config=TEXT)
    written(transformers.CLIPModel(config), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for key in ("num_attention_heads", "hidden_act", "layer_norm_eps"):
        content["vision_config"].pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    a = vitrail.load(tmp_path).architecture
    assert (a.num_heads, a.gelu, a.norm_eps) == (12, "quick", 1e-5)


STATISTICS = {
    "CLIP": (0.48145466, 0.4578275, 0.40821073),
    "SigLIP": (0.5, 0.5, 0.5),
    "SigLIP 2 NaFlex": (0.5, 0.5, 0.5),
    "DINOv3": (0.485, 0.456, 0.406),
    "I-JEPA": (0.485, 0.456, 0.406),
    "AIMv2": (0.48145466, 0.4578275, 0.40821073),
    "BEiT": (0.5, 0.5, 0.5),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_without_a_preprocessor_config(name, tmp_path):
    assert vitrail.load(written(build(ENCODERS[name]), tmp_path)).preprocessing.mean == STATISTICS[name]


def test_the_size_in_the_preprocessor_of_clip_is_the_shorter_side(tmp_path):
    folder = written(build(ENCODERS["CLIP"]), tmp_path)
    content = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 48, "crop_size": 48, "do_center_crop": True}
    (folder / "preprocessor_config.json").write_text(json.dumps({**content, "resample": 3}))
    preprocessing = vitrail.load(folder).preprocessing
    assert (preprocessing.resize, preprocessing.image_size, preprocessing.interpolation) == (
        "cover",
        (48, 48),
        "bicubic",
    )


def test_the_processor_of_two_towers_may_lie_in_another_file(tmp_path):
    folder = written(build(ENCODERS["SigLIP out of two towers"]), tmp_path)
    content = {"image_processor": {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 1, 1]}}
    (folder / "processor_config.json").write_text(json.dumps(content))
    assert vitrail.load(folder).preprocessing.mean == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (lambda t: t.Aimv2VisionModel(t.Aimv2VisionConfig(**SMALL, is_native=True)), "sines"),
        (lambda t: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, use_gated_mlp=True)), "hidden_act"),
        (lambda t: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, query_bias=False)), "biases"),
        (lambda t: t.BeitModel(t.BeitConfig(**SMALL)), "position tables"),
    ],
)
def test_what_vitrail_does_not_have_is_refused(config, sentence, tmp_path):
    written(config(transformers), tmp_path)
    with pytest.raises(vitrail.WeightsError, match=sentence):
        vitrail.load(tmp_path)


@pytest.mark.parametrize("size", [(48, 48), (64, 64), (32, 32), (40, 64)])
@torch.no_grad()
def test_the_encoder_of_mae(size, tmp_path):
    config = transformers.ViTMAEConfig(
        **SMALL, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, mask_ratio=0.0
    )
    model = build(Case(lambda: transformers.ViTMAEForPreTraining(config)))
    loaded = vitrail.load(written(model, tmp_path))
    images = images_for(size).double()
    order = torch.arange(size[0] * size[1] // 64).expand(2, -1).double()  # no patch is masked; this keeps their order
    theirs = model.vit(images, noise=order, interpolate_pos_encoding=True).last_hidden_state
    assert_same(theirs, loaded.forward_features(images))


OLD_BUFFERS = {
    "CLIP out of two towers": ("vision_model.embeddings.position_ids", torch.arange(37)[None]),
    "BEiT": (
        "encoder.layer.0.attention.attention.relative_position_bias.relative_position_index",
        torch.zeros(37, 37, dtype=torch.int64),
    ),
}


@pytest.mark.parametrize("name", OLD_BUFFERS)
def test_tables_that_earlier_versions_of_transformers_stored(name, tmp_path):
    written(build(ENCODERS[name]), tmp_path)
    key, table = OLD_BUFFERS[name]
    save_file({**load_file(tmp_path / "model.safetensors"), key: table}, tmp_path / "model.safetensors")
    loaded = vitrail.load(tmp_path)
    assert key in loaded.unused_tensors
    write_model(loaded, FORMATS["huggingface"], tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back" / "model.safetensors")[key], table)


def test_a_tower_deeper_in_a_larger_model_is_a_part(tmp_path):
    model = build(ENCODERS["SigLIP"])
    state = {f"vision_tower.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file({**state, "language_model.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    content = {"model_type": "llava", "vision_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(content))
    images = images_for((48, 48)).double()
    with torch.no_grad():
        theirs = run(model, ENCODERS["SigLIP"], images).pooler_output
        assert_same(theirs, vitrail.load(tmp_path, part="vision_tower")(images))


def test_native_folders_without_a_word_for_the_family_are_still_written_back(tmp_path):
    written(build(ENCODERS["DINOv2"]), tmp_path / "theirs")
    loaded = vitrail.load(tmp_path / "theirs")
    loaded.origin = loaded.origin.model_copy(update={"dialect": ""})  # as versions before this one wrote it
    write_model(loaded, FORMATS["huggingface"], tmp_path / "back")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()


@pytest.mark.parametrize("name", ["DINOv3", "SigLIP", "CLIP", "BEiT", "AIMv2", "I-JEPA", "SigLIP 2 NaFlex"])
def test_converting_to_native_and_back_is_certified_with_no_difference(name, tmp_path):
    written(build(ENCODERS[name]).float(), tmp_path / "theirs")
    vitrail.convert(tmp_path / "theirs", tmp_path / "native", "native")
    result = vitrail.convert(tmp_path / "native", tmp_path / "back", "huggingface")
    assert result.max_difference == 0
    assert "add_pooling_layer" not in (tmp_path / "back" / "README.md").read_text()
    processor = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert hasattr(transformers, processor["image_processor_type"])
    assert ("max_num_patches" in processor) == ("NaFlex" in name)
    model = transformers.AutoModel.from_pretrained(tmp_path / "back")
    assert type(model).__name__ == type(ENCODERS[name].build()).__name__


def test_masked_pretraining_of_beit_loads_with_the_norm_of_its_head(tmp_path):
    config = transformers.BeitConfig(**SMALL, use_shared_relative_position_bias=True, use_mask_token=True, vocab_size=9)
    model = build(Case(lambda: transformers.BeitForMaskedImageModeling(config)))
    loaded = vitrail.load(written(model, tmp_path))
    images = images_for((48, 48)).double()
    with torch.no_grad():
        theirs = model.layernorm(run(model, Case(None, kind="plain", tower="beit"), images).last_hidden_state)
        assert_same(theirs, loaded.forward_features(images))
