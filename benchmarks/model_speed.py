"""How fast the plain model is beside timm's of the same shape: one process, alternating, medians.

    python benchmarks/model_speed.py --out benchmarks/results/model_speed.json [--names B/16 L/16] [--batch 256]

Both eager and compiled, bf16: inference with bf16 weights, training a step of forward, backward and fused AdamW under
autocast. Peers that are not installed are left out and named. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import vitrail

TIMM_NAMES = {"B/16": "vit_base_patch16_224", "L/16": "vit_large_patch16_224", "H/14": "vit_huge_patch14_224"}


def build(library: str, name: str) -> nn.Module:
    if library == "vitrail":
        return vitrail.create_model(name, seed=0)
    import timm

    return timm.create_model(TIMM_NAMES[name])


def inference(model: nn.Module, images: Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.inference_mode():
            model(images)

    return step


def training(model: nn.Module, images: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    labels = torch.randint(1000, (len(images),), device=images.device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def milliseconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of one step by device events, after what was queued before."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(name: str, kind: str, batch: int, libraries: list[str], rounds: int) -> list[dict[str, object]]:
    size = 224
    dtype = torch.bfloat16 if kind == "inference" else torch.float32
    images = torch.randn(batch, 3, size, size, device="cuda", dtype=dtype)
    contestants: dict[tuple[str, str], Callable[[], None]] = {}
    for library in libraries:
        for mode in ("eager", "compiled"):
            model = build(library, name).to("cuda", dtype).train(kind == "training")
            if mode == "compiled":
                model = torch.compile(model, fullgraph=True)
            step = (inference if kind == "inference" else training)(model, images)
            begin = time.perf_counter()
            for _ in range(5):
                step()
            torch.cuda.synchronize()
            print(f"{name} {kind} {library} {mode}: ready after {time.perf_counter() - begin:.0f} s", flush=True)
            contestants[library, mode] = step
    found: dict[tuple[str, str], list[float]] = {key: [] for key in contestants}
    for _ in range(rounds):
        for key, step in contestants.items():
            found[key].append(milliseconds(step, 10))
    rows = []
    for (library, mode), times in found.items():
        speed = batch / statistics.median(times) * 1000
        rows.append(
            {
                "model": name,
                "kind": kind,
                "batch": batch,
                "library": library,
                "mode": mode,
                "images_per_s": speed,
                "ms": times,
            }
        )
        print(f"{name} {kind} {library} {mode}: {speed:,.0f} images/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=["B/16"])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this measures CUDA devices, and torch sees none here\n")
    libraries = [library for library in ("vitrail", "timm") if importlib.util.find_spec(library)]
    if "timm" not in libraries:
        print("timm is not installed: left out")
    commit = (
        arguments.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    )
    torch.set_float32_matmul_precision("high")
    result = {
        "commit": commit,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": [],
    }
    for name in arguments.names:
        for kind in ("inference", "training"):
            result["rows"] += measure(name, kind, arguments.batch, libraries, arguments.rounds)
            arguments.out.write_text(json.dumps(result, indent=1))
            torch.compiler.reset()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
