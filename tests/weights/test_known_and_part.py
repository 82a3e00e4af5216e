"""What a file cannot say can be told, and a model inside a larger file is found."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitrail
from commands import runner
from peer_models import huggingface_model, images_for, scramble, torchvision_model
from peers import timm
from vitrail.weights.files import TensorInfo
from vitrail.weights.load import FORMATS
from vitrail.weights.part import find_parts
from vitrail.weights.save import write_model


def small_timm(**options: Any) -> Any:
    options = {"img_size": 48, "patch_size": 8, "embed_dim": 40, "depth": 2, "num_heads": 4, **options}
    return scramble(timm.create_model("vit_tiny_patch16_224", **options, num_classes=0))


def written_tensors(model: Any, folder: Path) -> dict[str, Tensor]:
    """As transformers writes them: in memory its names are others."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def put_into(prefix: str, tensors: dict[str, Tensor], beside: str = "decoder.") -> dict[str, Tensor]:
    """The tensors under a prefix, and others that belong to something else."""
    inner = {prefix + name: tensor for name, tensor in tensors.items()}
    return {**inner, f"{beside}weight": torch.randn(3, 3), f"{beside}norm.bias": torch.randn(3), "scale": torch.ones(1)}


def write(tensors: dict[str, Tensor], path) -> Any:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"state_dict": tensors, "epoch": 3}, path)
    return path


WIDE = {"img_size": (96, 336), "num_heads": 4}
"""A table of 12×42, whose 504 patches are no square."""


@torch.no_grad()
def test_a_table_that_is_not_square(tmp_path):
    model = small_timm(**WIDE)
    path = write(model.state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(vitrail.WeightsError, match=r'known=\{"grid"'):
        vitrail.load(path, num_heads=4)
    loaded = vitrail.load(path, known={"grid": (12, 42), "num_heads": 4})
    assert (loaded.grid, loaded.image_size) == ((12, 42), (96, 336))
    batch = images_for((96, 336))
    torch.testing.assert_close(loaded(batch), model(batch), rtol=0, atol=2e-5)
    transposed = vitrail.load(path, known={"grid": (42, 12), "num_heads": 4})  # only the caller can know
    assert transposed.image_size == (336, 96)


@pytest.mark.parametrize(
    ("known", "error", "words"),
    [
        ({"grid": (12, 41)}, vitrail.WeightsError, "12×41"),
        ({"gird": (12, 42)}, vitrail.ConfigError, "did you mean 'grid'"),
        ({"heads": 4}, vitrail.ConfigError, "did you mean 'num_heads'"),
        ({"grid": 12}, vitrail.ConfigError, "grid"),
        ({"grid": "12 by 42"}, vitrail.ConfigError, "12x42"),
        ({"grid": (12, 42), "num_heads": 7}, vitrail.WeightsError, "num_heads 7"),
        ([("grid", (12, 42))], vitrail.ConfigError, "dictionary"),
        ({"num_heads": 5}, vitrail.ConfigError, "given twice"),
    ],
)
def test_wrong_facts(known, error, words, tmp_path):
    path = write(small_timm(**WIDE).state_dict(), tmp_path / "vit.safetensors")
    given = {"num_heads": 4} if not isinstance(known, dict) or known.get("num_heads") != 7 else {}
    with pytest.raises(error, match=words):
        vitrail.load(path, known=known, **given)


def test_a_square_table_contradicts_another_grid(tmp_path):
    path = write(small_timm().state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(vitrail.WeightsError, match="6×6 patches, so the grid cannot be 4×8"):
        vitrail.load(path, known={"grid": (4, 8)}, num_heads=4)
    assert vitrail.load(path, known={"grid": (4, 9)}, num_heads=4).image_size == (32, 72)  # also 36 patches


def test_facts_that_a_config_says_cannot_be_told_otherwise(tmp_path):
    huggingface_model("ViT").save_pretrained(tmp_path)
    with pytest.raises(vitrail.WeightsError, match="config says num_heads = 4"):
        vitrail.load(tmp_path, known={"num_heads": 8})
    with pytest.raises(vitrail.WeightsError, match="6×6"):
        vitrail.load(tmp_path, known={"grid": (5, 5)})


def test_a_known_number_of_heads_needs_no_guess(tmp_path):
    path = write(small_timm().state_dict(), tmp_path / "vit.safetensors")
    with pytest.raises(vitrail.WeightsError, match="attention heads is not in the file"):  # for width 40
        vitrail.load(path)
    notes = vitrail.load(path, known={"num_heads": 4, "gelu": "exact"}).origin.notes
    assert not any("does not say" in note and "heads" in note for note in notes)
    assert not any("almost always" in note for note in notes)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("part", ["encoder", "backbone", "vision_model", "model.image_encoder.vit"])
@torch.no_grad()
def test_timms_names_inside_a_larger_file(part, suffix, tmp_path):
    model = small_timm()
    path = write(put_into(f"{part}.", model.state_dict()), tmp_path / f"whole{suffix}")
    loaded = vitrail.load(path, part=part, num_heads=4)
    batch = images_for((48, 48))
    torch.testing.assert_close(loaded(batch), model(batch), rtol=0, atol=2e-5)
    assert any(part in note and "3 other tensors" in note for note in loaded.origin.notes)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kind", ["ViT without head", "Dinov2 without head"])
@torch.no_grad()
def test_transformers_names_inside_a_larger_file(kind, suffix, tmp_path):
    model = huggingface_model(kind)
    path = write(
        put_into("vision_model.", written_tensors(model, tmp_path / "alone"), "text_model."),
        tmp_path / f"whole{suffix}",
    )
    with pytest.raises(vitrail.WeightsError, match="part='vision_model'"):
        vitrail.load(path)
    loaded = vitrail.load(path, part="vision_model.", num_heads=4, norm_eps=model.config.layer_norm_eps)
    batch = images_for((48, 48))
    theirs = model(batch).last_hidden_state
    torch.testing.assert_close(loaded.forward_features(batch), theirs, rtol=0, atol=2e-5)


@torch.no_grad()
def test_torchvisions_names_inside_a_larger_file(tmp_path):
    model = torchvision_model(stem=True)
    path = write(put_into("backbone.", model.state_dict()), tmp_path / "whole.pth")
    with pytest.raises(vitrail.WeightsError, match="under backbone"):
        vitrail.load(path)
    batch = images_for((64, 64))
    torch.testing.assert_close(vitrail.load(path, part="backbone")(batch), model(batch), rtol=0, atol=2e-5)


@torch.no_grad()
def test_a_section_of_the_config_describes_the_part(tmp_path):
    model = huggingface_model("ViT without head")
    tensors = written_tensors(model, tmp_path / "alone")
    save_file(put_into("encoder.", tensors), tmp_path / "model.safetensors")
    section = model.config.to_dict() | {"num_attention_heads": 2, "hidden_act": "quick_gelu"}
    whole = {"model_type": "vision-encoder-decoder", "num_attention_heads": 8, "encoder": section}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    a = vitrail.load(tmp_path, part="encoder").architecture
    assert (a.num_heads, a.gelu) == (2, "quick")


def test_several_dictionaries_in_one_file(tmp_path):
    """As I-JEPA's (encoder, target_encoder) and DINO's (student, teacher) files are."""
    one, two = small_timm(), small_timm()
    with torch.no_grad():
        two.norm.bias += 1
    path = tmp_path / "jepa.pth"
    states = {f"{key}": {f"module.{n}": t for n, t in m.state_dict().items()} for key, m in
              (("encoder", one), ("target_encoder", two))}  # fmt: skip
    torch.save({**states, "opt": {"state": {0: {"step": torch.ones(1)}}}, "epoch": 1}, path)
    with pytest.raises(vitrail.WeightsError, match="encoder, target_encoder"):
        vitrail.load(path, num_heads=4)
    for part, model in (("encoder", one), ("target_encoder", two)):
        loaded = vitrail.load(path, part=part, num_heads=4)
        assert torch.equal(loaded.encoder.norm.bias, model.norm.bias)
    torch.save({"student": one.state_dict(), "teacher": two.state_dict()}, path)
    assert torch.equal(vitrail.load(path, num_heads=4).encoder.norm.bias, two.norm.bias)
    assert torch.equal(vitrail.load(path, part="student", num_heads=4).encoder.norm.bias, one.norm.bias)


@pytest.mark.parametrize("names", [("encoder", "target_encoder"), ("model", "ema"), ("module.backbone", "teacher.net")])
def test_two_encoders_under_one_roof(names, tmp_path):
    """`encoder.` and `model.` are beginnings that training programs use, and alone they need no `part`."""
    models = [small_timm(), small_timm()]
    with torch.no_grad():
        models[1].norm.bias += 1
    states = [{f"{name}.{key}": tensor for key, tensor in model.state_dict().items()}
              for name, model in zip(names, models, strict=True)]  # fmt: skip
    path = tmp_path / "two.safetensors"
    save_file({**states[0], **states[1], "predictor.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(vitrail.WeightsError, match="several models") as refused:
        vitrail.load(path, num_heads=4)
    assert all(name.partition(".")[0] in str(refused.value) for name in names)
    for name, model in zip(names, models, strict=True):
        assert torch.equal(vitrail.load(path, part=name, num_heads=4).encoder.norm.bias, model.norm.bias)
    save_file({**states[0], "predictor.weight": torch.zeros(2, 2)}, path)
    assert torch.equal(vitrail.load(path, num_heads=4).encoder.norm.bias, models[0].norm.bias)


def test_the_averages_of_an_optimizer_are_no_second_model(tmp_path):
    model = scramble(vitrail.create_model("Ti/16", image_size=32, depth=1, num_classes=3))
    write_model(model, FORMATS["google"], tmp_path / "plain")
    arrays = dict(np.load(tmp_path / "plain" / "model.npz"))
    both = {prefix + name: array for name, array in arrays.items() for prefix in ("params/", "opt/0/mu/", "opt/0/nu/")}
    np.savez(tmp_path / "training.npz", **both)
    assert vitrail.load(tmp_path / "training.npz").architecture.width == 192


def test_wrong_parts(tmp_path):
    path = write(put_into("vision_model.", small_timm().state_dict()), tmp_path / "whole.safetensors")
    with pytest.raises(vitrail.WeightsError, match="did you mean 'vision_model'"):
        vitrail.load(path, part="vison_model")
    with pytest.raises(vitrail.WeightsError, match=r"its parts are .*decoder"):
        vitrail.load(path, part="heart")
    with pytest.raises(vitrail.WeightsError, match="no Vision Transformer"):
        vitrail.load(path, part="decoder")
    for part, source in (("", path), (".", path), ("encoder", "timm:vit_tiny_patch16_224")):
        with pytest.raises(vitrail.ConfigError, match="part"):
            vitrail.load(source, part=part)


def test_parts_are_found_quickly_and_only_the_outer_ones():
    info = TensorInfo((1,), torch.float32)
    tensors = {f"a.b{i}.c{i % 7}.d.e.weight": info for i in range(20_000)}
    marked = {**tensors, "x.y.mark": info, "x.y.z.mark": info, "q/mark": info}
    assert find_parts(marked, lambda part: "mark" in part) == ["q", "x.y"]


def test_many_parts_are_found_quickly():
    """Each was compared with all that were found before it: 20,000 took 19 seconds."""
    tensors = {f"a{i}.mark": TensorInfo((1,), torch.float32) for i in range(100_000)}
    start = time.perf_counter()
    assert len(find_parts(tensors, lambda part: "mark" in part)) == 100_000
    assert time.perf_counter() - start < 10


def test_convert_takes_both(tmp_path, monkeypatch, capsys):
    path = write(put_into("encoder.", small_timm(**WIDE).state_dict()), tmp_path / "whole.pth")
    run = runner(monkeypatch, capsys, "convert", str(path))
    words = ["--to", "native", "--part", "encoder", "--known"]
    code, out, err = run(str(tmp_path / "native"), *words, "grid=12x42", "--known", "num-heads=4")
    assert code == 0, err
    assert "encoder" in out
    assert vitrail.load(tmp_path / "native").grid == (12, 42)
    for wrong, named in (("grid", "NAME=VALUE"), ("gird=12x42", "grid"), ("grid=12", "12x42")):
        code, _, err = run(str(tmp_path / "other"), *words, wrong)
        assert code != 0
        assert named in err
    result = vitrail.convert(path, tmp_path / "timm", "timm", known={"grid": (12, 42)}, part="encoder", num_heads=4)
    assert result.max_difference == 0
    with pytest.raises(vitrail.ConfigError, match="loaded model"):
        vitrail.convert(vitrail.load(tmp_path / "native"), tmp_path / "again", "timm", part="encoder")
