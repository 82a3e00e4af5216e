"""Compare our fused kernels with timm on today's encoders: inference in bf16, one process, in turns, medians.

    python benchmarks/encoder_speed.py --out encoders.json                                # DINOv3 B/16 and L/16
    python benchmarks/encoder_speed.py --out encoders.json --cases dinov2-b14-518 siglip2-b16-256
    python benchmarks/encoder_speed.py --out encoders.json --cases all --fp8

timm builds each network by name with random weights, and vitrail loads the same weights. Both libraries run as they
are fastest (timm compiled, ours fused), with and without a CUDA graph, on the same images in bf16. The JSON is written
after every case; its distances are ‖Δy‖/‖y‖ from timm's network in float32. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import vitrail
from peer_libraries.models import import_peer
from vitrail.benchmark.machine import describe_machine, read_versions
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.fast.optimize import optimize
from vitrail.fast.timing import Stopwatch, relative_distance, take_turns
from vitrail.model.base import ImageModel
from vitrail.weights.formats.timm_built import read_arguments

SECONDS = 0.4
"""Of one turn."""
REFERENCE_BATCH = 32
"""Images at a time in float32."""
SHARPER = 4.0
"""Factor on random queries, keys and values, so that attention is no mere average and positions matter."""
Contestant = Callable[[], object]


class EncoderCase(NamedTuple):
    """A network of timm's at an image size and batch."""

    name: str
    """In timm."""
    size: int
    batch: int


CASES = {
    "dinov3-b16-256": EncoderCase("vit_base_patch16_dinov3", 256, 256),
    "dinov3-l16-256": EncoderCase("vit_large_patch16_dinov3", 256, 128),
    "dinov3-s16-256": EncoderCase("vit_small_patch16_dinov3", 256, 512),
    "dinov2-b14-224": EncoderCase("vit_base_patch14_dinov2", 224, 256),
    "dinov2-b14-518": EncoderCase("vit_base_patch14_dinov2", 518, 64),
    "dinov2-g14-224": EncoderCase("vit_giant_patch14_dinov2", 224, 64),
    "siglip2-b16-256": EncoderCase("vit_base_patch16_siglip_256", 256, 256),
    "siglip2-b16-384": EncoderCase("vit_base_patch16_siglip_384", 384, 128),
    "siglip2-so400m-384": EncoderCase("vit_so400m_patch16_siglip_384", 384, 64),
    "eva02-b14-448": EncoderCase("eva02_base_patch14_448", 448, 64),
    "pe-core-b16-224": EncoderCase("vit_pe_core_base_patch16_224", 224, 256),
}
DEFAULT = ["dinov3-b16-256", "dinov3-l16-256"]


@torch.no_grad()
def build_network(name: str, size: int, **options: Any) -> Any:
    """Build timm's network without a head, with random weights whose every block matters."""
    import timm

    torch.manual_seed(0)
    network = timm.create_model(name, pretrained=False, num_classes=0, img_size=size, **options).eval()
    for path, parameter in network.named_parameters():
        if "gamma" in path:  # layer scale begins near 0
            parameter.fill_(1.0)
        if "qkv" in path or "q_proj" in path or "k_proj" in path:
            parameter.mul_(SHARPER)
    return network


def load_from_network(network: Any, size: int) -> ImageModel:
    """Load timm's network into a model of ours, through a folder as timm writes it."""
    pretrained = {key: value for key, value in dict(network.pretrained_cfg).items() if not key.startswith("test_")}
    pretrained["input_size"] = (3, size, size)
    config = {"pretrained_cfg": pretrained, "model_args": read_arguments(network)}
    config["architecture"] = pretrained["architecture"]
    with tempfile.TemporaryDirectory() as folder:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        Path(folder, "config.json").write_text(json.dumps(config, default=str))
        return vitrail.load(folder, num_classes=0)


@torch.inference_mode()
def embed_exactly(network: nn.Module, images: Tensor) -> Tensor:
    """Return timm's representations in float32, computed a few images at a time."""
    return torch.cat([network(part.float()) for part in images.split(REFERENCE_BATCH)])


def call(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    with torch.inference_mode():
        return function(images)


def prepare_contestants(
    network: Any, model: ImageModel, images: Tensor, fp8: bool, on_message: Callable[[str], None]
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return what is compared, by name: functions from images in bf16 to representations, compiled and tuned."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {}
    half: Any = copy.deepcopy(network).to(torch.bfloat16)
    functions["timm compiled"] = torch.compile(half)
    for precision in ("bf16", "fp8") if fp8 else ("bf16",):
        fast = optimize(model, "throughput", precision, images=images)
        on_message(f"ours: {fast.describe()}")
        functions[f"vitrail {precision} ({fast.method})"] = fast.embed
    ready: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, function in functions.items():
        start = time.perf_counter()
        try:
            call(function, images)
            ready[name] = function
            graph = CudaGraph(function)
            call(graph, images)
            ready[f"{name}, CUDA graph"] = graph
        except Exception as error:  # another library may raise anything
            on_message(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        on_message(f"{name}: ready after {time.perf_counter() - start:.0f} s")
    return ready


def measure_distances(
    contestants: dict[str, Callable[[Tensor], Tensor]], exact: Tensor, images: Tensor
) -> dict[str, float]:
    """Return ‖Δy‖/‖y‖ of every contestant from the exact representations."""
    return {name: relative_distance(call(function, images).float(), exact) for name, function in contestants.items()}


def measure_speeds(
    contestants: dict[str, Callable[[Tensor], Tensor]], images: Tensor, rounds: int, on_message: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Return the seconds of a call in every round, and the images per second at their median."""
    watch = Stopwatch(images.device)
    turns: dict[str, Callable[[], float]] = {}
    for name, function in contestants.items():
        step = partial(call, function, images)
        step()
        turns[name] = partial(watch.time_calls, step, watch.count_calls(step, SECONDS, least=3))
    found = take_turns(turns, rounds, lambda name, error: on_message(f"{name}: {error}"))
    return {
        name: {"images_per_second": len(images) / statistics.median(seconds), "seconds": seconds}
        for name, seconds in found.items()
    }


def compare(name: str, fp8: bool, rounds: int, batch: int | None, on_message: Callable[[str], None]) -> dict[str, Any]:
    """Measure one case on the GPU and return what goes into the JSON."""
    begin, case = time.perf_counter(), CASES[name]
    network = build_network(case.name, case.size)
    model = load_from_network(network, case.size).cuda()
    network = network.cuda()
    images = torch.randn(batch or case.batch, 3, case.size, case.size, device="cuda").bfloat16()
    exact = embed_exactly(network, images)
    with torch.inference_mode():
        plain = relative_distance(model.embed(images[:REFERENCE_BATCH].float()), exact[:REFERENCE_BATCH])
    on_message(f"our plain model in float32: {plain:.1e} from timm's")
    contestants = prepare_contestants(network, model, images, fp8, on_message)
    speeds = measure_speeds(contestants, images, rounds, on_message)
    best = {
        library: max(
            (row["images_per_second"] for label, row in speeds.items() if label.startswith(library)), default=0
        )
        for library in ("timm", "vitrail bf16", "vitrail fp8")
    }
    return {
        "case": name,
        **case._asdict(),
        "batch": len(images),
        "speeds": speeds,
        "distances": {"vitrail plain in float32": plain, **measure_distances(contestants, exact, images)},
        "ratios": {label: best[label] / best["timm"] for label in best if best["timm"] and label != "timm"},
        "seconds_spent": time.perf_counter() - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=[*CASES, "all"], metavar="CASE", help=f"{CASES}")
    parser.add_argument("--fp8", action="store_true", help="ours in FP8 too")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="of this code, where there is no checkout to ask")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this measures CUDA devices, and torch sees none here\n")
    device = torch.device("cuda")
    try:
        import_peer("timm", device)
    except NotApplicableError as error:
        parser.exit(1, f"timm: {error}\n")
    machine = describe_machine(device)
    machine["versions"] |= read_versions(["timm"])
    machine["commit"] = arguments.commit or machine["commit"]
    rows: list[dict[str, Any]] = []
    for name in CASES if "all" in arguments.cases else arguments.cases:
        torch.compiler.reset()
        try:
            row = compare(
                name, arguments.fp8, arguments.rounds, arguments.batch, partial(print, f"{name}:", flush=True)
            )
        except Exception as error:  # the other cases are still worth measuring
            row = {"case": name, "error": f"{type(error).__name__}: {error}"}
        rows.append(row)
        arguments.out.write_text(json.dumps({"machine": machine, "cases": rows}, indent=1))
        for label, speed in row.get("speeds", {}).items():
            print(f"{name}: {label}: {speed['images_per_second']:,.0f} images/s, {row['distances'][label]:.1e} off")
        print(f"{name}: {row.get('ratios') or row.get('error')}, {row.get('seconds_spent', 0):.0f} s", flush=True)
        torch.cuda.empty_cache()
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
