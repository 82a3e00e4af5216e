"""The door out: folders that the other libraries themselves load, and the certificate that comes with them."""

from __future__ import annotations

import importlib
import re
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from commands import runner
from peer_models import (
    huggingface_model,
    images_for,
    save_tensors,
    scramble,
    timm_folder,
    timm_model,
    torchvision_model,
)
from peers import timm, torchvision, transformers
from vitrail.data.transforms.preprocess import prepare
from vitrail.system.files import sha256
from vitrail.weights import convert as convert_module
from vitrail.weights.formats.base import guess_num_heads
from vitrail.weights.formats.timm_write import choose_name_and_arguments

TOLERANCE = 2e-5
SMALL = {"width": 192, "depth": 3, "num_heads": 3, "mlp_dim": 256, "image_size": 64, "num_classes": 10, "gelu": "exact"}


def small(**options):
    model = scramble(vitrail.create_model("B/16", **{**SMALL, **options}))
    if model.num_classes:
        model.labels = [f"class {i}" for i in range(model.num_classes)]
    return model


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.std() >= 0.1
    assert (a - b).abs().max() <= TOLERANCE * a.std()


VARIANTS = {
    "ViT": {},
    "tanh GELU": {"gelu": "tanh"},
    "no qkv bias": {"qkv_bias": False},
    "DeiT": {"registers": 1, "position_prefix": "all"},
    "distilled DeiT": {"registers": 1, "position_prefix": "all", "pool": "distilled"},
    "DINOv2": {"layer_scale": 0.1, "pool": "class+average", "mlp_dim": 384},
    "DINOv2 with registers": {"layer_scale": 0.1, "pool": "class+average", "registers": 4, "mlp_dim": 384},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_transformers_loads_what_we_write(variant, tmp_path):
    model = small(**VARIANTS[variant])
    vitrail.save(model, tmp_path / "native")
    vitrail.convert(tmp_path / "native", tmp_path / "hf", "huggingface")
    if variant == "distilled DeiT":  # the auto class picks the one without a teacher's head
        theirs = transformers.DeiTForImageClassificationWithTeacher.from_pretrained(tmp_path / "hf")
    else:
        theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf")
    batch = images_for((64, 64))
    assert_same(theirs.eval()(batch).logits, model(batch))
    assert theirs.config.id2label == {i: f"class {i}" for i in range(10)}


PREPROCESSINGS = {
    "squash": {},
    "squash, bicubic": {"interpolation": "bicubic"},
    "ImageNet": {
        "resize": "cover",
        "crop_fraction": 0.875,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    },
    "timm": {"resize": "cover", "crop_fraction": 0.9, "interpolation": "bicubic"},
    "squash and crop": {"crop_fraction": 0.8},
}


def photographs() -> list[Image.Image]:
    """The two photographs inside scikit-learn, and pieces of them with awkward sizes."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(array) for array in load_sample_images().images]
    return [*photos, photos[0].crop((0, 0, 301, 98)), photos[1].crop((10, 20, 87, 400)), photos[0].resize((50, 40))]


@pytest.mark.parametrize("name", PREPROCESSINGS)
def test_transformers_image_processor_gives_our_pixels(name, tmp_path):
    model = small(depth=1)
    model.preprocessing = vitrail.Preprocessing(image_size=64, **PREPROCESSINGS[name])
    vitrail.save(model, tmp_path / "native")
    certificate = vitrail.convert(tmp_path / "native", tmp_path / "hf", "huggingface")
    assert certificate.preprocessing_matches
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "hf")
    std = torch.tensor(model.preprocessing.std)[:, None, None]
    for photo in photographs():
        theirs = torch.as_tensor(np.asarray(processor(photo, return_tensors="pt")["pixel_values"][0]))
        ours = prepare(photo, model.preprocessing)
        assert theirs.shape == ours.shape
        assert ((theirs - ours) * std).abs().max() <= 1 / 255 + 1e-6


def test_pixels_are_those_that_timm_and_torchvision_give_their_own_weights(tmp_path):
    deit, plain = timm_model("DeiT-Ti"), torchvision_model(stem=True)
    timm_data = importlib.import_module("timm.data")
    told = timm_data.resolve_model_data_config(deit)
    loaded = vitrail.load(timm_folder("DeiT-Ti", deit, tmp_path)), vitrail.load(save_tensors(plain, tmp_path / "x.pth"))
    size = loaded[1].image_size[0]
    for model, transform in zip(
        loaded,
        (
            timm_data.create_transform(**told),
            torchvision.transforms._presets.ImageClassification(crop_size=size, resize_size=size * 8 // 7),
        ),
        strict=True,
    ):
        std = torch.tensor(model.preprocessing.std)[:, None, None]
        for photo in photographs():
            # Pillow resizes with other roundings; beside an edge, one pixel to the side would be far more.
            assert ((transform(photo) - prepare(photo, model.preprocessing)) * std).abs().max() <= 2 / 255 + 1e-6


def test_a_crop_that_the_target_rounds_otherwise_is_noted(tmp_path):
    model = small(depth=1)
    model.preprocessing = vitrail.Preprocessing(image_size=64, resize="cover", crop_rounding="even")
    vitrail.save(model, tmp_path / "native")
    assert vitrail.convert(tmp_path / "native", tmp_path / "timm", "timm").preprocessing_matches
    certificate = vitrail.convert(tmp_path / "timm", tmp_path / "hf", "huggingface")
    assert "crop_rounding even becomes down" in certificate.preprocessing_note


TIMM_VARIANTS = {
    "ViT": {},
    "tanh GELU": {"gelu": "tanh"},
    "quick GELU": {"gelu": "quick"},
    "not square": {"image_size": (64, 96)},
    "registers and layer scale": {"registers": 4, "layer_scale": 0.1, "position_prefix": "none"},
    "average pooling": {"pool": "average"},
    "average pooling, norm after": {"pool": "average", "norm_after_pool": True},
    "attention pooling": {"pool": "attention"},
    "no position": {"position": "none"},
    "CLIP": {"input_norm": True, "patch_bias": False, "norm_eps": 1e-5, "gelu": "quick"},
    "distilled": {"registers": 1, "pool": "distilled", "position_prefix": "all"},
    "one channel": {"in_channels": 1},
    "four channels": {"in_channels": 4},
    "average pooling beside registers": {"pool": "average", "registers": 4},
    "a class token's own position beside registers": {"registers": 4},
    "MLP of an odd size": {"mlp_dim": 257},
}


@pytest.mark.parametrize("variant", TIMM_VARIANTS)
@torch.no_grad()
def test_timm_loads_what_we_write(variant, tmp_path):
    model = small(**TIMM_VARIANTS[variant])
    vitrail.save(model, tmp_path / "native")
    vitrail.convert(tmp_path / "native", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    batch = images_for(model.image_size, channels=model.in_channels)
    assert_same(theirs(batch), model(batch))
    assert tuple(theirs.pretrained_cfg["mean"]) == model.preprocessing.mean


def original_releases() -> dict[str, tuple[torch.nn.Module, dict[str, object]]]:
    """The same weights as timm's, under the names in which their authors, or training programs, wrote them."""
    deit3 = timm_model("DeiT III S")
    renamed = {n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for n, t in state_of(deit3)}
    plain = timm_model("Ti/16")
    return {
        "DeiT III": (deit3, {"model": renamed}),
        "from a training program": (plain, {"state_dict": {f"module.{name}": t for name, t in state_of(plain)}}),
        "open_clip's wrapper": (plain, {f"visual.trunk.{name}": t for name, t in state_of(plain)}),
        "DINOv2": dinov2("S/14 with layer scale and registers"),
    }


def state_of(model: torch.nn.Module):
    return model.state_dict().items()


def dinov2(case: str) -> tuple[torch.nn.Module, dict[str, object]]:
    """Its class token has a position of its own, which timm adds to the token."""
    model = timm_model(case)
    state = model.state_dict()
    position = torch.randn(1, 1, 384, generator=torch.Generator().manual_seed(1)) * 0.05
    theirs = {**state, "register_tokens": state["reg_token"], "cls_token": state["cls_token"] - position}
    theirs["pos_embed"] = torch.cat([position, state["pos_embed"]], dim=1)
    del theirs["reg_token"]
    return model, {**theirs, "mask_token": torch.randn(1, 384)}


@pytest.mark.slow
@pytest.mark.parametrize("release", ["DeiT III", "from a training program", "open_clip's wrapper", "DINOv2"])
@torch.no_grad()
def test_timm_loads_what_came_under_other_names(release, tmp_path):
    model, content = original_releases()[release]
    torch.save(content, tmp_path / "original.pth")
    vitrail.convert(tmp_path / "original.pth", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    batch = images_for((224, 224))
    assert_same(model(batch), theirs(batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R26+S/32", "BiT-R50x1"])
@torch.no_grad()
def test_timm_loads_our_convolutional_models(name, tmp_path):
    source = timm_folder(name, timm_model(name), tmp_path / "source")
    vitrail.convert(source, tmp_path / "native", "native")
    vitrail.convert(tmp_path / "native", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    batch = images_for((224, 224))
    assert_same(theirs(batch), vitrail.load(tmp_path / "native")(batch))


@pytest.mark.parametrize("stem", [False, True])
@torch.no_grad()
def test_torchvision_loads_what_we_write(stem, tmp_path):
    options = {"conv_stem": [(24, 3, 2), (48, 3, 2), (96, 3, 2), (192, 3, 2)]} if stem else {}
    model = small(**options)
    vitrail.save(model, tmp_path / "native")
    vitrail.convert(tmp_path / "native", tmp_path / "torchvision", "torchvision")
    config = torchvision.models.vision_transformer.ConvStemConfig
    theirs = torchvision.models.VisionTransformer(
        64, 16, 3, 3, 192, 256, num_classes=10,
        conv_stem_configs=[config(c, 3, 2) for c in (24, 48, 96, 192)] if stem else None,
    ).eval()  # fmt: skip
    theirs.load_state_dict(torch.load(tmp_path / "torchvision" / "model.pth", weights_only=True))
    assert_same(theirs(images_for((64, 64))), model(images_for((64, 64))))


@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "google"])
@torch.no_grad()
def test_the_12_heads_of_b_survive(to, tmp_path):
    """An S of the same width has 6, which no tensor shows; both compute, and only one is right."""
    gelu = "tanh" if to == "google" else "exact"
    model = scramble(vitrail.create_model("b/32", image_size=64, depth=2, num_classes=3, gelu=gelu))
    batch = images_for((64, 64))
    vitrail.save(model, tmp_path / "native")
    vitrail.convert(tmp_path / "native", tmp_path / to, to)
    loaded = vitrail.load(tmp_path / to)
    assert loaded.architecture.num_heads == 12
    if to == "timm":
        loaded = timm.create_model(f"local-dir:{tmp_path / to}", pretrained=True).eval()
    if to == "huggingface":
        loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path / to).eval()
    output = loaded(batch)
    assert_same(getattr(output, "logits", output), model(batch))


def test_a_whole_b_has_a_name_in_timm():
    name, arguments = choose_name_and_arguments(vitrail.create_model("b/16", device="meta").architecture)
    assert (name, arguments["num_heads"]) == ("vit_small_patch16_224", 12)


def test_weights_of_that_width_without_a_config_are_still_an_S():
    notes: list[str] = []
    assert guess_num_heads(384, notes) == 6
    assert "every S of width 384" in notes[0]


REFUSED = [
    ("torchvision", {"gelu": "tanh"}, "exact GELU"),
    ("torchvision", {"registers": 2}, "model's registers"),
    ("torchvision", {"pool": "average"}, "model's pool, class_token"),
    ("torchvision", {"image_size": (64, 96)}, "square images only"),
    ("google", {}, "tanh form of GELU"),
    ("google", {"gelu": "tanh", "layer_scale": 0.1}, "model's layer_scale"),
    ("google", {"gelu": "tanh", "position": "sin-cos"}, "model's position"),
    ("huggingface", {"pool": "average", "class_token": True}, "model's pool"),
    ("huggingface", {"registers": 3}, "one in DeiT"),
    ("huggingface", {"position": "relative"}, "model's position"),
    ("huggingface", {"representation_size": 32}, "tanh layer"),
    ("huggingface", {"layer_scale": 0.1, "pool": "class+average"}, "multiple of its width"),
    ("timm", {"position": "learned-2d"}, 'no position embedding "learned-2d"'),
    ("timm", {"pool": "class+average"}, "no pooling"),
    ("timm", {"block": "axial", "pool": "average"}, "no axial blocks"),
    ("timm", {"representation_size": 32}, "dropped the tanh layer"),
]


@pytest.mark.parametrize(("to", "options", "sentence"), REFUSED)
def test_what_does_not_exist_there_is_refused(to, options, sentence, tmp_path):
    vitrail.save(small(**options), tmp_path / "native")
    with pytest.raises(vitrail.WeightsError, match=re.escape(sentence)):
        vitrail.convert(tmp_path / "native", tmp_path / "target", to)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_resnet_is_refused_where_there_is_none(tmp_path):
    vitrail.save(vitrail.create_model("BiT-R50x1", num_classes=2), tmp_path / "native")
    for to in ("huggingface", "torchvision"):
        with pytest.raises(vitrail.WeightsError, match=r"neither BiT|no ResNets"):
            vitrail.convert(tmp_path / "native", tmp_path / "target", to)


def test_across_libraries(tmp_path):
    """Hugging Face → timm → torchvision, which disagree about the eps of a norm; what that costs is measured."""
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768, image_size=64
    )
    scramble(transformers.ViTForImageClassification(config)).save_pretrained(tmp_path / "hf")
    first = vitrail.convert(tmp_path / "hf", tmp_path / "timm", "timm")
    second = vitrail.convert(tmp_path / "timm", tmp_path / "torchvision", "torchvision")
    assert 0 < first.relative_difference < 1e-3
    assert second.max_difference == 0
    assert first.preprocessing_matches
    assert second.preprocessing_matches  # by the small file of ours beside torchvision's, which says nothing of pixels
    (tmp_path / "torchvision" / "vitrail.json").unlink()
    assert vitrail.load(tmp_path / "torchvision").preprocessing.mean == (0.485, 0.456, 0.406)


def test_what_the_files_say_cannot_be_told_otherwise(tmp_path):
    vitrail.save(small(), tmp_path / "native")
    with pytest.raises(vitrail.WeightsError, match="num_heads = 3"):
        vitrail.convert(tmp_path / "native", tmp_path / "timm", "timm", num_heads=6)
    assert vitrail.load(tmp_path / "native", dropout=0.1, num_heads=3).architecture.dropout == 0.1
    with pytest.raises(TypeError, match="imagesize"):
        vitrail.load(tmp_path / "native", imagesize=3)


@torch.no_grad()
def test_what_a_format_cannot_tell_lies_beside_it(tmp_path):
    """torchvision's files do not say how many heads: 64 channels in 4 would be read as 1."""
    huggingface_model("ViT").save_pretrained(tmp_path / "hf")
    vitrail.convert(tmp_path / "hf", tmp_path / "torchvision", "torchvision")
    assert vitrail.load(tmp_path / "torchvision").architecture.num_heads == 4
    alone = (tmp_path / "torchvision" / "model.pth").rename(tmp_path / "alone.pth")
    assert vitrail.load(alone).architecture.num_heads == 1
    known = vitrail.load(alone, num_heads=4)
    assert known.architecture.num_heads == 4
    assert not any("attention heads" in note for note in known.origin.notes)
    assert any("num_heads = 4" in note for note in known.origin.notes)


def test_the_certificate_stands_in_the_model_card(tmp_path):
    source = timm_folder("DeiT-Ti", timm_model("DeiT-Ti"), tmp_path / "source")
    certificate = vitrail.convert(source, tmp_path / "model", "native")
    card = (tmp_path / "model" / "README.md").read_text()
    assert certificate.max_difference == 0
    assert sha256(source / "model.safetensors") in card
    assert sha256(tmp_path / "model" / "model.safetensors") in card
    assert "largest difference | 0 " in card
    assert "3 attention heads" in card
    assert "Certificate of conversion" in card
    assert card.startswith("---\nlibrary_name: vitrail\n")


def test_a_conversion_that_changes_the_model_fails_and_leaves_nothing(tmp_path, monkeypatch):
    """A fault in the writing is found by running the result, not by trusting it."""
    vitrail.save(small(), tmp_path / "native")
    plain = convert_module.write_model

    def faulty(model, weight_format, folder):
        with torch.no_grad():
            model.encoder.blocks[1].attention.qkv.weight[0] += 0.5
        plain(model, weight_format, folder)
        with torch.no_grad():
            model.encoder.blocks[1].attention.qkv.weight[0] -= 0.5

    monkeypatch.setattr(convert_module, "write_model", faulty)
    with pytest.raises(vitrail.WeightsError, match="something else"):
        vitrail.convert(tmp_path / "native", tmp_path / "target", "timm")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def converted_faultily(tmp_path, monkeypatch, fault) -> None:
    """`fault` has its way with the model that is read back."""
    vitrail.save(small(), tmp_path / "native")
    plain, calls = convert_module.load_with_files, []

    def load(source, *facts):
        model, files = plain(source, *facts)
        calls.append(source)
        if len(calls) == 2:
            with torch.no_grad():
                fault(model)
        return model, files

    monkeypatch.setattr(convert_module, "load_with_files", load)
    with pytest.raises(vitrail.WeightsError, match="something else"):
        vitrail.convert(tmp_path / "native", tmp_path / "target", "timm")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_nan_is_a_difference(tmp_path, monkeypatch):
    converted_faultily(tmp_path, monkeypatch, lambda model: model.head.bias[3].fill_(float("nan")))


def test_a_wrong_head_is_found_though_the_representation_is_right(tmp_path, monkeypatch):
    converted_faultily(tmp_path, monkeypatch, lambda model: model.head.weight.mul_(1.01))


def test_a_wrong_number_of_heads_is_found(tmp_path, monkeypatch):
    def fault(model):
        for block in model.encoder.blocks:
            block.attention.num_heads = 6

    converted_faultily(tmp_path, monkeypatch, fault)


def test_zero_logits_of_a_fresh_head_are_compared_too(tmp_path):
    vitrail.save(vitrail.create_model("Ti/16", image_size=32, depth=1, num_classes=3), tmp_path / "native")
    certificate = vitrail.convert(tmp_path / "native", tmp_path / "google", "google")
    assert (certificate.max_difference, certificate.relative_difference) == (0, 0)


def test_an_existing_folder_is_not_overwritten_by_convert_but_is_by_save(tmp_path):
    vitrail.save(small(depth=1), tmp_path / "model")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "precious").touch()
    with pytest.raises(vitrail.WeightsError, match="is there already"):
        vitrail.convert(tmp_path / "model", tmp_path / "target", "timm")
    assert (tmp_path / "target" / "precious").exists()
    vitrail.save(small(depth=2), tmp_path / "model")
    assert vitrail.load(tmp_path / "model").architecture.depth == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "target"]


def test_a_run_folder_is_a_model_too(tmp_path):
    vitrail.save(small(depth=1), tmp_path / "run" / "model")
    assert vitrail.load(tmp_path / "run").num_classes == 10


def test_wrong_words(tmp_path):
    with pytest.raises(vitrail.ConfigError, match="did you mean 'timm'"):
        vitrail.convert(tmp_path, tmp_path / "x", "tim")
    with pytest.raises(vitrail.ConfigError, match=r"model\.npz"):
        vitrail.convert(tmp_path, tmp_path / "x.npz", "google")


def test_push_uploads_the_folder(tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, exist_ok):
            calls.append(("create", name, exist_ok))

        def upload_folder(self, repo_id, folder_path, commit_message):
            calls.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))
            return "https://hub.example/me/model"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    vitrail.save(small(depth=1), tmp_path / "model")
    assert convert_module.push_to_hub(tmp_path / "model", "hf:me/model") == "https://hub.example/me/model"
    files = ["README.md", "SHA256SUMS", "config.json", "model.safetensors"]
    assert calls == [("create", "me/model", True), ("upload", "me/model", files)]
    for wrong in ("me/model", "hf:model", "hf:a/b/c"):
        with pytest.raises(vitrail.ConfigError, match="is not hf:owner/name"):
            convert_module.push_to_hub(tmp_path / "model", wrong)


def test_push_without_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_token_that_is_none")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    vitrail.save(small(depth=1), tmp_path / "model")
    with pytest.raises(vitrail.WeightsError, match="hf:me/model") as caught:
        convert_module.push_to_hub(tmp_path / "model", "hf:me/model")
    assert "\n" not in str(caught.value)


def test_timm_itself_as_a_source(monkeypatch):
    """`timm:name`, with timm's download replaced by random weights."""
    plain, model = timm.create_model, timm_model("no class token")
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: model)
    loaded = vitrail.load("timm:vit_base_patch16_gap_224")
    assert loaded.origin.source == "timm:vit_base_patch16_gap_224"
    assert (loaded.architecture.num_heads, loaded.architecture.pool) == (16, "average")
    with torch.no_grad():
        assert_same(model(images_for((224, 224))), loaded(images_for((224, 224))))
    monkeypatch.setattr(timm, "create_model", plain)
    with pytest.raises(vitrail.WeightsError, match="no_such_model"):
        vitrail.load("timm:no_such_model")


def test_timm_missing_or_broken(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(vitrail.MissingExtraError, match=r"pip install .*timm"):
        vitrail.load("timm:vit_tiny_patch16_224")
    monkeypatch.delitem(sys.modules, "timm")
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(vitrail.WeightsError, match="torchvision"):
        vitrail.load("timm:vit_tiny_patch16_224")


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.save(torchvision_model(stem=True).state_dict(), "vit.pth")
    run = runner(monkeypatch, capsys, "convert")
    code, out, err = run("vit.pth", "model", "--to", "native")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("note: each layer of the convolutional stem")
    assert "largest difference: 0 (0 of an output's deviation)" in lines
    assert "preprocessing: matches" in lines
    code, out, err = run("model", "timm", "--to", "timm")
    assert (code, out) == (1, "")
    assert "axial" in err
    assert run("model", "x", "--to", "tim")[0] == 2
