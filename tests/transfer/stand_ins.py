"""Small models and data sets in the place of large ones, for the transfer suites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli.suite import describe_event
from vitrail.transfer.suite import run_suite
from vitrail.weights.save import save

SHORT = ["image_size=16", "batch_size=8", "workers=0", "run.trackers=[]", "threads=1", "deterministic=true"]
"""Of any length; give schedule.steps too."""


@contextmanager
def quick(cache: Path) -> Iterator[None]:
    """Tables in a folder of their own, one thread, and no drawing of curves, which is tested elsewhere and is slow."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRAIL_CACHE", str(cache))
        patch.setattr("vitrail.training.result.draw_curves", lambda *_: None)
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(threads)


def tiny_model(folder: Path) -> str:
    sizes = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
    save(vitrail.create_model("Ti/4", num_classes=5, seed=0, **sizes), folder)
    return str(folder)


def hard(root: Path, classes: list[str], images: int, first: int = 0, pattern: str = "{:04}.png") -> Path:
    """Pictures of noise whose colour tells the class, but not always; `pattern` names them by their number."""
    rng = np.random.default_rng(first)
    number = first
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for _ in range(images):
            number += 1
            middle = 128 + np.roll([25, 0, -25], label) + rng.normal(0, 25, 3)
            pixels = middle + rng.normal(0, 40, (18, 20, 3))
            file = root / name / pattern.format(number)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
    return root


def in_parts(root: Path, classes: list[str], **images: int) -> Path:
    """train=8, test=5: so many images of each class."""
    for number, (part, count) in enumerate(images.items()):
        hard(root / part, classes, count, first=1000 * number)
    return root


def run_lines(
    name: str, model: str, data: str, folder: Path, runs: int, settings: list[str], rates: list[float] | None = None
) -> list[str]:
    """Run a suite and return the lines that its command prints."""
    lines: list[str] = []
    result = run_suite(
        name,  # type: ignore[arg-type]
        model,
        data,
        folder=folder,
        runs=runs,
        rates=rates,
        settings=settings,
        on_event=lambda kind, values: lines.extend(describe_event(kind, values)),
    )
    return [*lines, *result.lines()]


def table(lines: list[str]) -> dict[str, list[str]]:
    """The cells of each row by its title."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {title: rest for title, *rest in cells}


def shown(shares: list[float]) -> str:
    return f"{100 * np.mean(shares):.2f} ± {100 * np.std(shares, ddof=1):.2f}"


def one_by_one(folder: str, test) -> list[int]:
    """The classes of all images by a saved model, each image for itself."""
    saved = vitrail.load(folder)
    inputs = [vitrail.prepare(test.read(index).content, saved.preprocessing) for index in range(len(test))]
    return [int(saved(image[None]).argmax()) for image in inputs]
