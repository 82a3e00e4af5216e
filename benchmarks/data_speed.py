"""Images a second on one core: decode → random crop → flip → tensor, beside torchvision v2 and timm.

    pip install -c constraints.txt ".[test]"
    python benchmarks/data_speed.py --out benchmarks/results/data_speed.json

The images are written by this program from the two photographs inside scikit-learn, enlarged, with noise like a
camera's or without: how many bytes a JPEG has decides how long it takes to read. All run in turn in one process with
one thread; a figure is the median of the rounds. Then the libraries' whole loaders, with one worker each.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from peers import timm, torchvision
from vitrail.data.loader import TrainingLoader
from vitrail.data.open import open_data
from vitrail.data.transforms.augment import Augmentation, augment_image, draw_crop_box
from vitrail.data.transforms.decode import decode_crop, decode_image

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


def ours() -> Callable[[bytes], torch.Tensor]:
    rng, options = random.Random(0), Augmentation()

    def one(content: bytes) -> torch.Tensor:
        image = decode_crop(content, lambda height, width: draw_crop_box(height, width, rng), (SIZE, SIZE))
        return augment_image(image, options, rng)

    return one


def theirs(transform: Callable[[Image.Image], torch.Tensor]) -> Callable[[bytes], torch.Tensor]:
    return lambda content: transform(Image.open(io.BytesIO(content)).convert("RGB"))


def chains() -> dict[str, Callable[[bytes], torch.Tensor]]:
    crop = v2.RandomResizedCrop(SIZE, scale=(0.05, 1.0), antialias=True)
    from_timm = timm.data.create_transform(
        SIZE, is_training=True, use_prefetcher=True, scale=(0.05, 1.0), color_jitter=None, interpolation="bilinear"
    )
    return {
        "vitrail": ours(),
        "torchvision": theirs(v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])),
        "timm": theirs(from_timm),
    }


def in_turn(images: list[bytes], rounds: int) -> dict[str, float]:
    """Images a second of each library."""
    functions = chains()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            for content in images:
                function(content)
            if turn:  # the first warms up
                seconds[name].append(time.process_time() - start)
    return {name: len(images) / statistics.median(values) for name, values in seconds.items()}


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
            - torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1)
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
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--images", type=int, default=48, help="of 500×375; a sixth as many of 12 megapixels")
    parser.add_argument("--loader-images", type=int, default=1024, help="0 leaves the whole loaders out")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="our loader with so many workers")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__, "timm": timm.__version__}
    versions |= {"pillow": PIL.__version__, "python": platform.python_version()}
    result: dict[str, object] = {"commit": arguments.commit, "cpu": processor(), "versions": versions, "chains": []}
    rows: list[dict[str, object]] = []
    columns = f"{'vitrail':>9} {'torchvision':>12} {'timm':>9} {'× torchvision':>14} {'× timm':>7} {'diff/255':>9}"
    print(f"{'images a second':20} {'kB':>6} {columns}")
    for name, kind in KINDS.items():
        images = photographs(*kind, arguments.images if name.startswith("500") else max(arguments.images // 6, 2))
        speeds = in_turn(images, arguments.rounds)
        size = statistics.mean(map(len, images)) / 1000
        rows.append({"kind": name, "kB": round(size), "images/s": speeds, "difference": difference(images)})
        show(name, size, speeds, f"{rows[-1]['difference']:9.3f}")
        result["chains"] = rows
        save(arguments.out, result)
    if arguments.loader_images:
        images = photographs(*KINDS["500×375"], 64) * (arguments.loader_images // 64)
        speeds = through_loaders(images, max(arguments.rounds // 3, 1))
        show("loaders, 500×375", statistics.mean(map(len, images)) / 1000, speeds, "")
        result["loaders, one worker"] = speeds
        save(arguments.out, result)
    if arguments.workers:
        images = photographs(*KINDS["500×375"], 64) * 32
        result["vitrail's loader by workers"] = with_workers(images, arguments.workers)
        save(arguments.out, result)


def show(name: str, size: float, speeds: dict[str, float], more: str) -> None:
    a, b, c = (speeds[library] for library in ("vitrail", "torchvision", "timm"))
    print(f"{name:20} {size:6.0f} {a:9.1f} {b:12.1f} {c:9.1f} {a / b:14.2f} {a / c:7.2f} {more}", flush=True)


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
