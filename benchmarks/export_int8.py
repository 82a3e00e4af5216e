"""Accuracy and latency of a model in float32 and in int8, both through onnxruntime, on images with labels.

    python benchmarks/export_int8.py MODEL DATA [--most 1000] > benchmarks/results/export_int8.json

int8 is exported twice: with ranges found at run time, and calibrated on images of the training part, or, where there is
none, on some that are not scored. Latency is the median of alternating runs at batch 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import vitrail
from vitrail.data.open import choose_test_split, list_splits, open_data
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import decode_image
from vitrail.exporting.graphs import ExportGraph, build_graph
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import open_onnx, write_onnx
from vitrail.exporting.runtimes import ExportRunner
from vitrail.inspection.images import prepare_batch, spread_evenly
from vitrail.model.base import ImageModel

CALIBRATED, BATCH, TIMED = 64, 50, 50


def read(source: Source, model: ImageModel, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of a data set, and their labels among the model's classes."""
    places = {label: number for number, label in enumerate(model.labels or source.classes)}
    pixels, labels = [], []
    for index in indices:
        sample = source.read(index)
        content = sample.content
        pixels.append(content if isinstance(content, torch.Tensor) else decode_image(content))
        labels.append(places[source.classes[sample.label]])
    return prepare_batch(pixels, model), torch.tensor(labels)


def guesses(run: ExportRunner, images: torch.Tensor) -> torch.Tensor:
    return torch.cat([run(part).argmax(dim=1) for part in images.split(BATCH)])


def milliseconds(runs: dict[str, ExportRunner], image: torch.Tensor) -> dict[str, float]:
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TIMED):
        for name, run in runs.items():
            start = time.perf_counter()
            run(image)
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[2:]) for name, values in taken.items()}


def exported(graph: ExportGraph, calibration: list[torch.Tensor], folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.onnx" for name in ("fp32", "int8", "int8 calibrated")}
    write_onnx(graph, paths["fp32"])
    write_int8(graph, paths["int8"])
    write_int8(graph, paths["int8 calibrated"], calibration)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--most", type=int, default=1000)
    given = parser.parse_args()
    model = vitrail.load(given.model).float()
    tested = open_data(given.data, choose_test_split(given.data))
    scored = spread_evenly(len(tested), given.most)
    images, labels = read(tested, model, scored)
    if "train" in list_splits(given.data):
        others = open_data(given.data, "train")
        free = list(range(len(others)))
    else:
        others, free = tested, sorted(set(range(len(tested))) - set(scored))
    if not free:
        parser.error("all images are scored and none is left to calibrate on: give a smaller --most")
    chosen = [free[place] for place in spread_evenly(len(free), CALIBRATED)]
    calibration = list(read(others, model, chosen)[0].split(1))
    with tempfile.TemporaryDirectory() as folder:
        paths = exported(build_graph(model), calibration, Path(folder))
        runs = {name: open_onnx(path) for name, path in paths.items()}
        found = {name: guesses(run, images) for name, run in runs.items()}
        latency = milliseconds(runs, images[:1])
        rows = {
            name: {
                "accuracy": float((found[name] == labels).float().mean()),
                "agreement": float((found[name] == found["fp32"]).float().mean()),
                "milliseconds": latency[name],
                "bytes": paths[name].stat().st_size,
            }
            for name in runs
        }
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    machine["threads"] = torch.get_num_threads()
    architecture = json.loads(model.architecture.model_dump_json(exclude_defaults=True))
    print(json.dumps({"architecture": architecture, "images": len(labels), **machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
