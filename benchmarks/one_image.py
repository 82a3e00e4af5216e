"""Latency of one image through B/16 in bf16, with sums and norms apart from the products and joined to them, in turns.

    python benchmarks/one_image.py one_image.json            # --tilings tries every way to cut up the joined products

Milliseconds: `graph` of the recorded embedder alone, 300 replays sent off together, median of five turns. Called and
waited for each time, median of 400: `replay` of that graph, `captured` with the image copied in, `wall` of `FastModel`.
Told too: what was chosen, and the distance of both from the plain model in float32. Most of its time is compiling.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import vitrail
from vitrail.fast import joined
from vitrail.fast.captured import Captured
from vitrail.fast.choice import bucket, chosen
from vitrail.fast.fused import FusedEmbedder
from vitrail.fast.kernels.product import Tiling, named
from vitrail.fast.logits import Logits
from vitrail.fast.measure import relative_distance
from vitrail.fast.optimize import FastModel
from vitrail.workflows.bench.machine import commit

PASSES, TURNS, REPLAYS, CALLS = ("apart", "joined"), 5, 300, 400
MORE_JOINING = named(
    Tiling(64, 64, 128, 4, 3), Tiling(64, 64, 64, 4, 4), Tiling(64, 32, 64, 4, 6),
    Tiling(64, 64, 64, 4, 4, splits=2), Tiling(64, 64, 64, 4, 4, splits=4), Tiling(128, 64, 64, 4, 4, splits=4),
    Tiling(128, 64, 64, 8, 4, splits=4), Tiling(128, 128, 64, 8, 3, splits=8),
)  # fmt: skip
MORE_NORMING = named(
    Tiling(64, 64, 64, 4, 4), Tiling(64, 64, 64, 4, 6), Tiling(64, 128, 64, 4, 4), Tiling(64, 128, 128, 8, 3),
    Tiling(128, 64, 64, 4, 4), Tiling(128, 64, 128, 8, 3), Tiling(128, 128, 64, 8, 3),
)  # fmt: skip
"""Beside those that are tried in use."""


def tell(line: str) -> None:
    print(time.strftime("%X"), line, flush=True)


def of_graph(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / replays


def waited(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def graph_of(captured: Captured[Tensor]) -> torch.cuda.CUDAGraph:
    assert captured._graph is not None
    return captured._graph


def forced(model: vitrail.VisionTransformer, name: str) -> FusedEmbedder:
    embedder = FusedEmbedder(model)
    embedder.passes[bucket(embedder.tokens)] = getattr(embedder, name)
    return embedder


def search(model: vitrail.VisionTransformer, images: Tensor) -> dict[str, dict[str, float]]:
    """Of every joined product in turn, all blocks cut up one way, the others as they were best so far."""
    embedder, found = forced(model, "joined"), dict[str, dict[str, float]]()
    embedder(images)
    blocks, rows = embedder.joined_blocks, bucket(embedder.tokens)
    assert blocks is not None
    for name in ("fc2", "fc1", "next_qkv", "out"):
        layers = [layer for block in blocks if (layer := getattr(block, name)) is not None]
        joins = name in ("out", "fc2")
        tilings = joined.JOINING | MORE_JOINING if joins else joined.NORMING | MORE_NORMING
        key = (rows, name == "out") if joins else rows
        times = found[name] = {"as chosen": timed(embedder, images)}
        best = layers[0].chosen[key], times["as chosen"]
        for label, tiling in tilings.items():
            if tiling.splits > 1 and (name != "fc2" or layers[0].weight.shape[1] % (tiling.splits * tiling.depth)):
                continue
            for layer in layers:
                layer.chosen[key] = partial(layer.by, tiling)
            try:
                times[label] = timed(embedder, images)
            except Exception as error:  # one that does not fit the chip
                tell(f"{name} {label}: {type(error).__name__}")
                continue
            tell(f"{name} {label}: {times[label]:.4f}")
            if times[label] < best[1]:
                best = layers[0].chosen[key], times[label]
        for layer in layers:
            layer.chosen[key] = partial(layer.by, best[0].args[0])
    return found


def timed(embedder: FusedEmbedder, images: Tensor) -> float:
    captured = Captured(embedder)
    captured(images)
    return statistics.median(of_graph(graph_of(captured), 100) for _ in range(TURNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tilings", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = vitrail.create_model("B/16", seed=0).cuda().eval()
    torch.nn.init.normal_(model.head.weight, std=0.03)
    images = torch.randn(1, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        y, logits = model.embed(images), model(images)
        found, ways = dict[str, dict[str, object]](), dict[tuple[str, str], Callable[[], object]]()
        graphs = dict[str, torch.cuda.CUDAGraph]()
        for name in PASSES:
            embedder = forced(model, name)
            whole = FastModel(model, embedder, "bf16", name, recorded=True)
            whole.logits = Logits(whole.head)
            alone = Captured(embedder)
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
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
        result = {**about, "passes": found, "chosen": {str(key): way for key, way in chosen().items()}}
        options.out.write_text(json.dumps(result, indent=1))
        if options.tilings:
            options.out.write_text(json.dumps({**result, "tilings": search(model, images)}, indent=1))


if __name__ == "__main__":
    main()
