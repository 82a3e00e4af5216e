"""Images a second on one core: decode → random crop → flip → tensor, beside torchvision v2, timm and Pillow.

    pip install -c constraints.txt ".[test]"
    python benchmarks/data_speed.py --photos DIR --out benchmarks/results/data_speed_photos.json
    python benchmarks/data_speed.py --out benchmarks/results/data_speed.json

With `--photos` the images are the JPEGs of a folder and those below it, of about 500 × 375 pixels, in three classes of
file size; those of about 60 kB also as WebP and PNG. Without it, they are made from the two photographs inside
scikit-learn, enlarged, with noise like a camera's or without: how many bytes a JPEG has decides how long it takes to
read. All run in turn in one process with one thread; a figure is the median of the rounds. Then the libraries' whole
loaders, with one worker each.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from simplejpeg import decode_jpeg

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from peers import timm, torchvision
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.transforms.augment import Augmentation, augment_image, draw_crop_box
from vitrail.data.transforms.decode import decode_crop, decode_image
from vitrail.data.transforms.jpeg import load_decoder

v2 = importlib.import_module("torchvision.transforms.v2")  # only after `peers` has made torchvision importable
SIZE = 224
KINDS = {
    "500×375, smooth": (500, 375, 75, 0.0),
    "500×375": (500, 375, 90, 4.0),
    "500×375, much detail": (500, 375, 95, 6.0),
    "12 MP, smooth": (4000, 3000, 75, 0.0),
    "12 MP, some noise": (4000, 3000, 75, 4.0),
    "12 MP, much detail": (4000, 3000, 90, 4.0),
}
"""Width, height, JPEG quality, deviation of the noise."""
CLASSES = (30, 60, 110)
"""Sizes of real photographs, in kB."""
OWN_DECODER, STAND_IN = "torchvision, decode_jpeg", "torchvision on simplejpeg"
SIDES = (400, 640)
"""The longer side of a real photograph, in pixels; the shorter one has at least 300."""


def photographs(width: int, height: int, quality: int, noise: float, count: int) -> list[bytes]:
    from sklearn.datasets import load_sample_images

    found = []
    for number in range(count):
        rng, photo = random.Random(number), Image.fromarray(load_sample_images().images[number % 2])
        part_height = round(photo.height * rng.uniform(0.6, 1.0))
        part_width = min(round(part_height * width / height), photo.width)
        left, top = rng.randint(0, photo.width - part_width), rng.randint(0, photo.height - part_height)
        part = photo.crop((left, top, left + part_width, top + part_height)).resize((width, height), Image.BICUBIC)
        pixels = np.asarray(part) + np.random.default_rng(number).normal(0, noise, (height, width, 3))
        file = io.BytesIO()
        Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=quality)
        found.append(file.getvalue())
    return found


def choose_photographs(folder: Path, count: int) -> dict[str, list[bytes]]:
    """Return the JPEGs of a folder nearest to each of CLASSES, and those of the second class as WebP and PNG."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")):
        with Image.open(path) as image:
            is_fitting = image.format == "JPEG" and image.mode == "RGB"
            if is_fitting and SIDES[0] <= max(image.size) <= SIDES[1] and min(image.size) >= 300:
                found.append(path)
    classes: dict[str, list[bytes]] = {}
    for size in CLASSES:
        nearest = sorted(found, key=lambda path: abs(math.log(path.stat().st_size / (1000 * size))))[:count]
        classes[f"JPEG, {size} kB"] = [path.read_bytes() for path in nearest]
    images = [Image.open(io.BytesIO(content)).convert("RGB") for content in classes[f"JPEG, {CLASSES[1]} kB"]]
    for kind, options in (("WEBP", {"quality": 90}), ("PNG", {})):
        files = [io.BytesIO() for _ in images]
        for image, file in zip(images, files, strict=True):
            image.save(file, kind, **options)
        classes["WebP" if kind == "WEBP" else kind] = [file.getvalue() for file in files]
    return classes


def ours() -> Callable[[bytes], torch.Tensor]:
    rng, options = random.Random(0), Augmentation()

    def one(content: bytes) -> torch.Tensor:
        image = decode_crop(content, lambda height, width: draw_crop_box(height, width, rng), (SIZE, SIZE))
        return augment_image(image, options, rng)

    return one


def theirs(transform: Callable[[Image.Image], torch.Tensor]) -> Callable[[bytes], torch.Tensor]:
    return lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB"))


def with_pillow() -> Callable[[bytes], torch.Tensor]:
    """The same by Pillow alone, the way its documentation suggests: the box is a part of the resize."""
    rng = random.Random(0)

    def one(content: bytes) -> torch.Tensor:
        image = Image.open(io.BytesIO(content)).convert("RGB")
        top, left, height, width = draw_crop_box(image.height, image.width, rng)
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    return one


def chains() -> dict[str, Callable[[bytes], torch.Tensor]]:
    """The libraries' functions. torchvision has three: images of Pillow, tensors, and its own decoder of JPEGs.

    Where that decoder cannot be loaded, simplejpeg stands in for it: both call libjpeg-turbo.
    """
    crop, flip = v2.RandomResizedCrop(SIZE, scale=(0.05, 1.0), antialias=True), v2.RandomHorizontalFlip()
    from_timm = timm.data.create_transform(
        SIZE, is_training=True, use_prefetcher=True, scale=(0.05, 1.0), color_jitter=None, interpolation="bilinear"
    )
    functions = {
        "vitrail": ours(),
        "torchvision": theirs(v2.Compose([crop, flip, v2.PILToTensor()])),
        "torchvision, tensors": theirs(v2.Compose([v2.PILToTensor(), crop, flip])),
        "timm": theirs(from_timm),
        "pillow": with_pillow(),
    }
    both = v2.Compose([crop, flip])
    if can_decode():
        functions[OWN_DECODER] = lambda content: both(torchvision.io.decode_jpeg(as_tensor(content)))
    else:
        functions[STAND_IN] = lambda content: both(torch.from_numpy(decode_jpeg(content)).permute(2, 0, 1))
    return functions


def as_tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def can_decode() -> bool:
    """Tell whether the compiled part of torchvision can be loaded; beside a torch of another build it cannot."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    try:
        return bool(torchvision.io.decode_jpeg(as_tensor(file.getvalue())).numel())
    except RuntimeError:
        return False


def in_turn(images: list[bytes], rounds: int) -> dict[str, list[float]]:
    """Images a second of each library in each round."""
    functions = chains()
    if not images[0].startswith(b"\xff\xd8"):
        functions = {name: function for name, function in functions.items() if name not in (OWN_DECODER, STAND_IN)}
    speeds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            for content in images:
                function(content)
            if turn:  # the first warms up
                speeds[name].append(len(images) / (time.process_time() - start))
    return speeds


def medians(speeds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in speeds.items()}


def loaders(folder: Path, batch: int) -> dict[str, Callable[[], Iterator[object]]]:
    """Whole loaders with one worker each."""
    crop = v2.RandomResizedCrop(SIZE, scale=(0.05, 1.0), antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])
    plain = torchvision.datasets.ImageFolder(folder, transform)
    from_timm = timm.data.create_loader(
        timm.data.create_dataset("", folder),
        (3, SIZE, SIZE),
        batch,
        is_training=True,
        use_prefetcher=False,
        scale=(0.05, 1.0),
        color_jitter=None,
        interpolation="bilinear",
        num_workers=1,
        persistent_workers=False,
    )
    return {
        "vitrail": lambda: iter(TrainingLoader(open_data(folder), batch, (SIZE, SIZE), workers=1)),
        "torchvision": lambda: iter(torch.utils.data.DataLoader(plain, batch, shuffle=True, num_workers=1)),
        "timm": lambda: iter(from_timm),
    }


def through_loaders(images: list[bytes], rounds: int) -> dict[str, float]:
    batch, steps = 32, len(images) // 32
    with tempfile.TemporaryDirectory() as name:
        for number, content in enumerate(images):
            path = Path(name) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for library, make in loaders(Path(name), batch).items():
                batches = make()
                next(batches)
                start = time.perf_counter()
                for _ in range(steps - 1):
                    next(batches)
                found.setdefault(library, []).append((steps - 1) * batch / (time.perf_counter() - start))
                del batches
    return {library: statistics.median(values) for library, values in found.items()}


def with_workers(images: list[bytes], counts: list[int]) -> dict[str, float]:
    """Our loader with more workers, to a GPU where there is one."""
    device, batch = "cuda" if torch.cuda.is_available() else "cpu", 256
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for number, content in enumerate(images):
            path = Path(name) / str(number % 2) / f"{number}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        for workers in counts:
            batches = iter(TrainingLoader(open_data(name), batch, (SIZE, SIZE), workers=workers))
            for _ in range(4):
                next(batches).to(device)
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < 8:
                next(batches).to(device)
                steps += 1
            found[str(workers)] = steps * batch / (time.perf_counter() - start)
            print(f"{workers} workers → {device}: {found[str(workers)]:.0f} images/s", flush=True)
            del batches
    return found


def difference(images: list[bytes]) -> float:
    """Mean absolute difference of a decode at full size to Pillow's, of 255."""
    found = [
        (
            decode_crop(content, lambda height, width: (0, 0, height, width), decode_image(content).shape[1:]).float()
            - torch.from_numpy(np.array(Image.open(io.BytesIO(content)).convert("RGB"))).permute(2, 0, 1)
        )
        .abs()
        .mean()
        .item()
        for content in images
    ]
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs of about 500 × 375 pixels")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=48, help="of each class; a sixth as many of 12 megapixels")
    parser.add_argument("--loader-images", type=int, default=1024, help="0 leaves the whole loaders out")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="our loader with so many workers")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
    versions |= {"pillow": PIL.__version__, "python": platform.python_version()}
    result: dict[str, object] = {"commit": arguments.commit, "cpu": processor(), "versions": versions, "chains": []}
    result["compiled JPEG decoder"] = load_decoder() is not None
    rows: list[dict[str, object]] = []
    kinds = choose_photographs(arguments.photos, arguments.images) if arguments.photos else KINDS
    for name, kind in kinds.items():
        count = arguments.images if name.startswith("500") else max(arguments.images // 6, 2)
        images = kind if isinstance(kind, list) else photographs(*kind, count)
        rounds = in_turn(images, arguments.rounds)
        size, speeds = statistics.mean(map(len, images)) / 1000, medians(rounds)
        row = {"kind": name, "images": len(images), "kB": round(size), "images/s": speeds, "rounds": rounds}
        apart = difference(images)
        rows.append(row | {"difference": apart})
        show(name, size, speeds, apart)
        result["chains"] = rows
        save(arguments.out, result)
    if arguments.photos:
        return
    if arguments.loader_images:
        images = photographs(*KINDS["500×375"], 64) * (arguments.loader_images // 64)
        speeds = through_loaders(images, max(arguments.rounds // 3, 1))
        show("loaders, 500×375", statistics.mean(map(len, images)) / 1000, speeds)
        result["loaders, one worker"] = speeds
        save(arguments.out, result)
    if arguments.workers:
        images = photographs(*KINDS["500×375"], 64) * 32
        result["vitrail's loader by workers"] = with_workers(images, arguments.workers)
        save(arguments.out, result)


def show(name: str, size: float, speeds: dict[str, float], difference: float = 0.0) -> None:
    print(f"{name}, {size:.0f} kB on average, images/s (difference to Pillow, of 255: {difference:.3f}):")
    for library, speed in speeds.items():
        print(f"  {library:26} {speed:8.1f}   vitrail × {speeds['vitrail'] / speed:.2f}", flush=True)


def save(path: Path | None, result: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
