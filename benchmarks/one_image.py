"""Latency of one image through B/16 in bf16, with sums and norms apart from the products and joined to them, in turns.

    python benchmarks/one_image.py one_image.json

Milliseconds: `graph` of the recorded embedder alone, 300 replays sent off together, median of five turns. Called and
waited for each time, median of 400: `replay` of that graph, `captured` with the image copied in, `wall` of `FastModel`.
Told too: what was chosen, and the distance of both from the plain model in float32. Most of its time is compiling.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import vitrail
from vitrail.benchmark.machine import read_commit
from vitrail.fast.gpu.autotune import choices, round_up_rows
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.fast.gpu.fused_embedder import FusedEmbedder
from vitrail.fast.gpu.fused_layers import FusedHead
from vitrail.fast.optimize import FastModel
from vitrail.fast.timing import relative_distance

PASSES, TURNS, REPLAYS, CALLS = ("apart", "joined"), 5, 300, 400


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


def waited(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def graph_of(captured: CudaGraph[Tensor]) -> torch.cuda.CUDAGraph:
    assert captured._graph is not None
    return captured._graph


def main() -> None:
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    model = vitrail.create_model("B/16", seed=0).cuda().eval()
    torch.nn.init.normal_(model.head.weight, std=0.03)
    images = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        y, logits = model.embed(images), model(images)
        found, ways = dict[str, dict[str, object]](), dict[tuple[str, str], Callable[[], object]]()
        graphs = dict[str, torch.cuda.CUDAGraph]()
        for name in PASSES:
            embedder = FusedEmbedder(model, tries_merging=True)
            embedder.passes[round_up_rows(embedder.tokens)] = embedder.list_passes(embedder.embed_tokens(images))[name]
            whole = FastModel(model, embedder, "bf16", name, uses_graphs=True)
            whole.logits = FusedHead(whole.head)
            alone = CudaGraph(embedder)
            alone(images)
            graphs[name] = graph_of(alone)
            ways[name, "replay"] = graphs[name].replay
            ways[name, "captured"], ways[name, "wall"] = partial(alone, images), partial(whole, images)
            distances = relative_distance(whole.embed(images), y), relative_distance(whole(images), logits)
            found[name] = dict(zip(("distance", "distance of logits"), distances, strict=True))
            tell(f"{name}: recorded, {found[name]}")
        turns = [{name: of_graph(graphs[name]) for name in PASSES} for _ in range(TURNS)]
        walls = [{way: waited(call) for way, call in ways.items()} for _ in range(CALLS)]
        for name in PASSES:
            found[name]["graph"] = statistics.median(turn[name] for turn in turns)
            found[name]["turns"] = [turn[name] for turn in turns]
        for name, kind in ways:
            found[name][kind] = statistics.median(wall[name, kind] for wall in walls)
        for name in PASSES:
            tell(
                name + "".join(f", {kind} {found[name][kind]:.4f}" for kind in ("graph", "replay", "captured", "wall"))
            )
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": read_commit()}
        result = {**about, "passes": found, "chosen": {str(key): way for key, way in choices.items()}}
        out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
