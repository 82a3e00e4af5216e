"""Our CPU precisions beside onnxruntime, OpenVINO and torch: seconds of a batch, and how far each is from float32.

    python benchmarks/cpu_speed.py --out benchmarks/results/cpu_speed.json
    python benchmarks/cpu_speed.py --model MODEL --data DATA --out trained.json     # trained weights, real images

All have the same weights, the same images and the same number of threads, in one process. They take turns, round by
round; a turn is one call that is not counted (another's threads may still be spinning) and then as many as fill half a
second. Peers are made of our own exports: onnxruntime in float32 and in int8 (dynamic, per channel), OpenVINO in
float32, in bf16 and in int8 by NNCF's post-training quantisation for Transformers, calibrated on other images than
those that are measured, and OpenVINO on the int8 file of onnxruntime. Distance is ‖Δlogits‖/‖logits‖ from the plain
model.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import vitrail
from vitrail.data.open import choose_test_split, open_data
from vitrail.data.transforms.decode import decode_image
from vitrail.errors import VitrailError
from vitrail.exporting.graphs import build_graph
from vitrail.exporting.int8 import write_int8
from vitrail.exporting.onnx import write_onnx
from vitrail.fast.cpu.embedders import CPU_PRECISIONS, create_cpu_embedder
from vitrail.fast.timing import Stopwatch, relative_distance, take_turns
from vitrail.inspection.images import prepare_batch as batch_of
from vitrail.inspection.images import spread_evenly
from vitrail.model.base import ImageModel
from vitrail.system.compiler import processor_key

Run = Callable[[Tensor], Tensor]
SECONDS, CALIBRATED, JUDGED = 0.5, 64, 64
OURS = "vitrail "


def model_of(given: argparse.Namespace) -> ImageModel:
    if given.model:
        return vitrail.load(given.model).float().eval()
    options = json.loads(given.options)
    model = vitrail.create_model(given.name, num_classes=1000, seed=0, **options).eval()
    nn.init.normal_(model.head.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    return model


def images_of(given: argparse.Namespace, model: ImageModel) -> tuple[Tensor, Tensor]:
    """To judge by, and to calibrate on."""
    if not given.data:
        generator = torch.Generator().manual_seed(2)
        images = torch.randn(JUDGED + CALIBRATED, model.in_channels, *model.image_size, generator=generator)
        return images[:JUDGED], images[JUDGED:]
    source = open_data(given.data, choose_test_split(given.data))
    contents = [source.read(index).content for index in spread_evenly(len(source), JUDGED + CALIBRATED)]
    images = batch_of([one if isinstance(one, Tensor) else decode_image(one) for one in contents], model)
    return images[::2], images[1::2]


def onnxruntime_run(path: Path, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def openvino_run(graph: Any, hint: str, threads: int, prepare_batch: int, shape: tuple[int, ...]) -> Run:
    import openvino

    core, graph = openvino.Core(), graph.clone()
    graph.reshape({0: [prepare_batch, *shape]})
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint}
    request = core.compile_model(graph, "CPU", settings).create_infer_request()
    return lambda images: torch.from_numpy(np.array(request.infer([images.numpy()], share_inputs=True)[0]))


def openvino_graphs(folder: Path, calibration: Tensor) -> dict[str, tuple[Any, str]]:
    """By name: a graph and the precision of what is not int8."""
    import nncf
    import openvino

    nncf.set_log_level(40)
    plain = openvino.convert_model(folder / "fp32.onnx")
    images = nncf.Dataset([part.numpy() for part in calibration.split(8)])
    stored = folder / "nncf.xml"
    if not stored.exists():
        small = nncf.quantize(plain, images, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATED // 8)
        openvino.save_model(small, stored, compress_to_fp16=False)
    small = openvino.Core().read_model(stored)
    return {
        "OpenVINO fp32": (plain, "f32"),
        "OpenVINO bf16": (plain, "bf16"),
        "OpenVINO int8 (NNCF), fp32": (small, "f32"),
        "OpenVINO int8 (NNCF), bf16": (small, "bf16"),
        "OpenVINO on onnxruntime's int8": (openvino.convert_model(folder / "int8.onnx"), "f32"),
    }


def exported(model: ImageModel, calibration: Tensor, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Peers, as functions of the batch that build a run."""
    graph = build_graph(model)
    if not (folder / "int8.onnx").exists():
        write_onnx(graph, folder / "fp32.onnx")
        write_int8(graph, folder / "int8.onnx")
    shape, threads = (model.in_channels, *model.image_size), given.threads
    builders: dict[str, Callable[[int], Run]] = {
        "onnxruntime fp32": lambda prepare_batch: onnxruntime_run(folder / "fp32.onnx", threads),
        "onnxruntime int8": lambda prepare_batch: onnxruntime_run(folder / "int8.onnx", threads),
    }
    try:
        graphs = openvino_graphs(folder, calibration)
    except ImportError as error:
        print(f"OpenVINO is left out: {error}")
        graphs = {}
    for name, (converted, hint) in graphs.items():
        builders[name] = partial(openvino_run, converted, hint, threads, shape=shape)
    return builders


def is_wanted(name: str, given: argparse.Namespace) -> bool:
    return any(part in name for part in given.only)


def contestants(
    model: ImageModel, builders: dict[str, Any], given: argparse.Namespace, prepare_batch: int
) -> Iterator[tuple[str, Run]]:
    yield "torch", model
    if given.compile:
        yield "torch compiled", torch.compile(model)
    for precision in CPU_PRECISIONS:
        if not is_wanted(OURS + precision, given):
            continue
        try:
            embed = create_cpu_embedder(model, precision)
        except VitrailError as error:
            print(f"{OURS}{precision} is left out: {error}")
            continue
        yield OURS + precision, lambda images, embed=embed: model.head(embed(images))
    for name, build in builders.items():
        if is_wanted(name, given):
            yield name, build(prepare_batch)


def turn(run: Run, images: Tensor) -> float:
    watch = Stopwatch(images.device)
    return watch.time_calls(lambda: run(images), watch.count_calls(lambda: run(images), SECONDS))


def measured(
    model: ImageModel, judged: Tensor, builders: dict[str, Any], given: argparse.Namespace, prepare_batch: int
) -> list[dict[str, Any]]:
    runs = {name: run for name, run in contestants(model, builders, given, prepare_batch) if is_wanted(name, given)}
    whole = judged[: len(judged) // prepare_batch * prepare_batch]
    with torch.inference_mode():
        reference = torch.cat([model(part) for part in whole.split(prepare_batch)])
        found = {name: torch.cat([run(part) for part in whole.split(prepare_batch)]) for name, run in runs.items()}
        turns = {name: partial(turn, run, judged[:prepare_batch]) for name, run in runs.items()}
        taken = take_turns(turns, given.rounds, lambda name, error: print(f"{name} failed: {error}"))
    return [
        {
            "name": name,
            "batch": prepare_batch,
            "milliseconds": 1e3 * statistics.median(seconds),
            "least": 1e3 * min(seconds),
            "distance": relative_distance(found[name], reference),
            "agreement": float((found[name].argmax(dim=1) == reference.argmax(dim=1)).float().mean()),
            "rounds": [1e3 * value for value in seconds],
        }
        for name, seconds in taken.items()
    ]


def told(rows: list[dict[str, Any]]) -> list[str]:
    """Each of ours against the fastest peer, and the fastest of those that are as near to float32."""
    lines = []
    peers = [row for row in rows if not row["name"].startswith(OURS)]
    for row in rows:
        print(
            f"{row['batch']:3} {row['name']:32} {row['milliseconds']:9.1f} ms  least {row['least']:9.1f}  "
            f"distance {row['distance']:.1e}  agreement {row['agreement']:.3f}"
        )
    for own in (row for row in rows if row["name"].startswith(OURS)):
        as_near = [peer for peer in peers if peer["distance"] <= own["distance"]]
        for label, others in (("the fastest peer", peers), ("the fastest peer that is as near", as_near)):
            if not others:
                continue
            best = min(others, key=lambda peer: peer["milliseconds"])
            ratio, least = best["milliseconds"] / own["milliseconds"], best["least"] / own["least"]
            lines.append(
                f"batch {own['batch']}: {own['name']} is {ratio:.2f}× as fast as {label}, {best['name']} "
                f"({least:.2f}× by the least)"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="B/16")
    parser.add_argument("--options", default="{}", help='of create_model, such as {"layer_scale": 1.0}')
    parser.add_argument("--model", help="a folder of weights, instead of random ones")
    parser.add_argument("--data", help="real images, instead of noise")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", default=[""], help="those with one of these in their names, such as int8")
    parser.add_argument("--compile", action="store_true", help="torch compiled too; takes minutes")
    parser.add_argument("--exports", type=Path, help="a folder that keeps this model's exports for the next run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = model_of(given)
    judged, calibration = images_of(given, model)
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.exports or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        builders = exported(model, calibration, given, folder)
        for prepare_batch in given.batches:
            found = measured(model, judged, builders, given, prepare_batch)
            rows += found
            lines += told(found)
    print(*lines, sep="\n")
    versions = {}
    for package in ("torch", "onnxruntime", "openvino", "nncf"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    record = {
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "architecture": json.loads(model.architecture.model_dump_json(exclude_defaults=True)),
        "weights": "trained" if given.model else "random",
        "images": "real" if given.data else "noise",
        "processor": processor_key(),
        "threads": given.threads,
        "versions": versions,
        "rows": rows,
        "told": lines,
    }
    if given.out:
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
