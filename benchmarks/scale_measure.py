"""What one GPU takes to train the large models: time of a step, memory, and one checkpoint.

    python benchmarks/scale_measure.py --out benchmarks/results/scale.json [--names H/14 g/14] [--batches 32 64]

For each model at 224 px, from the pieces that a run is made of: the classification objective, fused AdamW, bf16
autocast, gradients clipped to a norm of 1.

    "states"       bytes that stay from step to step: weights; weights and AdamW's two averages; both and gradients
    "steps"        milliseconds of a step (median) and the peak of memory, for micro-batches of several sizes, with and
                   without gradient checkpointing, plain and with every encoder block compiled. "ms" is null where the
                   GPU has too little memory
    "checkpoint"   of the first model: seconds that saving holds the training loop up, seconds until the checkpoint is
                   whole on the disk, its bytes, and the milliseconds of a step before and while it is written

The batch is one of noise that stays on the GPU: reading data is not measured. Needs a CUDA device. The file is written
anew after every measurement, so that one which is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import vitrail
from vitrail.data.loader import Batch
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.objectives.classification import Classification
from vitrail.system.ranks import Ranks
from vitrail.training.checkpoint import name_tensors
from vitrail.training.checkpoint_folder import CheckpointFolder
from vitrail.training.clipping import clip_gradients
from vitrail.training.config import OptimizerConfig
from vitrail.training.optim import build_optimizer, find_layers, initialise_state

DEVICE = torch.device("cuda")
BATCHES = {"H/14": (32, 64, 128), "g/14": (32, 64, 128), "L/16": (64, 128), "B/16": (128, 256)}
WARM_UP, TIMED = 2, 5
LONGEST_SAVE = 300
"""Seconds after which steps no longer go on beside it."""
OPTIMIZER = OptimizerConfig(learning_rate=1e-4, weight_decay=0.1)


def noise(images: int, size: tuple[int, int], classes: int) -> Batch:
    """A batch on the GPU."""
    return Batch(
        torch.randint(256, (images, 3, *size), dtype=torch.uint8, device=DEVICE),
        {"label": torch.randint(classes, (images,), device=DEVICE)},
        torch.arange(images, device=DEVICE),
        torch.ones(images, dtype=torch.bool, device=DEVICE),
    )


def gradients(objective: Classification, batch: Batch) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = objective(batch, key=0).loss
    loss.backward()


def training_step(objective: Classification, optimizer: torch.optim.Optimizer, batch: Batch) -> Callable[[], None]:
    def step() -> None:
        gradients(objective, batch)
        clip_gradients(objective.parameters(), OPTIMIZER.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], None]) -> float:
    """Of one step, by device events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def empty_cache() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def build(name: str) -> tuple[Classification, torch.optim.Optimizer, dict[str, Any]]:
    """The model with its optimiser, and the bytes that they hold from step to step."""
    empty_cache()
    before = torch.cuda.memory_allocated()

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated() - before

    objective = Classification(vitrail.create_model(name, seed=0)).to(DEVICE).train()
    states = {"model": name, "parameters": sum(parameter.numel() for parameter in objective.parameters())}
    states["weights_bytes"] = held()
    optimizer = build_optimizer(objective, OPTIMIZER, DEVICE)
    initialise_state(optimizer)
    states["with_adamw_bytes"] = held()
    gradients(objective, noise(1, objective.model.image_size, objective.model.num_classes))
    states["with_gradients_bytes"] = held()
    optimizer.zero_grad()
    return objective, optimizer, states


def measured_steps(objective: Classification, optimizer: torch.optim.Optimizer, images: int) -> dict[str, Any]:
    """The time of a step and the peak of memory, with a micro-batch of so many images."""
    empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"ms": None}
    begin = time.perf_counter()
    try:
        batch = noise(images, objective.model.image_size, objective.model.num_classes)
        step = training_step(objective, optimizer, batch)
        for _ in range(WARM_UP):
            step()
        torch.cuda.synchronize()
        row["ready_s"] = time.perf_counter() - begin
        torch.cuda.reset_peak_memory_stats()
        times = [milliseconds(step) for _ in range(TIMED)]
    except torch.OutOfMemoryError:
        optimizer.zero_grad()
        return row
    flops = FORWARD_AND_BACKWARD * compute_cost(objective.model.architecture).flops
    speed = images / statistics.median(times) * 1000
    row |= {
        "ms": statistics.median(times),
        "all_ms": times,
        "images_per_s": speed,
        "tflops_per_s": speed * flops / 1e12,
    }
    return row | {"peak_bytes": torch.cuda.max_memory_allocated()}


def measured_checkpoint(
    name: str, objective: Classification, optimizer: torch.optim.Optimizer, images: int
) -> dict[str, Any]:
    """One save as the training loop does it, while steps go on."""
    step = training_step(objective, optimizer, noise(images, objective.model.image_size, objective.model.num_classes))
    before = [milliseconds(step) for _ in range(WARM_UP + TIMED)][WARM_UP:]
    tensors = name_tensors(objective, optimizer, None)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointFolder(Path(folder), Ranks(0, 1, DEVICE), keep=1)
        checkpoints.open()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        checkpoints.save(1, tensors, {})
        held_up = time.perf_counter() - begin
        during = []
        while not checkpoints.list_steps() and time.perf_counter() - begin < LONGEST_SAVE:
            during.append(milliseconds(step))
        checkpoints.finish()
        whole = time.perf_counter() - begin
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "model": name,
        "batch": images,
        "held_up_s": held_up,
        "whole_after_s": whole,
        "bytes": size,
        "step_ms_before": statistics.median(before),
        "step_ms_while_writing": statistics.median(during) if during else None,
        "all_step_ms_while_writing": during,
    }


def compile_blocks(model: nn.Module) -> None:
    for block in find_layers(model).values():
        block.compile()


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=list(BATCHES))
    parser.add_argument("--batches", nargs="+", type=int, help="for all models; if left out, two or three for each")
    parser.add_argument("--no-checkpoint", action="store_true", help="save none")
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this measures CUDA devices, and torch sees none here\n")
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    result: dict[str, Any] = {
        "commit": arguments.commit or git.stdout.strip(),
        "device": torch.cuda.get_device_name(),
        "device_bytes": torch.cuda.get_device_properties(DEVICE).total_memory,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "states": [],
        "steps": [],
        "checkpoint": [],
    }

    def keep(kind: str, row: dict[str, Any]) -> None:
        result[kind].append(row)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(kind, {key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)

    for name in arguments.names:
        objective, optimizer, states = build(name)
        keep("states", states)
        batches = arguments.batches or BATCHES.get(name, (32,))
        for mode in ("plain", "blocks"):
            if mode == "blocks":
                compile_blocks(objective.model)
            for images in batches:
                torch.compiler.reset()  # else a second size would compile for sizes of any kind
                for checkpointing in (False, True):
                    objective.model.set_gradient_checkpointing(checkpointing)
                    row = measured_steps(objective, optimizer, images)
                    keep("steps", {"model": name, "mode": mode, "batch": images, "checkpointing": checkpointing, **row})
            if mode == "plain" and name == arguments.names[0] and not arguments.no_checkpoint:
                objective.model.set_gradient_checkpointing(False)
                keep("checkpoint", measured_checkpoint(name, objective, optimizer, batches[0]))
        del objective, optimizer
        torch.compiler.reset()
        empty_cache()


if __name__ == "__main__":
    main()
