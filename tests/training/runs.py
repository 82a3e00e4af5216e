"""Small training runs for the tests, and what came of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vitrail.training import fused_kernels
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve

HERE = Path(__file__).parent
MODEL = {"name": "Ti/4", "image_size": 16, "in_channels": 1, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
MASKED = {"kind": "masked-patches"}
AUTOENCODED = {"kind": "masked-autoencoding", "decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2}
NO_FLIP = {"global_area": (0.5, 1.0), "local_area": (0.2, 0.5), "local_count": 2, "flip": 0.0, "solarize": 0.0}
JOINT = {"kind": "lejepa", "views": NO_FLIP, "projector_width": 64, "projected": 16, "directions": 64}
TAUGHT = {"kind": "dino", "views": NO_FLIP, "projector_width": 64, "prototypes": 64, "teacher_momentum": 0.9}
TREE: dict[str, dict[str, Any]] = {
    "model": {**MODEL, "dropout": 0.1, "stochastic_depth": 0.1},
    "data": {"source": "digits", "batch_size": 32, "augmentation": {"crop_area": (0.6, 1.0), "flip": 0.0}},
    "optimizer": {"learning_rate": 3e-3, "averaging": 0.9, "weight_decay": 0.05},
    "schedule": {"steps": 20, "warmup_steps": 4},
    "run": {"deterministic": True, "log_every": 1, "evaluate_every": 8, "checkpoint_every": 3, "trackers": ()},
}
"""With all that is random in it: order, augmentation, dropout, stochastic depth."""


def tree(folder: Path | str, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """TREE in a folder, with some values changed: model={"depth": 1}."""
    changed = {**sections, "run": {"folder": str(folder), **sections.get("run", {})}}
    whole = {name: {**values, **changed.get(name, {})} for name, values in {**{n: {} for n in changed}, **TREE}.items()}
    if "views" in sections.get("objective", {}):
        del whole["data"]["augmentation"]  # views take its place
    return whole


def config(folder: Path | str, **sections: dict[str, Any]) -> RunConfig:
    return resolve(tree(folder, **sections))


def force_kernels(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Train by vitrail's kernels here too, in Triton's interpreter and in float32, whatever speaks against it."""
    from vitrail.fast.gpu.training import FusedTraining

    def attach(model: Any, fp8: bool) -> None:
        model.forward = FusedTraining(model, dtype=torch.float32)

    replace(fused_kernels, "explain_missing_kernels", lambda device: None)
    replace(fused_kernels, "_find_conflict", lambda *_: None)
    replace(fused_kernels, "_attach", attach)


def records(folder: Path, clock: bool = False) -> list[dict[str, Any]]:
    """The metric log; without what the clock decides, unless asked."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in entry.items() if clock or key != "clock"} for entry in entries]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in records(folder) if entry["kind"] == "train"]


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint that one process wrote."""
    (file,) = checkpoint.glob("*.safetensors")
    return load_file(file)


def state(checkpoint: Path) -> dict[str, Any]:
    """What is not tensors, without the clock."""
    found = json.loads((checkpoint / "state.json").read_text())
    del found["seconds"]
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimiser and average bit for bit, and the log in every field but the clock's."""
    first, second = checkpoints(one)[-1], checkpoints(other)[-1]
    assert first.name == second.name
    assert state(first) == state(second)
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    assert {name.split("/")[0] for name in ours} == {"objective", "optimizer", "average"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert records(one) == records(other)
