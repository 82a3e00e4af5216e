"""Training steps with dropout, layer scale and stochastic depth: our fused kernels beside timm's model, compiled.

    python benchmarks/training_parts.py --out benchmarks/results/training_parts.json
    python benchmarks/training_parts.py --cases dropout --out dropout.json
    python benchmarks/training_parts.py --cases kernels --out kernels.json      # kernels that draw masks

B/16 at 224 px, batch 256: forward, backward and fused AdamW under autocast in bf16, in one process, in turns, medians
of five rounds. Needs a CUDA device. timm is left out, and named, if it is not installed. The file is written after
every case.
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
SIZE, TOKENS, ROUNDS = 224, 197, 5
Step = Callable[[], Tensor]


def make_step(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> Step:
    """Return a training step; `run` is the model, or what computes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    labels = torch.randint(1000, (len(images),), device=images.device)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(run(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def build_ours(case: str, images: Tensor) -> Step:
    model = vitrail.create_model("B/16", seed=0, **OPTIONS[case][0]).cuda().train()
    fused, count = FusedTraining(model), 0

    def run(images: Tensor) -> Tensor:
        nonlocal count
        count += 1
        fused.set_step(count, 0)  # as the training loop does
        return fused(images)

    return make_step(model, run, images)


def build_timm(case: str, images: Tensor, mode: str | None) -> Step:
    import timm

    model = timm.create_model("vit_base_patch16_224", num_classes=1000, **OPTIONS[case][1]).cuda().train()
    return make_step(model, torch.compile(model, dynamic=False, mode=mode), images)


def measure_case(case: str, images: Tensor, has_timm: bool, graphs: bool, calls: int) -> list[dict[str, Any]]:
    builders: dict[str, Callable[[], Step]] = {"vitrail, fused": lambda: build_ours(case, images)}
    if has_timm:
        builders["timm, compiled"] = lambda: build_timm(case, images, None)
    if has_timm and graphs:
        builders["timm, compiled, CUDA graphs"] = lambda: build_timm(case, images, "reduce-overhead")
    steps, facts = {}, {}
    for name, build in builders.items():
        began = time.perf_counter()
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            steps[name] = build()
            losses = [float(steps[name]()) for _ in range(3)]
        except Exception as error:  # the others are still measured
            steps.pop(name, None)
            facts[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(f"{case}: {name} failed: {error}", flush=True)
            continue
        seconds = time.perf_counter() - began
        memory = torch.cuda.max_memory_allocated() - before
        facts[name] = {"first_losses": losses, "seconds_to_start": seconds, "peak_bytes": memory}
        print(f"{case}: {name} is ready after {seconds:.0f} s, first losses {losses}", flush=True)
    times = take_turns(steps, calls)
    rows = []
    for name, fact in facts.items():
        row = {"case": case, "name": name, **fact}
        if name in times:
            row |= {"ms": times[name], "images_per_s": 1000 * len(images) / statistics.median(times[name])}
            print(f"{case}: {name}: {row['images_per_s']:,.0f} images/s", flush=True)
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
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=768, help="of the tokens, for the case kernels")
    parser.add_argument("--calls", type=int, default=10, help="steps in a turn")
    parser.add_argument("--graphs", action="store_true", help="timm with CUDA graphs too; compiles once more")
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
        "model": "B/16",
        "batch": arguments.batch,
        "timm": missing or "measured",
        "rows": [],
    }
    images = torch.randn(arguments.batch, 3, SIZE, SIZE, device="cuda")
    for case in arguments.cases:
        if case == "kernels":
            result["rows"] += measure_kernels(arguments.batch, arguments.width)
        else:
            result["rows"] += measure_case(case, images, missing is None, arguments.graphs, arguments.calls)
        arguments.out.write_text(json.dumps(result, indent=1))
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
