"""Any model of timm's: loaded, saved, converted, fine-tuned; and what a stranger's folder cannot make timm do.

Nothing can be downloaded here, so timm's pretrained models are replaced by the same with random weights.
"""

from __future__ import annotations

import importlib
import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file, save_file

import vitrail
from peer_models import images_for
from peers import timm
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.timm_model import TimmModel, measure_activation_bytes
from vitrail.training.build import build_model
from vitrail.training.run_training import run_training
from vitrail.weights.formats.native import CHECKSUM_FILE, format_checksums
from vitrail.weights.formats.timm_built import describe_timm_network
from vitrail.workflows.finetune_settings import choose_image_size, count_batch_parts

pytestmark = pytest.mark.slow  # many random architectures

SMALL = "test_efficientnet"
OTHER_VIT = "vit_dwee_patch16_reg1_gap_256"
FAMILIES = [SMALL, "resnet10t", "test_convnext", OTHER_VIT, "efficientvit_m0"]
"""With batch norm; tested at another size than trained; layer norm; a ViT with what ours do not have; with buffers that
are in no checkpoint."""


@torch.no_grad()
def randomised(network: torch.nn.Module) -> torch.nn.Module:
    """Every tensor of a checkpoint, no other."""
    generator = torch.Generator().manual_seed(0)
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator) * 0.1
            tensor.copy_(noise + (0.9 if tensor.ndim == 1 else -0.05))
    return network.eval()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder as `save` writes it."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        return vitrail.save(vitrail.load(f"timm:{SMALL}"), tmp_path_factory.mktemp("original") / "saved")


@pytest.fixture
def saved(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "saved"))


@pytest.fixture
def pretrained(monkeypatch):
    return stand_in(monkeypatch)


def stand_in(patch):
    """Gives timm's pretrained networks as timm would, and notes which."""
    plain, asked = timm.create_model, []

    def create_model(name, pretrained=False, **options):
        if not pretrained:
            return plain(name, **options)
        asked.append(name)
        return randomised(plain(name, **options))

    patch.setattr(timm, "create_model", create_model)
    create_model.asked = asked
    return create_model


def rewritten(folder, **changed):
    """With other fields in its architecture, and hashes that fit."""
    config = json.loads((folder / "config.json").read_text())
    config["architecture"] |= changed
    (folder / "config.json").write_text(json.dumps(config))
    (folder / CHECKSUM_FILE).write_text(format_checksums(folder))
    return folder


# In and out


@pytest.mark.parametrize("name", [*FAMILIES[:-1], pytest.param(FAMILIES[-1], marks=pytest.mark.slow)])
def test_loaded_saved_and_loaded_again_it_computes_what_timm_computes(name, pretrained, tmp_path):
    theirs, model = pretrained(name, pretrained=True), vitrail.load(f"timm:{name}")
    assert isinstance(model, TimmModel)
    images = images_for(model.image_size)
    vitrail.save(model, tmp_path / "model")
    asked = len(pretrained.asked)
    again = vitrail.load(tmp_path / "model")
    assert len(pretrained.asked) == asked, "a folder has all that is needed"
    with torch.no_grad():
        expected = theirs(images)
        assert expected.std() > 0
        for found in (model, again):
            assert torch.equal(found(images), expected)
            features = theirs.forward_features(images)
            assert torch.equal(found.embed(images), theirs.forward_head(features, pre_logits=True))
    for fact in ("architecture", "preprocessing", "labels", "origin"):
        assert getattr(again, fact) == getattr(model, fact)
    written = load_file(tmp_path / "model" / "model.safetensors")
    timm.create_model(name).load_state_dict(written)  # under timm's names, so that timm reads it too


@pytest.mark.parametrize("name", [*FAMILIES, "tf_efficientnet_l2.ns_jft_in1k"])
def test_pixels_are_prepared_as_timm_prepares_them_for_tests(name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    told = importlib.import_module("timm.data").resolve_model_data_config(theirs, use_test_size=True)
    described = describe_timm_network(f"timm:{name}", theirs.pretrained_cfg, theirs.num_classes)
    found = vitrail.Preprocessing(**described["preprocessing"])
    assert found.image_size == tuple(described["architecture"]["image_size"]) == told["input_size"][1:]
    assert (found.mean, found.std) == (told["mean"], told["std"])
    assert (found.crop_fraction, found.interpolation) == (told["crop_pct"], told["interpolation"])
    assert (found.resize, found.crop_rounding, told["crop_mode"]) == ("cover", "even", "center")
    assert described["origin"]["licence"] == theirs.pretrained_cfg["license"]
    notes = " ".join(described["origin"]["notes"])
    assert ("224" in notes and "176" in notes) if name == "resnet10t" else not notes


def test_what_our_own_models_hold_stays_theirs(pretrained):
    assert isinstance(vitrail.load("timm:test_vit"), vitrail.VisionTransformer)
    assert isinstance(vitrail.load("timm:test_vit", num_heads=1), vitrail.VisionTransformer)
    with pytest.raises(vitrail.WeightsError, match="num_heads 7"):
        vitrail.load("timm:test_vit", num_heads=7)


def test_the_name_is_kept_with_its_tag(pretrained):
    model = vitrail.load(f"timm:{SMALL}")
    assert model.architecture == TimmArchitecture(name=f"{SMALL}.r160_in1k", image_size=160, num_classes=1000)
    assert vitrail.load(f"timm:{SMALL}.r160_in1k").architecture == model.architecture
    assert (model.origin.source, model.origin.format) == (f"timm:{SMALL}", "timm")


def test_options(pretrained):
    model = vitrail.load(f"timm:{SMALL}", num_classes=3, image_size=(64, 96), dropout=0.5, dtype=torch.bfloat16)
    assert model.peer.drop_rate == model.architecture.dropout == 0.5
    assert model.preprocessing.image_size == model.image_size == (64, 96)
    logits = model(torch.zeros(2, 3, 64, 96, dtype=torch.bfloat16))
    assert torch.equal(logits, torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(vitrail.WeightsError, match="has no option 'num_heads'"):
        vitrail.load(f"timm:{SMALL}", num_heads=3)


def test_another_type_is_saved_as_it_is(pretrained, tmp_path):
    dtype = torch.float64
    model = vitrail.load("timm:efficientvit_m0", dtype=dtype)
    again = vitrail.load(vitrail.save(model, tmp_path / "model"))
    images = images_for((224, 224)).to(dtype)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    assert {b.dtype for b in again.buffers() if b.is_floating_point()} == {dtype}


def test_changed_then_saved_it_is_the_same(pretrained, tmp_path):
    model = vitrail.load(f"timm:{OTHER_VIT}", num_classes=2, image_size=96)
    model.labels = ["cat", "dog"]
    model.initialise_head(1.5)
    again = vitrail.load(vitrail.save(model, tmp_path / "model"))
    with torch.no_grad():
        assert torch.equal(again.embed(images_for((96, 96))), model.embed(images_for((96, 96))))
    assert again.labels == ("cat", "dog")
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| network of timm | {model.architecture.name} |" in card
    assert model.architecture.name.startswith(f"{OTHER_VIT}.")
    assert "- timm\n- vitrail" in card


def test_conversions(saved, tmp_path):
    certificate = vitrail.convert(saved, tmp_path / "native", "native")
    assert certificate.max_difference == 0
    assert certificate.preprocessing_matches
    for weight_format in ("timm", "torchvision", "huggingface", "google"):
        with pytest.raises(vitrail.WeightsError, match=f"{weight_format}.*{SMALL}"):
            vitrail.convert(saved, tmp_path / weight_format, weight_format)
        assert not (tmp_path / weight_format).exists()


def test_a_folder_of_timms_says_how_to_get_it(pretrained, tmp_path):
    timm.models.save_for_hf(pretrained(SMALL, pretrained=True), tmp_path, safe_serialization=True)
    with pytest.raises(vitrail.WeightsError, match=f"'{SMALL}'.*timm:NAME"):
        vitrail.load(tmp_path)


# Strangers


@pytest.fixture
def unreachable(monkeypatch):
    """No address may be asked for."""

    def refused(*_, **__):
        raise AssertionError("something wants to reach the network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.mark.parametrize(
    "name",
    [
        *("hf-hub:timm/resnet10t", "hf_hub:a/b", "local-dir:{folder}", "{folder}", "../saved", "resnet10t/../x"),
        *(
            "https://example.org/x",
            "",
            "resnet10t\n",
            "no_such_network",
            f"{SMALL}.no_such_tag",
            7,
            None,
            ["resnet10t"],
        ),
    ],
)
def test_a_folder_cannot_make_timm_fetch_or_read_anything(name, saved, unreachable, monkeypatch):
    name = name.format(folder=saved) if isinstance(name, str) else name
    for loader in ("load_model_config_from_hf", "load_model_config_from_path", "load_checkpoint"):
        monkeypatch.setattr(timm.models._factory, loader, lambda *_, **__: pytest.fail("timm went looking"))
    with pytest.raises(vitrail.WeightsError) as caught:
        vitrail.load(rewritten(saved, name=name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"name": "resnet10t"}, "missing: "),
        ({"name": "vit_7b_patch16_dinov3", "image_size": 4000}, "256 pixels"),
        ({"name": "vit_7b_patch16_dinov3", "image_size": 512}, "missing: "),
        ({"num_classes": 10**6}, "wrong shape: classifier.weight"),
        ({"num_classes": 10**9}, "num_classes = 1000000000"),
        ({"in_channels": 10**6}, "wrong shape: conv_stem.weight"),
        ({"image_size": [0, 0]}, "image_size"),
        ({"dropout": 2}, "dropout = 2"),
        ({"pretrained": True}, "unknown option 'pretrained'"),
    ],
)
def test_a_folder_that_describes_another_network(changed, sentence, saved, unreachable):
    with pytest.raises(vitrail.WeightsError, match=sentence):
        vitrail.load(rewritten(saved, **changed))


def test_tables_of_indices_are_timms_not_the_files(pretrained, tmp_path):
    """A stranger's could point outside of what they choose from."""
    theirs, model = pretrained("efficientformer_l1", pretrained=True), vitrail.load("timm:efficientformer_l1")
    folder = vitrail.save(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (table,) = [name for name in tensors if name.endswith("attention_bias_idxs")]
    tensors[table] += 10**9
    save_file(tensors, folder / "model.safetensors")
    (folder / CHECKSUM_FILE).write_text(format_checksums(folder))
    images = images_for(model.image_size)
    with torch.no_grad():
        for found in (model, vitrail.load(folder)):
            assert torch.equal(found(images), theirs(images))


def test_damage_is_noticed(saved):
    content = bytearray((saved / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(vitrail.WeightsError, match=r"model\.safetensors"):
        vitrail.load(saved)


@pytest.mark.parametrize("name", ["hf-hub:timm/test_efficientnet", "local-dir:folder"])
def test_only_plain_names_lead_to_timms_own_networks(name, pretrained, monkeypatch):
    """A config from elsewhere may tell timm's constructor anything, which a name cannot say again."""
    network = pretrained(SMALL, pretrained=True)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: network)
    with pytest.raises(vitrail.ConfigError, match=f"timm:{SMALL}"):
        vitrail.load(f"timm:{name}")


def test_without_timm(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    for source in (saved, f"timm:{SMALL}"):
        with pytest.raises(vitrail.MissingExtraError, match=r"pip install .*timm"):
            vitrail.load(source)


# Training


def fine_tuning(folder, name: str = SMALL, **sections):
    tree = {
        "model": {"weights": f"timm:{name}", "image_size": 32},
        "data": {"source": "digits", "batch_size": 16, "augmentation": {"crop_area": (0.6, 1.0), "flip": 0.0}},
        "optimizer": {"learning_rate": 3e-3, "averaging": 0.5, "weight_decay": 0.05},
        "schedule": {"steps": 3, "warmup_steps": 1},
        "objective": {},
        "run": {"folder": str(folder), "log_every": 1, "checkpoint_every": 2, "trackers": ()},
    }
    return runs.resolve({section: {**values, **sections.get(section, {})} for section, values in tree.items()})


@pytest.mark.slow
def test_fine_tuned_the_run_loads_and_goes_on(pretrained, tmp_path):
    changed = {"model": {"weights": f"timm:{SMALL}", "stochastic_depth": 0.1}, "optimizer": {"layer_decay": 0.7}}
    config = fine_tuning(tmp_path / "run", **changed)
    run_training(config)
    losses = runs.losses(tmp_path / "run")
    assert len(losses) == 3
    assert losses[0] > losses[-1]
    assert all(entry["clock"]["flops_per_second"] > 0 for entry in runs.records(tmp_path / "run", clock=True)[:1])
    model = vitrail.load(tmp_path / "run")
    assert (model.num_classes, model.image_size, model.in_channels) == (10, (32, 32), 3)
    assert model.origin.source == f"timm:{SMALL}"
    assert "trained further since" in model.origin.notes
    before = vitrail.load(f"timm:{SMALL}").state_dict()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # From the last checkpoint, with batch norm's statistics and the average, to the same model.
    written = load_file(tmp_path / "run" / "model" / "model.safetensors")
    run_training(config)
    again = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in written.items())


def test_the_bias_of_a_new_head(pretrained, tmp_path):
    config = fine_tuning(tmp_path, objective={"head_bias": -10.0, "loss": "sigmoid"})
    model = build_model(config, vitrail.open_data("digits"))
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.full((2, 10), -10.0))


@pytest.mark.slow
def test_fine_tuned_from_a_native_folder(saved, tmp_path):
    run_training(fine_tuning(tmp_path / "run", model={"weights": str(saved)}, run={"gradient_checkpointing": True}))
    assert vitrail.load(tmp_path / "run").num_classes == 10


@pytest.mark.slow
def test_what_cannot_be_trained_is_told_before(pretrained, tmp_path):
    with pytest.raises(vitrail.ConfigError, match=r"efficientvit_m0.* 32"):
        run_training(fine_tuning(tmp_path / "size", "efficientvit_m0"))
    with pytest.raises(vitrail.ConfigError, match="masked patches"):
        run_training(fine_tuning(tmp_path / "masked", objective={"kind": "masked-patches"}))
    assert not (tmp_path / "size").exists()


def test_how_finetune_chooses(pretrained, monkeypatch):
    model, bound = vitrail.load(f"timm:{SMALL}"), vitrail.load("timm:efficientvit_m0")
    assert choose_image_size(model, 1000, has_gpu=True) == (256, 256)  # 240 in whole steps of 32
    assert choose_image_size(model, 100, has_gpu=True) == (160, 160)
    assert choose_image_size(bound, 1000, has_gpu=True) == (224, 224)
    large = TimmModel(TimmArchitecture(name="resnet152", image_size=224, num_classes=10))
    assert choose_image_size(large, 1000, has_gpu=False) == (224, 224)
    assert choose_image_size(large, 1000, has_gpu=True) == (320, 320)

    image = measure_activation_bytes(model.architecture) // 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for room, parts in [(64, 1), (32, 2), (16, 4), (0.1, 64)]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda room=room: (room * image / 0.59, 0))
        assert count_batch_parts(model, (160, 160), 64) == parts
