"""Strangers' files: no code runs, nothing crashes or hangs, nothing is half loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.collect_env
from safetensors.torch import load_file, save_file

import vitrail
from peer_models import huggingface_model, scramble
from peers import timm
from vitrail.weights.load import FORMATS
from vitrail.weights.save import convert_tensors, save, write_model

TINY = {"width": 64, "depth": 1, "mlp_dim": 64, "num_heads": 1, "image_size": 16, "num_classes": 3}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A small checkpoint of each kind of file, each in a folder of its own."""
    root = tmp_path_factory.mktemp("originals")
    peer = scramble(
        timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=64, depth=1, num_heads=1)
    )
    for name in ("safetensors", "pth", "old pth", "npz", "huggingface", "native"):
        (root / name).mkdir()
    save_file(peer.state_dict(), root / "safetensors" / "weights.safetensors")
    torch.save(peer.state_dict(), root / "pth" / "weights.pth")
    torch.save(peer.state_dict(), root / "old pth" / "weights.pth", _use_new_zipfile_serialization=False)
    model = scramble(vitrail.create_model("S/8", **TINY))
    write_model(model, FORMATS["google"], root / "npz")
    huggingface_model("ViT").save_pretrained(root / "huggingface")
    shutil.rmtree(root / "native")
    save(model, root / "native")
    return {folder.name: folder for folder in root.iterdir()}


def test_the_originals_load(originals):
    for folder in originals.values():
        vitrail.load(folder)


# Code in files


class Payload:
    """Unpickled, it would call something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class WithItems(Payload):
    """Unpickled, it would be filled with items, one of which calls something."""

    def __reduce__(self):
        function, arguments = self.call
        return dict, (), None, None, iter([("key", Payload(function, *arguments))])


class WithState:
    """Unpickled, it would be given its state by a method of its own."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return WithState, ("",), {"canary": self.canary}

    def __setstate__(self, state):
        Path(state["canary"]).mkdir()


def payloads(canary: str) -> dict[str, object]:
    """Five ways in which a pickle runs code; each would make a folder."""
    return {
        "a system call": Payload(os.system, f"mkdir '{canary}'"),
        "source code": Payload(exec, f"import os; os.mkdir({canary!r})"),
        "a function of PyTorch's that runs a command": Payload(torch.utils.collect_env.run, f"mkdir '{canary}'"),
        "a class given its state": WithState(canary),
        "an item deep in a container": [{"inner": (1, [WithItems(os.mkdir, canary)])}],
    }


STYLES = list(payloads(""))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("container", ["zip", "bare pickle", "handmade zip", "npz"])
def test_code_in_a_file_does_not_run(style, container, tmp_path):
    canary, path = tmp_path / "canary", tmp_path / "model.pth"
    payload = payloads(str(canary))[style]
    content = {"blocks.0.attn.qkv.weight": torch.zeros(3), "payload": payload}
    if container == "zip":
        torch.save(content, path)
    elif container == "bare pickle":
        torch.save(content, path, _use_new_zipfile_serialization=False)
    elif container == "npz":
        path = path.with_suffix(".npz")
        np.savez(path, cls=np.array([payload], dtype=object))
    else:  # nothing in it but the payload, which is what comes back from reading
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(payload, protocol=2))
            archive.writestr("archive/version", "3\n")
    with pytest.raises(vitrail.WeightsError) as caught:
        vitrail.load(path)
    assert not canary.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("style", STYLES)
def test_the_payloads_are_live(style, tmp_path):
    """Read by a careless program, they do run: or the test above would prove nothing."""
    canary = tmp_path / "canary"
    pickle.loads(pickle.dumps(payloads(str(canary))[style], protocol=2))
    assert canary.exists()


def test_a_refusal_says_why_and_what_to_do(tmp_path):
    torch.save({"model": {}, "args": Payload(os.system, "true")}, tmp_path / "model.pth")
    with pytest.raises(vitrail.WeightsError, match=r"posix.system.*safetensors.torch.save_file"):
        vitrail.load(tmp_path / "model.pth")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file_is_refused(tmp_path):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)), tmp_path / "model.pth")
    with pytest.raises(vitrail.WeightsError):
        vitrail.load(tmp_path / "model.pth")


# Traps


def test_an_archive_that_unpacks_to_far_too_much_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**7,)})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cls.npy", header.getvalue() + bytes(4 * 10**7))
    with pytest.raises(vitrail.WeightsError, match="40,000,"):
        vitrail.load(tmp_path / "bomb.npz")


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    torch.save({"blocks.0.attn.qkv.weight": torch.zeros(1).expand(10**12)}, tmp_path / "model.pth")
    with pytest.raises(vitrail.WeightsError, match="more values"):
        vitrail.load(tmp_path / "model.pth")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/inside.safetensors", ".hidden", ".."])
def test_no_path_is_followed_out_of_the_folder(name, tmp_path, originals):
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    for place in (tmp_path / "outside.safetensors", tmp_path / "folder" / "sub" / "inside.safetensors"):
        shutil.copy(originals["safetensors"] / "weights.safetensors", place)
    index = {"weight_map": {"cls_token": name}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(vitrail.WeightsError, match="own folder"):
        vitrail.load(tmp_path / "folder")


def test_a_split_checkpoint_is_put_together(originals, tmp_path):
    tensors = load_file(originals["safetensors"] / "weights.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(vitrail.load(tmp_path).class_token, tensors["cls_token"][0])


# Damage


def damaged(folder: Path, change) -> Path:
    """A copy of a checkpoint with the names and shapes of its tensors changed."""
    path = folder / "weights.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return path


@pytest.fixture
def copy(originals, tmp_path):
    def make(kind: str) -> Path:
        return Path(shutil.copytree(originals[kind], tmp_path / "copy", dirs_exist_ok=True))

    return make


def test_what_is_missing_left_over_and_misshapen_is_listed(copy):
    def change(tensors):
        tensors["blocks.0.mlp.fc3.weight"] = tensors.pop("blocks.0.mlp.fc2.weight")
        tensors["norm.weight"] = torch.zeros(7)

    with pytest.raises(vitrail.WeightsError, match=r"blocks\.0\.mlp\.fc2\.weight is missing"):
        vitrail.load(damaged(copy("safetensors"), change))

    def change_more(tensors):
        tensors["left.over"] = tensors.pop("blocks.0.attn.proj.bias")
        tensors["norm.weight"] = torch.zeros(7)
        tensors["head.bias"] = torch.zeros(1000, dtype=torch.int32)

    with pytest.raises(vitrail.WeightsError) as caught:
        vitrail.load(damaged(copy("safetensors"), change_more))
    message = str(caught.value)
    assert "missing: blocks.0.attn.proj.bias" in message
    assert "left over: left.over" in message
    assert "norm.weight is (7,), expected (64,)" in message
    assert "not floating point: head.bias" in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty"),
        (b"\x00" * 100, "not a file of weights"),
        (b"\xff\xd8\xff\xe0" + b"\x00" * 100, "image.*vitrail predict"),
        (b"<html>404 Not Found</html>", "not a file of weights"),
        (b"PK\x03\x04 nothing more", "damaged"),
        (b"\x80\x02 not a pickle", "refused|damaged"),
        (struct.pack("<Q", 2**60) + b"{}", "damaged"),
        (struct.pack("<Q", 2) + b"{}", "no tensors"),
    ],
)
def test_files_that_are_no_weights(content, sentence, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(vitrail.WeightsError, match=sentence):
        vitrail.load(tmp_path / "model.safetensors")


def test_places_where_there_is_nothing(tmp_path):
    for source, sentence in [
        (tmp_path, "holds no weights"),
        (tmp_path / "nothing", "there is no model"),
        ("hf:only-one-word", "not hf:owner/name"),
    ]:
        with pytest.raises(vitrail.VitrailError, match=sentence):
            vitrail.load(source)
    save_file({"something": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(vitrail.WeightsError, match=r"no Vision Transformer.*it holds something"):
        vitrail.load(tmp_path)
    save_file({"else": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(vitrail.WeightsError, match="several files"):
        vitrail.load(tmp_path)


# Pipes, devices and links


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "SHA256SUMS", "README.md"])
def test_pipes_and_devices_in_a_model_folder_are_refused(name, kind, originals, tmp_path):
    folder = Path(shutil.copytree(originals["native"], tmp_path / "model"))
    (folder / name).unlink()
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    if name == "README.md":  # nothing in it is needed
        assert vitrail.load(folder).origin.licence is None
        return
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(vitrail.WeightsError, match=r"not a file|leads out of|neither a file"):
            vitrail.load(source)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "SHA256SUMS"])
def test_links_out_of_a_model_folder_are_not_followed(name, originals, tmp_path):
    folder, secret = Path(shutil.copytree(originals["native"], tmp_path / "model")), tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(vitrail.WeightsError, match="leads out of"):
        vitrail.load(folder)


def test_links_through_a_folder_out_of_a_model_folder_are_not_followed(originals, tmp_path):
    folder = Path(shutil.copytree(originals["native"], tmp_path / "model"))
    (folder / "model.safetensors").rename(tmp_path / "away.safetensors")
    (folder / "up").symlink_to("..")
    (folder / "model.safetensors").symlink_to("up/away.safetensors")
    with pytest.raises(vitrail.WeightsError, match="leads out of"):
        vitrail.load(folder)


def test_links_to_themselves(originals, tmp_path):
    for name in ("config.json", "model.safetensors"):
        folder = Path(shutil.copytree(originals["native"], tmp_path / name))
        (folder / name).unlink()
        (folder / name).symlink_to(name)
        with pytest.raises(vitrail.WeightsError, match="leads nowhere"):
            vitrail.load(folder)


def test_links_inside_a_model_folder_are_followed(originals, tmp_path):
    folder = Path(shutil.copytree(originals["native"], tmp_path / "model"))
    for name in ("config.json", "model.safetensors"):
        (folder / "inner").mkdir(exist_ok=True)
        (folder / name).rename(folder / "inner" / name)
        (folder / name).symlink_to(f"inner/{name}")
    vitrail.load(folder)
    (tmp_path / "link").symlink_to(folder)  # the folder itself, and a file, are as the user named them
    vitrail.load(tmp_path / "link")
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights.npz").symlink_to(next(originals["npz"].glob("*.npz")))
    vitrail.load(other / "weights.npz", num_heads=1)


def test_a_snapshot_of_the_hub_is_a_folder_of_links(originals, tmp_path):
    repository = tmp_path / "models--someone--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(originals["huggingface"].iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    vitrail.load(snapshot)
    (repository / "blobs").rename(tmp_path / "elsewhere")
    (repository / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(vitrail.WeightsError, match="leads out of"):
        vitrail.load(snapshot)


def test_links_into_the_hubs_cache_are_followed(originals, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = Path(shutil.copytree(originals["native"], tmp_path / "model"))
    (tmp_path / "hub").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "hub" / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "hub" / "blob")
    vitrail.load(folder)


def test_a_device_does_not_suggest_itself():
    with pytest.raises(vitrail.WeightsError, match="neither a file nor a folder") as caught:
        vitrail.load("/dev/zero")
    assert "did you mean" not in str(caught.value)


# What is said about what was read


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_mentioned(value, dtype, originals, tmp_path, caplog):
    tensors = {k: v.to(dtype) for k, v in load_file(originals["safetensors"] / "weights.safetensors").items()}
    save_file(tensors, tmp_path / "a.safetensors")
    assert not any("not finite" in note for note in vitrail.load(tmp_path / "a.safetensors").origin.notes)
    tensors["blocks.0.mlp.fc1.weight"][3, 5] = value
    save_file(tensors, tmp_path / "a.safetensors")
    model = vitrail.load(tmp_path / "a.safetensors")
    assert any("not finite" in note and "mlp" in note for note in model.origin.notes)
    assert "not finite" in caplog.text
    caplog.clear()
    save(model, tmp_path / "native")
    again = vitrail.load(tmp_path / "native")
    assert caplog.text.count("not finite") == 1
    assert again.origin.notes == model.origin.notes


def test_large_weights_are_finite(originals, tmp_path):
    tensors = load_file(originals["safetensors"] / "weights.safetensors")
    tensors["blocks.0.mlp.fc1.weight"].fill_(3e38)  # their sum is infinite
    save_file(tensors, tmp_path / "a.safetensors")
    assert not any("not finite" in note for note in vitrail.load(tmp_path / "a.safetensors").origin.notes)


def test_labels_that_do_not_fit_are_mentioned(originals, tmp_path):
    folder = Path(shutil.copytree(originals["huggingface"], tmp_path / "huggingface"))
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "cat", "1": "dog"}
    (folder / "config.json").write_text(json.dumps(config))
    model = vitrail.load(folder)
    assert model.labels is None
    assert any("2 labels" in note for note in model.origin.notes)
    folder = Path(shutil.copytree(originals["safetensors"], tmp_path / "timm"))
    architecture = {"architecture": "vit_tiny_patch16_224", "label_names": ["cat", "dog"]}
    (folder / "config.json").write_text(json.dumps(architecture))
    assert any("2 labels" in note for note in vitrail.load(folder).origin.notes)


def test_control_characters_are_escaped(originals, tmp_path, caplog):
    evil = "\x1b[2J\nerror: \x07"
    save_file({evil: torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(vitrail.WeightsError, match=r"it holds \\x1b\[2J\\nerror") as caught:
        vitrail.load(tmp_path / "a.safetensors")
    assert str(caught.value).isprintable()
    torch.save({evil: torch.zeros(2).to_sparse()}, tmp_path / "a.pth")
    with pytest.raises(vitrail.WeightsError) as caught:
        vitrail.load(tmp_path / "a.pth")
    assert "\x1b" not in str(caught.value)
    model = vitrail.load(originals["native"])
    model.labels = (evil, "a | b", "c")
    model.origin = vitrail.config.Origin(source=evil, format="timm", licence=f"mit\n{evil}", notes=(evil,))
    save(model, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert card.replace("\n", "").isprintable()
    assert "\nerror" not in card
    assert vitrail.load(tmp_path / "model").labels[0] == evil
    assert "\x1b" not in caplog.text


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also where a flipped bit made a NaN."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.contiguous().numpy().tobytes() == b.detach().contiguous().numpy().tobytes()
    )


def independent_read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=True, map_location="cpu")


def mutate(path: Path, rng: random.Random) -> str:
    content = bytearray(path.read_bytes())
    # Headers are where damage is most interesting, and a small part of a file.
    place = rng.randrange(min(len(content), 4000)) if rng.random() < 0.6 else rng.randrange(len(content))
    kind = rng.choice(["flip a bit", "flip a bit", "random byte", "cut short", "drop bytes", "double bytes", "zeros"])
    if kind == "flip a bit":
        content[place] ^= 1 << rng.randrange(8)
    elif kind == "random byte":
        content[place] = rng.randrange(256)
    elif kind == "cut short":
        del content[place:]
    elif kind == "drop bytes":
        del content[place : place + rng.randrange(1, 9)]
    elif kind == "double bytes":
        content[place:place] = content[place : place + rng.randrange(1, 9)]
    else:
        content[place : place + 16] = bytes(len(content[place : place + 16]))
    path.write_bytes(content)
    return f"{kind} at {place}"


def rename_a_key(path: Path, rng: random.Random) -> str:
    tensors = independent_read(path)
    name = rng.choice(sorted(tensors))
    tensors[rng.choice([name + "x", name[1:], "x", name.replace(".", "_")])] = tensors.pop(name)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    elif path.suffix == ".npz":
        np.savez(path, **{key: tensor.numpy() for key, tensor in tensors.items()})
    else:
        torch.save(tensors, path)
    return f"renamed {name}"


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["safetensors", "pth", "old pth", "npz", "huggingface"])
def test_damaged_files(kind, count, originals, tmp_path):
    """Loading raises an error of ours, or gives a model whose tensors are the file's bytes. Never anything else."""
    rng = random.Random(kind)
    loaded = 0
    for number in range(count):
        folder = Path(shutil.copytree(originals[kind], tmp_path / str(number)))
        weights = next(p for p in folder.iterdir() if p.suffix in (".safetensors", ".pth", ".npz"))
        victim = rng.choice([weights] * 4 + sorted(folder.glob("*.json")))
        what = rename_a_key(weights, rng) if rng.random() < 0.1 else mutate(victim, rng)
        try:
            model = vitrail.load(folder)
        except vitrail.VitrailError:
            continue
        loaded += 1
        found = convert_tensors(model, FORMATS[model.origin.format], model.origin.dialect)
        expected = independent_read(weights)
        assert found.keys() == expected.keys(), what
        assert all(same_bytes(found[name], expected[name]) for name in found), what
        shutil.rmtree(folder)
    assert loaded < count
    assert loaded or count < 200  # an npz has checksums, so very few damaged ones load


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.slow)])
def test_a_native_folder_notices_every_damaged_byte(count, originals, tmp_path):
    rng = random.Random(0)
    for number in range(count):
        folder = Path(shutil.copytree(originals["native"], tmp_path / str(number)))
        victim = folder / rng.choice(["model.safetensors", "model.safetensors", "config.json", "SHA256SUMS"])
        before = victim.read_bytes()
        place = rng.randrange(len(before))
        victim.write_bytes(before[:place] + bytes([before[place] ^ (1 << rng.randrange(8))]) + before[place + 1 :])
        with pytest.raises(vitrail.WeightsError):
            vitrail.load(folder)
        shutil.rmtree(folder)
    (Path(shutil.copytree(originals["native"], tmp_path / "bare")) / "SHA256SUMS").unlink()
    with pytest.raises(vitrail.WeightsError, match="no SHA256SUMS"):
        vitrail.load(tmp_path / "bare")


@pytest.mark.skipif(sys.platform == "win32", reason="sha256sum is not on Windows")
def test_the_hashes_are_in_a_format_that_people_can_check(originals):
    assert os.system(f"cd '{originals['native']}' && sha256sum --check --quiet SHA256SUMS") == 0
