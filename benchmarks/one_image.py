"""Latency of one image through B/16 in bf16, with sums and norms apart from the products and joined to them, in turns.

    python benchmarks/one_image.py one_image.json

Milliseconds: `graph` of the recorded embedder alone, 300 replays sent off together, median of five turns; `wall` of
`FastModel`, called and waited for, median of 400. Told too: what was chosen, the kernels of each, and the distance of
both from the plain model in float32. Most of its time is compiling.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import vitrail
from vitrail.fast.captured import Captured
from vitrail.fast.choice import bucket, chosen
from vitrail.fast.fused import FusedEmbedder
from vitrail.fast.logits import Logits
from vitrail.fast.measure import relative_distance
from vitrail.fast.optimize import FastModel, optimize
from vitrail.workflows.bench.machine import commit

PASSES, TURNS, REPLAYS, CALLS = ("apart", "joined", "half_joined"), 5, 300, 400


def tell(line: str) -> None:
    print(time.strftime("%X"), line, flush=True)


def of_graph(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def of_wall(fast: FastModel, images: Tensor) -> float:
    began = time.perf_counter()
    fast(images)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def kernels(embedder: nn.Module, images: Tensor) -> dict[str, int]:
    """How often each kernel is started in one pass."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        embedder(images)
        torch.cuda.synchronize()
    names = [event.name for event in profiled.events() or [] if event.device_type == DeviceType.CUDA]
    return dict(Counter(name[:60] for name in names if not name.startswith(("Mem", "Activity"))).most_common())


def main() -> None:
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    model = vitrail.create_model("B/16", seed=0).cuda().eval()
    torch.nn.init.normal_(model.head.weight, std=0.03)
    images = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.no_grad():
        y, logits = model.embed(images), model(images)
    tell(f"optimize: {optimize(model, 'latency', 'bf16', images=images).describe()}")
    found, whole, alone = dict[str, dict[str, object]](), dict[str, FastModel](), dict[str, Captured[Tensor]]()
    for name in PASSES:
        embedder = FusedEmbedder(model)
        embedder.passes[bucket(embedder.tokens)] = getattr(embedder, name)
        whole[name] = FastModel(model, embedder, "bf16", name, recorded=True)
        whole[name].logits = Logits(whole[name].head)
        alone[name] = Captured(embedder)
        alone[name](images)
        distances = relative_distance(whole[name].embed(images), y), relative_distance(whole[name](images), logits)
        found[name] = dict(zip(("distance", "distance of logits"), distances, strict=True))
        tell(f"{name}: recorded, {found[name]}")
    turns = [{name: of_graph(alone[name]._graph) for name in PASSES} for _ in range(TURNS)]
    walls = [{name: of_wall(whole[name], images) for name in PASSES} for _ in range(CALLS)]
    for name in PASSES:
        found[name]["graph"] = statistics.median(turn[name] for turn in turns)
        found[name]["turns"] = [turn[name] for turn in turns]
        found[name]["wall"] = statistics.median(turn[name] for turn in walls)
        tell(f"{name}: graph {found[name]['graph']:.4f} ms, wall {found[name]['wall']:.4f} ms")
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    ways = {str(key): way for key, way in chosen().items()}
    print(*(f"chosen: {way} for {key}" for key, way in ways.items()), sep="\n")
    out.write_text(json.dumps({**about, "passes": found, "chosen": ways}, indent=1))
    for name in PASSES:  # at last: a profiler may be refused, where the rest was measured
        started = kernels(whole[name].embedder, images)
        tell(f"{name}: {sum(started.values())} kernels, {started}")


if __name__ == "__main__":
    main()
