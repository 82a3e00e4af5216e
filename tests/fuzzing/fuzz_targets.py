"""What the bytes of strangers are given to, and what may come of it: a result, or an error that says what is wrong.

Each target is a function of bytes. Everything else than a result or an allowed error is a finding.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import json
import shutil
import struct
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tomli_w
import torch
from PIL import Image
from safetensors.torch import load, save

import vitrail
from vitrail.data.open import open_data
from vitrail.data.task_data import TaskData
from vitrail.data.transforms.decode import FORMATS, decode_crop, decode_image
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.recipes import RECIPES
from vitrail.serving.http_errors import HttpError
from vitrail.serving.image_header import count_pixels
from vitrail.serving.request_body import read_multipart
from vitrail.tasks.registry import TASKS
from vitrail.training.resolve import SECTIONS, list_keys, read_toml, resolve
from vitrail.weights.formats.native import CHECKSUM_FILE
from vitrail.weights.save import save as save_model

MOST_PIXELS = 1_000_000
SMALL = {"image_size": 8, "width": 8, "depth": 1, "num_heads": 1, "mlp_dim": 8, "num_classes": 2}


class Target(NamedTuple):
    """What is fuzzed."""

    run: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...]
    """The errors that it may raise."""
    make_seeds: Callable[[], Iterator[bytes]]
    """Whole inputs to start from."""
    words: tuple[str, ...] = ()
    """What inputs are made of, which chance would not find."""


@cache
def make_scratch_folder() -> Path:
    """Return a folder of this process for the files of the targets."""
    folder = Path(tempfile.mkdtemp(prefix="vitrail-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def open_empty_folder(name: str) -> Iterator[Path]:
    """Yield an empty folder, and remove it."""
    folder = make_scratch_folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Images


def write_image(kind: str, mode: str = "RGB", size: tuple[int, int] = (12, 9), **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert("RGB").convert(mode).save(file, kind, **options)
    return file.getvalue()


def seed_images() -> Iterator[bytes]:
    for kind in FORMATS:
        yield write_image(kind)
    yield write_image("JPEG", "L", (33, 17), quality=30)
    yield write_image("JPEG", "CMYK", (24, 24))
    yield write_image("JPEG", "RGB", (40, 40), progressive=True)
    yield write_image("PNG", "P")
    yield write_image("PNG", "1")
    yield write_image("GIF", "L", save_all=True)
    yield write_image("TIFF", "1", (64, 64), compression="group4")
    yield write_image("TIFF", "RGB", compression="tiff_lzw")
    yield write_image("WEBP", "RGB", lossless=True)


def read_image(content: bytes) -> None:
    """Decode an image in both ways; its header must not promise fewer pixels than there are."""
    promised = count_pixels(content)
    pixels = decode_image(content, MOST_PIXELS)
    assert pixels.dtype == torch.uint8
    assert pixels.ndim == 3
    count = pixels.shape[1] * pixels.shape[2]
    assert 0 < count <= MOST_PIXELS
    assert promised is None or promised >= count, (promised, count)
    crop = decode_crop(content, lambda height, width: (0, 0, height, width), (8, 8), MOST_PIXELS)
    assert crop.shape[1:] == (8, 8)


# Weights


@cache
def make_weights() -> dict[str, bytes]:
    """Return the files of a small model's folder."""
    with open_empty_folder("model") as folder:
        save_model(vitrail.create_model("Ti/4", seed=0, **SMALL), folder / "tiny")
        return {path.name: path.read_bytes() for path in (folder / "tiny").iterdir()}


def make_timm_weights() -> dict[str, torch.Tensor]:
    """Return the same model's weights by timm's names."""
    with open_empty_folder("timm") as folder:
        vitrail.convert(vitrail.create_model("Ti/4", seed=0, **SMALL), folder / "tiny", "timm")
        (file,) = (folder / "tiny").glob("*.safetensors")
        return load(file.read_bytes())


def seed_weights() -> Iterator[bytes]:
    tensors = make_timm_weights()
    yield b"s" + save(tensors)
    yield b"s" + save({name: tensor.half() for name, tensor in tensors.items()})
    for old in (False, True):
        file = io.BytesIO()
        some = {"state_dict": dict(list(tensors.items())[:2]), "epoch": 3}
        torch.save(some, file, _use_new_zipfile_serialization=not old)
        yield b"p" + file.getvalue()
    file = io.BytesIO()
    np.savez(file, **{"cls": np.zeros((1, 1, 4), np.float32)})
    yield b"n" + file.getvalue()


def load_weights(content: bytes) -> None:
    """Load a file of weights; the first byte says of which kind."""
    ending = {b"p": ".pth", b"n": ".npz"}.get(content[:1], ".safetensors")
    with open_empty_folder("weights") as folder:
        (folder / f"weights{ending}").write_bytes(content[1:])
        vitrail.load(folder / f"weights{ending}", num_heads=1)


def seed_model_configs() -> Iterator[bytes]:
    yield make_weights()["config.json"]
    yield b'{"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32}'
    yield b'{"architecture": "vit_tiny_patch16_224", "num_classes": 3, "pretrained_cfg": {"mean": [0.5]}}'


def load_model_folder(content: bytes) -> None:
    """Load a folder whose weights are whole, and whose config.json is not ours."""
    files = {**make_weights(), "config.json": content}
    del files[CHECKSUM_FILE]
    sums = "".join(f"{hashlib.sha256(each).hexdigest()}  {name}\n" for name, each in files.items())
    with open_empty_folder("folder") as folder:
        for name, each in {**files, CHECKSUM_FILE: sums.encode()}.items():
            (folder / name).write_bytes(each)
        vitrail.load(folder)


# Configurations


def seed_configs() -> Iterator[bytes]:
    yield b'[model]\nname = "Ti/16"\n[data]\nsource = "photos"\nbatch_size = 8\n[schedule]\nsteps = 3\n'
    yield b"recipe = 3\n[run]\nseed = 1e400\nfolder = 'x'\n[data.augmentation]\ncrop_area = [0.1, 1.0]\n"
    yield b'[objective]\nkind = "dino"\nviews = {flip = 0.5}\n[optimizer]\nkind = "muon"\nlearning_rate = -1\n'
    yield from (tomli_w.dumps(recipe.config).encode() for recipe in list(RECIPES.values())[:6])
    yield b"a.b.c = 1979-05-27T07:32:00Z\nx = [[1, 2], {y = nan}]\n"


def read_config(content: bytes) -> None:
    path = make_scratch_folder() / "config.toml"
    path.write_bytes(content)
    resolve(read_toml(path))


# Data


def seed_shards() -> Iterator[bytes]:
    photo = write_image("JPEG")
    for members in (
        {"0001.jpg": photo, "0001.cls": b"0", "0002.jpg": photo, "0002.cls": b"1"},
        {"0001.jpg": photo, "0001.json": b'{"label": "cat"}', "../x.jpg": photo, "../x.json": b'{"label": 3}'},
        {"a/1.png": write_image("PNG"), "a/1.txt": "Größe".encode()},
    ):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        yield file.getvalue()


def read_shards(content: bytes) -> int:
    with open_empty_folder("shards") as folder:
        (folder / "shard-000000.tar").write_bytes(content)
        return read_samples(folder)


def read_samples(data: object) -> int:
    """Open data, decode the images that can be, and return how many. The others are the data's own problem."""
    source, count = open_data(data), 0
    for number in range(min(len(source), 20)):
        try:
            sample = source.read_checked(number)
            if isinstance(sample.content, bytes):
                decode_image(sample.content, MOST_PIXELS)
            count += 1
        except DataError:
            continue
    return count


def seed_tables() -> Iterator[bytes]:
    yield b"c" + b"image,label,split\na.jpg,cat,train\nb.jpg,dog,train\na.jpg,cat,val\n"
    yield b"c" + b'image,tags\na.jpg,"x|y"\nb.jpg,\n../b.jpg,"[""x""]"\n'
    yield b"c" + b"image;age;height\na.jpg;3.5;1e3\nb.jpg;nan;\n"
    yield b"l" + b'{"image": "a.jpg", "label": "cat"}\n{"image": "b.jpg", "label": 3, "x": [1, {"y": null}]}\n'
    yield b"j" + json.dumps([{"image": "a.jpg", "tags": ["x", "y"]}, {"image": "b.jpg", "tags": []}]).encode()


def read_table(content: bytes) -> int:
    """Read a table of annotations as each kind of task, beside two photos that it may name."""
    ending = {b"l": ".jsonl", b"j": ".json"}.get(content[:1], ".csv")
    with open_empty_folder("table") as folder:
        for name in ("a.jpg", "b.jpg"):
            (folder / name).write_bytes(PHOTO)
        (folder / f"table{ending}").write_bytes(content[1:])
        count, table = 0, folder / f"table{ending}"
        for task in (None, *TASKS):
            with suppress(DataError, ConfigError):
                count += read_samples(table if task is None else TaskData(table, task))
    return count


PHOTO = write_image("JPEG")


# Requests


def seed_forms() -> Iterator[bytes]:
    part = (
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="a.png"\r\nContent-Type: image/png\r\n\r\nabc\r\n'
    )
    yield b"boundary=x\n" + part + b"--x--\r\n"
    yield b"boundary=x\n" + part * 3 + b"--x--\r\n"
    yield b'boundary="x y"\n--x y\r\n\r\n\r\n--x y--'


def read_form(content: bytes) -> None:
    head, _, body = content.partition(b"\n")
    read_multipart(body, [(b"content-type", b"multipart/form-data; " + head)], 2)


def seed_headers() -> Iterator[bytes]:
    for content in seed_images():
        yield content[:200]
    yield b"\xff\xd8" + struct.pack(">HH", 0xFFE0, 2) * 20


NUMBERS = ("-1", "0", "1e400", "NaN", "1.5", "4096", "99999999999999999999", "true", "null", '""', "[]", "{}", "inf")
IN_MODEL_CONFIGS = (*json.loads(make_weights()["config.json"]), "kind", "pretrained_cfg", "model_type", *NUMBERS)
IN_RUN_CONFIGS = (*(key for section in SECTIONS for key in list_keys(section)), *SECTIONS, "[[", *NUMBERS)
IN_TABLES = ("image", "label", "tags", "split", "file_name", "a.jpg", "b.jpg", "\ufeff", "\r\n", "|", *NUMBERS)
TARGETS: dict[str, Target] = {
    "images": Target(read_image, (DataError,), seed_images),
    "image-headers": Target(count_pixels, (), seed_headers),
    "weights": Target(load_weights, (WeightsError,), seed_weights),
    "model-configs": Target(load_model_folder, (WeightsError, ConfigError), seed_model_configs, IN_MODEL_CONFIGS),
    "run-configs": Target(read_config, (ConfigError,), seed_configs, IN_RUN_CONFIGS),
    "shards": Target(read_shards, (DataError,), seed_shards),
    "tables": Target(read_table, (), seed_tables, IN_TABLES),
    "forms": Target(read_form, (HttpError,), seed_forms),
}


def run_target(target: Target, content: bytes) -> str:
    """Give bytes to a target, and return "read", "nothing" if that was 0 images, or the name of the allowed error.

    Raises:
        Exception: Any other error: a finding.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = target.run(content)
        except target.allowed as error:
            if not str(error).strip():
                raise AssertionError("an error without a sentence") from error
            return type(error).__name__
    return "nothing" if found == 0 and target.run is not count_pixels else "read"
