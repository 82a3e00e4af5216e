"""Show where the time of a pass or a training step goes: milliseconds on the GPU by kind of kernel.

    python benchmarks/where_time_goes.py L/16:128 H/14:64 --out where.json
    python benchmarks/where_time_goes.py H/14:64 --kinds training --kernels 30

For each model and batch our fused kernels run a few times under torch's profiler. The sums by kind are held against the
floor of the matrix products: their operations at the rate of a large product in the same process. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import vitrail
from vitrail.benchmark.machine import read_commit
from vitrail.fast.gpu.training import FusedTraining
from vitrail.fast.optimize import optimize
from vitrail.fast.timing import ReferenceProduct, Stopwatch

STEPS = 5
KINDS = (
    ("attention", r"attention|fmha|flash|sdpa|read_kernel"),
    ("norms", r"add_norm|norm_backward|layer_norm"),
    ("GELU", r"gelu|activate"),
    ("heads", r"rotate|transform_heads|join_qkv"),
    ("products", r"gemm|nvjet|cutlass|product_kernel|cublas|xmma|splitK"),
    ("optimiser", r"adam|multi_tensor|foreach"),
)
"""A kernel belongs to the first kind whose pattern its name has."""


def sort_kernel(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "the rest")


def measure_ceiling() -> float:
    """Return the operations per second of a large product in bf16."""
    device = torch.device("cuda")
    product = ReferenceProduct(device, torch.bfloat16)
    watch = Stopwatch(device)
    return product.flops / statistics.median(watch.time_calls(product, 10) for _ in range(5))


def profile_steps(step: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a step by the clock, and those of each kernel by name."""
    for _ in range(5):
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(2 * STEPS):
        step()
    end.record()
    end.synchronize()
    clock = start.elapsed_time(end) / (2 * STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        kernels[event.key] += event.self_device_time_total / 1000 / STEPS
    return clock, dict(kernels)


def make_inference(name: str, batch: int, size: int) -> Callable[[], object]:
    fast = optimize(vitrail.create_model(name, image_size=size, num_classes=1000, seed=0).cuda(), "throughput", "bf16")
    images = torch.randn(batch, 3, size, size, device="cuda")
    return lambda: fast(images)


def make_training(name: str, batch: int, size: int) -> Callable[[], object]:
    model = vitrail.create_model(name, image_size=size, num_classes=1000, seed=0).cuda().train()
    fused, optimizer = FusedTraining(model), torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images, labels = torch.randn(batch, 3, size, size, device="cuda"), torch.randint(1000, (batch,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(fused(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


MAKERS = {"inference": make_inference, "training": make_training}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--kinds", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--kernels", type=int, default=12, help="so many of the longest kernels are printed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this measures CUDA devices, and torch sees none here\n")
    ceiling, rows = measure_ceiling(), list[dict[str, Any]]()
    print(f"a large product: {ceiling / 1e12:.0f} TFLOP/s")
    for text in arguments.models:
        name, batch = text.split(":")
        for kind in arguments.kinds:
            clock, kernels = profile_steps(MAKERS[kind](name, int(batch), arguments.size))
            sums: dict[str, float] = defaultdict(float)
            for kernel, milliseconds in kernels.items():
                sums[sort_kernel(kernel)] += milliseconds
            row = {"model": name, "batch": int(batch), "kind": kind, "ms": clock, "by_kind": dict(sums)}
            rows.append(row | {"kernels": kernels})
            parts = ", ".join(f"{each} {sums[each]:.2f}" for each in sorted(sums, key=lambda each: -sums[each]))
            print(f"{name}, batch {batch}, {kind}: {clock:.2f} ms, kernels {sum(sums.values()):.2f}: {parts}")
            for kernel in sorted(kernels, key=lambda each: -kernels[each])[: arguments.kernels]:
                print(f"  {kernels[kernel]:8.3f}  {kernel[:150]}", flush=True)
            torch.cuda.empty_cache()
    if arguments.out:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": read_commit()}
        arguments.out.write_text(json.dumps({**about, "ceiling": ceiling, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
