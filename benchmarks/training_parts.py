"""Training steps with dropout, layer scale and stochastic depth: our fused kernels beside timm's model, compiled.

    python benchmarks/training_parts.py --out benchmarks/results/training_parts.json
    python benchmarks/training_parts.py --cases dropout --graphs --out dropout.json
    python benchmarks/training_parts.py --model L/16 --batch 128 --cases plain --graphs --out large.json
    python benchmarks/training_parts.py --cases kernels --out kernels.json      # kernels that draw masks

224 px: forward, backward and fused AdamW under autocast in bf16, in one process, in turns, medians of five rounds; with
--graphs also both libraries' steps as CUDA graphs. Needs a CUDA device. timm is left out, and named, if it is not
installed. The file is written after every case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitrail
from peer_libraries.models import import_peer
from vitrail.benchmark.machine import read_commit
from vitrail.errors import NotApplicableError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.fast.gpu.gradients import GELUS
from vitrail.fast.gpu.kernels.backward import GELU, NORM, Walk, gelu_backward, norm_backward
from vitrail.fast.gpu.kernels.dropout import DropoutMask, activate_and_drop
from vitrail.fast.gpu.kernels.norm import add_norm
from vitrail.fast.gpu.masks import make_key
from vitrail.fast.gpu.training import FusedTraining

OPTIONS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "plain": ({}, {}),
    "dropout": ({"dropout": 0.1}, {"proj_drop_rate": 0.1, "pos_drop_rate": 0.1}),
    "layer-scale": ({"layer_scale": 1e-5, "stochastic_depth": 0.1}, {"init_values": 1e-5, "drop_path_rate": 0.1}),
}
"""Options of our model and of timm's, by case."""
NETWORKS = {"B/16": "vit_base_patch16_224", "L/16": "vit_large_patch16_224", "H/14": "vit_huge_patch14_224"}
"""timm's names of our models."""
SIZE, TOKENS, ROUNDS = 224, 197, 5
Step = Callable[[], Tensor]


def make_step(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor, records: bool = False) -> Step:
    """Return a training step; `run` is the model, or what computes it. `records`: as one CUDA graph."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=records)
    labels = torch.randint(1000, (len(images),), device=images.device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=not records):
            loss = F.cross_entropy(run(images).float(), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def build_ours(name: str, case: str, images: Tensor, records: bool) -> Step:
    model = vitrail.create_model(name, image_size=SIZE, num_classes=1000, seed=0, **OPTIONS[case][0]).cuda().train()
    fused, count = FusedTraining(model), 0
    step = make_step(model, fused, images, records)

    def step_with(numbers: Tensor) -> Tensor:
        fused.key = numbers  # the graph's own tensor, which every replay fills anew
        return step()

    take_step = CudaGraph(step_with) if records else step_with

    def run_step() -> Tensor:
        nonlocal count
        count += 1
        return take_step(make_key(count, 0).cuda(non_blocking=True))  # as the training loop does

    return run_step


def build_timm(name: str, case: str, images: Tensor, mode: str | None) -> Step:
    import timm

    model = timm.create_model(NETWORKS[name], num_classes=1000, **OPTIONS[case][1]).cuda().train()
    return make_step(model, torch.compile(model, dynamic=False, mode=mode), images)


def measure_case(
    name: str, case: str, images: Tensor, has_timm: bool, graphs: bool, calls: int
) -> list[dict[str, Any]]:
    builders: dict[str, Callable[[], Step]] = {"vitrail, fused": lambda: build_ours(name, case, images, False)}
    if graphs:
        builders["vitrail, fused, CUDA graph"] = lambda: build_ours(name, case, images, True)
    if has_timm:
        builders["timm, compiled"] = lambda: build_timm(name, case, images, None)
    if has_timm and graphs:
        builders["timm, compiled, CUDA graphs"] = lambda: build_timm(name, case, images, "reduce-overhead")
    steps, facts = {}, {}
    for label, build in builders.items():
        began = time.perf_counter()
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps[label] = build()
            losses = [float(steps[label]()) for _ in range(3)]
        except Exception as error:  # the others are still measured
            steps.pop(label, None)
            facts[label] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(f"{name}, {case}: {label} failed: {error}", flush=True)
            continue
        seconds = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() - before
        facts[label] = {"first_losses": losses, "seconds_to_start": seconds, "peak_bytes": memory}
        print(f"{name}, {case}: {label} is ready after {seconds:.0f} s, first losses {losses}", flush=True)
    times = take_turns(steps, calls)
    rows = []
    for label, fact in facts.items():
        row = {"model": name, "batch": len(images), "case": case, "name": label, **fact}
        if label in times:
            row |= {"ms": times[label], "images_per_s": 1000 * len(images) / statistics.median(times[label])}
            print(f"{name}, {case}: {label}: {row['images_per_s']:,.0f} images/s", flush=True)
        rows.append(row)
    return rows


def take_turns(steps: dict[str, Callable[[], Any]], calls: int) -> dict[str, list[float]]:
    """Return for every step the milliseconds of one call, in each of the rounds."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()  # the other's data has left the cache, as between two steps
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                step()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / calls)
    return times


def measure_kernels(batch: int, width: int) -> list[dict[str, Any]]:
    """Time each pass with and without a mask, and ways to divide its work."""
    mask = DropoutMask.from_rate(make_key(1, 0).cuda(), 3, 0.1)
    assert mask is not None
    count = batch * TOKENS
    z = torch.randn(count, width, device="cuda")
    branch, dy, dz = (torch.randn(count, width, device="cuda").bfloat16() for _ in range(3))
    weight, bias, keep = torch.ones(width, device="cuda"), torch.zeros(width, device="cuda"), torch.ones(batch).cuda()
    before, dh = (torch.randn(count, 4 * width, device="cuda").bfloat16() for _ in range(2))
    steps: dict[str, Callable[[], Any]] = {
        "activate_and_drop": lambda: activate_and_drop(before, 1, mask, TOKENS),
        "torch's GELU": lambda: F.gelu(before, approximate=GELUS[1]),
    }
    for label, given in (("", None), (" with a mask", mask)):
        steps[f"add_norm{label}"] = lambda given=given: add_norm(
            z, branch, weight, bias, 1e-6, branch_bias=bias, mask=given, tokens=TOKENS, dtype=torch.bfloat16
        )
        for walk in (NORM, Walk(1, 0, 2, 8), Walk(1, 0, 4, 6), Walk(2, 0, 4, 3)):
            steps[f"norm_backward{label} {tuple(walk)}"] = lambda given=given, walk=walk: norm_backward(
                dy, dz, z, weight, 1e-6, mask=given, keep=keep, tokens=TOKENS, walk=walk
            )
        for walk in (GELU, Walk(4, 256, 2, 8), Walk(8, 256, 4, 8), Walk(8, 256, 2, 12)):
            steps[f"gelu_backward{label} {tuple(walk)}"] = lambda given=given, walk=walk: gelu_backward(
                dh, before, 1, walk, mask=given, tokens=TOKENS
            )
    for step in steps.values():
        step()
    times = take_turns(steps, 20)
    rows = [{"case": "kernels", "name": name, "ms": each} for name, each in times.items()]
    for row in rows:
        print(f"kernels: {row['name']}: {statistics.median(row['ms']) * 1000:.0f} µs", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=list(OPTIONS), choices=[*OPTIONS, "kernels"])
    parser.add_argument("--model", default="B/16", choices=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=768, help="of the tokens, for the case kernels")
    parser.add_argument("--calls", type=int, default=10, help="steps in a turn")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs too; compiles timm's once more")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this measures CUDA devices, and torch sees none here\n")
    torch.set_float32_matmul_precision("high")
    try:
        import_peer("timm", torch.device("cuda"))
        missing = None
    except NotApplicableError as error:
        missing = str(error)
        print(f"timm is left out: {missing}", flush=True)
    result: dict[str, Any] = {
        "commit": arguments.commit or read_commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "timm": missing or "measured",
        "rows": [],
    }
    images = torch.randn(arguments.batch, 3, SIZE, SIZE, device="cuda")
    for case in arguments.cases:
        if case == "kernels":
            result["rows"] += measure_kernels(arguments.batch, arguments.width)
        else:
            has_timm = missing is None
            result["rows"] += measure_case(arguments.model, case, images, has_timm, arguments.graphs, arguments.calls)
        arguments.out.write_text(json.dumps(result, indent=1))
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
