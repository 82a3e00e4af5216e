"""The runs behind docs/results, from one command on one GPU, as many at a time as may be.

python benchmarks/earn.py runs/earned --data cifar10=cifar10/ tiny-imagenet=tiny-imagenet/ flowers102=flowers102/

Each is `vitrail train` of a recipe in a folder of its own; what another begins from is waited for. They share the GPU
by NVIDIA's MPS, where that is there. Curves go to OUT/results.jsonl as runs end. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.workflows.bench.machine import commit

EVERY = 20.0
"""Seconds from one look to the next."""
OF_MANY_SIZES = ("data.on_device=false", "data.in_memory=true", "data.workers=8")
ON_FLOWERS = (*OF_MANY_SIZES, "data.validate_on=test", "data.batch_size=128", "schedule.epochs=100")


@dataclass(frozen=True)
class Planned:
    """A run: `vitrail train RECIPE data.source=… changes`."""

    recipe: str
    data: str
    changes: tuple[str, ...] = ()
    begins_from: str | None = None
    """Another run of the plan, whose weights it starts from."""

    def command(self, source: str, weights: str) -> str:
        """What a person would type."""
        given = [f"data.source={source}", *([f"model.weights={weights}"] if self.begins_from else []), *self.changes]
        return " ".join(["vitrail train", self.recipe, *given])


PLAN = {
    "cifar10-scratch": Planned("cifar10-scratch", "cifar10"),
    "cifar10-stem": Planned("cifar10-stem", "cifar10"),
    "pane": Planned("tiny-imagenet", "tiny-imagenet"),
    "flowers-scratch": Planned(
        "tiny-imagenet",
        "flowers102",
        (*ON_FLOWERS, "model.image_size=96", "schedule.warmup_steps=300", "optimizer.averaging=0.998"),
    ),
    "pane-to-cifar10": Planned("transfer-small", "cifar10", begins_from="pane"),
    "pane-to-flowers": Planned(
        "transfer-small",
        "flowers102",
        (
            *ON_FLOWERS,
            "data.augmentation.crop_area=[0.35,1.0]",
            "data.augmentation.crop_ratio=[0.75,1.3333]",
            "data.augmentation.shift=0",
            "optimizer.learning_rate=3e-4",
            "optimizer.averaging=0.998",
        ),
        begins_from="pane",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", default=list(PLAN), help=f"some of {', '.join(PLAN)}; all if not given")
    parser.add_argument("--data", nargs="+", required=True, help="NAME=DATA for each of the data sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--change", nargs="*", default=[], help="key=value, for all of them")
    options = parser.parse_args()
    sources = dict(given.split("=", 1) for given in options.data)
    unknown = [name for name in options.names if name not in PLAN]
    missing = {PLAN[name].data for name in options.names if name not in unknown} - sources.keys()
    if unknown or missing:
        parser.error(f"unknown: {', '.join(unknown) or 'none'}; --data is missing for: {', '.join(missing) or 'none'}")
    options.out.mkdir(parents=True, exist_ok=True)
    share_the_gpu(options.out)
    earn(options.out, options.names, sources, options.seed, options.change)


def earn(out: Path, names: list[str], sources: dict[str, str], seed: int, changes: list[str]) -> None:
    """All that are not finished, each as soon as what it begins from is there."""
    waiting = [name for name in names if not finished(out / name)]
    under_way: dict[str, subprocess.Popen[bytes]] = {}
    beside: dict[str, set[str]] = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop: the same command goes on"))
    try:
        while waiting or under_way:
            for name in [name for name in waiting if ready(out, name, names)]:
                waiting.remove(name)
                under_way[name] = begin(out, name, sources, seed, changes)
            for name in under_way:
                beside.setdefault(name, set()).update(under_way.keys() - {name})
            look(out, under_way)
            for name in [name for name, process in under_way.items() if process.poll() is not None]:
                code = under_way.pop(name).returncode
                if code:
                    waiting = [other for other in waiting if PLAN[other].begins_from != name]
                    print(f"{name} ended with {code}: {out / name}.log says why", flush=True)
                else:
                    write(out, name, collected(out, name, seed, changes, sorted(beside[name])))
    finally:
        for process in under_way.values():
            process.terminate()  # a run keeps a checkpoint then
            process.wait()


def finished(run: Path) -> bool:
    """Whether its weights are there, which are written at the end."""
    return (run / "model" / "config.json").exists()


def ready(out: Path, name: str, names: list[str]) -> bool:
    """Whether what it begins from is there, or nobody makes it."""
    first = PLAN[name].begins_from
    return first is None or first not in names or finished(out / first)


def begin(out: Path, name: str, sources: dict[str, str], seed: int, changes: list[str]) -> subprocess.Popen[bytes]:
    """The run as a process, its words in a file beside it."""
    planned = PLAN[name]
    begun = planned.begins_from
    weights = str(out / begun) if begun is not None and finished(out / begun) else begun or ""
    words = planned.command(sources[planned.data], weights).split()[1:]
    own = [f"run.folder={out / name}", f"run.seed={seed}", "run.trackers=[]", "run.report=false"]
    with (out / f"{name}.log").open("ab") as log:
        command = [sys.executable, "-m", "vitrail", *words, *own, *changes]
        # In a session of its own: Ctrl-C would reach it, `earn` then ask it to stop again, and that ends it at once.
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def look(out: Path, under_way: dict[str, subprocess.Popen[bytes]]) -> None:
    """Wait a while, then say how far everyone is."""
    until = time.monotonic() + EVERY
    while time.monotonic() < until and all(process.poll() is None for process in under_way.values()):
        time.sleep(0.2)
    told = []
    for name in under_way:
        found = [entry for entry in records(out / name) if "accuracy" in entry]
        told.append(f"{name} {found[-1]['step']}: {found[-1]['accuracy']:.1%}" if found else f"{name} begins")
    print("; ".join(told), flush=True)


def records(run: Path) -> list[dict[str, Any]]:
    """Of its curves so far, but for a line that is being written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def collected(out: Path, name: str, seed: int, changes: list[str], beside: list[str]) -> list[dict[str, Any]]:
    """What is kept of a run: a record about it, then its curves, all with its name."""
    found = records(out / name)
    last = next(entry for entry in reversed(found) if entry["kind"] == "train")
    planned = PLAN[name]
    about = {
        "kind": "about",
        "name": name,
        "recipe": planned.recipe,
        "command": " ".join([planned.command(planned.data, planned.begins_from or ""), *changes]),
        "seed": seed,
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "gpu_seconds": round(last["clock"]["seconds"], 1),
        "beside": ", ".join(beside),
        "steps": last["step"],
        "steps_done": last["step"],
        "finished": True,
    }
    return [about, *({**entry, "name": name} for entry in found)]


def write(out: Path, name: str, lines: list[dict[str, Any]]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    best = [line for line in lines if line["kind"] == "evaluation"]
    print(f"{name} is done: {best[-1]['accuracy']:.2%}" if best else f"{name} is done", flush=True)


def share_the_gpu(out: Path) -> None:
    """By MPS, where it is there: kernels of several processes then run at the same time."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        return
    for variable, folder in (("CUDA_MPS_PIPE_DIRECTORY", "mps"), ("CUDA_MPS_LOG_DIRECTORY", "mps-log")):
        os.environ.setdefault(variable, str((out / folder).resolve()))
        Path(os.environ[variable]).mkdir(parents=True, exist_ok=True)
    subprocess.run([control, "-d"], check=False)


if __name__ == "__main__":
    main()
