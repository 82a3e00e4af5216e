"""The runs behind docs/results, from one command on one GPU, as many at a time as may be.

python benchmarks/earn.py runs/earned --data cifar10=cifar10/ tiny-imagenet=tiny-imagenet/ flowers102=flowers102/

Each is `vitrail train` of a recipe in a folder of its own; what another begins from is waited for. They share the GPU
by NVIDIA's MPS, where that is there. Curves go to OUT/results.jsonl as runs end. Stopped, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.benchmark.machine import read_commit

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

    def words(self, source: str, weights: str, seed: int, changes: list[str]) -> list[str]:
        """What a person would type after `vitrail`."""
        given = [f"data.source={source}", *([f"model.weights={weights}"] if self.begins_from else []), *self.changes]
        return ["train", self.recipe, *given, *([f"run.seed={seed}"] if seed else []), *changes]


PLAN = {
    "cifar10-scratch": Planned("cifar10-scratch", "cifar10"),
    "cifar10-stem": Planned("cifar10-stem", "cifar10"),
    "pane": Planned("tiny-imagenet", "tiny-imagenet"),
    "tiny-imagenet-stem": Planned("tiny-imagenet-stem", "tiny-imagenet"),
    "tiny-imagenet-wide": Planned("tiny-imagenet-wide", "tiny-imagenet"),
    "flowers-scratch": Planned(
        "tiny-imagenet",
        "flowers102",
        (*ON_FLOWERS, "model.image_size=96", "schedule.warmup_steps=300", "optimizer.averaging=0.998"),
    ),
    "pane-to-cifar10": Planned("transfer-small", "cifar10", begins_from="pane"),
    "stem-to-cifar10": Planned("transfer-small", "cifar10", begins_from="tiny-imagenet-stem"),
    "wide-to-cifar10": Planned("transfer-wide", "cifar10", begins_from="tiny-imagenet-wide"),
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
    parser.add_argument("--commit", default=read_commit(), help="that of the code, where git cannot tell it")
    options = parser.parse_args()
    sources = {name: source for name, _, source in (given.partition("=") for given in options.data)}
    unknown = [name for name in options.names if name not in PLAN]
    missing = {PLAN[name].data for name in options.names if name not in unknown} - sources.keys()
    if unknown or missing:
        parser.error(f"unknown: {', '.join(unknown) or 'none'}; --data is missing for: {', '.join(missing) or 'none'}")
    if options.commit is None:
        parser.error("results belong to a commit, and here git knows none: give --commit")
    options.out.mkdir(parents=True, exist_ok=True)
    sys.exit(Earning(options.out, options.names, sources, options.seed, options.change, options.commit).run())


@dataclass
class Earning:
    """The runs of one command."""

    out: Path
    names: list[str]
    sources: dict[str, str]
    seed: int
    changes: list[str]
    commit: str

    def run(self) -> int:
        """All that are not finished, each as soon as what it begins from is there. How many failed."""
        waiting = [name for name in self.names if not finished(self.out / name)]
        for name in self.names:
            if name not in waiting:
                self.keep(name, beside=[])  # where it ended while this was being stopped
        under_way: dict[str, subprocess.Popen[bytes]] = {}
        beside: dict[str, set[str]] = {}
        failed = 0
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: sys.exit("asked to stop: the same command goes on"))
        control = share_the_gpu(self.out)
        try:
            while waiting or under_way:
                for name in [name for name in waiting if ready(self.out, name, self.names)]:
                    waiting.remove(name)
                    under_way[name] = self.begin(name)
                for name in under_way:
                    beside.setdefault(name, set()).update(under_way.keys() - {name})
                look(self.out, under_way)
                for name in [name for name, process in under_way.items() if process.poll() is not None]:
                    if code := under_way.pop(name).returncode:
                        failed += 1
                        waiting = [other for other in waiting if PLAN[other].begins_from != name]
                        print(f"{name} ended with {code}: {self.out / name}.log says why", flush=True)
                    else:
                        self.keep(name, sorted(beside[name]))
        finally:
            for process in under_way.values():
                process.terminate()  # a run keeps a checkpoint then
            for process in under_way.values():
                process.wait()
            if control is not None:
                subprocess.run([control], input=b"quit\n", check=False)
        return failed

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        """The run as a process, its words in a file beside it."""
        planned = PLAN[name]
        first = planned.begins_from
        weights = str(self.out / first) if first is not None and finished(self.out / first) else first or ""
        words = planned.words(self.sources[planned.data], weights, self.seed, self.changes)
        own = [f"run.folder={self.out / name}", "run.trackers=[]", "run.report=false"]
        with (self.out / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "vitrail", *words, *own]
            # In a session of its own: Ctrl-C would reach it, and to be asked again, as we then do, ends it at once.
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def keep(self, name: str, beside: list[str]) -> None:
        """Add a run to results.jsonl, once: a record about it, then its curves, all under its name."""
        path = self.out / "results.jsonl"
        kept = path.read_text().splitlines() if path.exists() else []
        if any(json.loads(line)["name"] == self.called(name) for line in kept):
            return
        found = records(self.out / name)
        last = next(entry for entry in reversed(found) if entry["kind"] == "train")
        planned = PLAN[name]
        words = planned.words(planned.data, published(planned.begins_from), self.seed, self.changes)
        about = {
            "kind": "about",
            "recipe": planned.recipe,
            "command": shlex.join(["vitrail", *words]),
            "seed": self.seed,
            "commit": self.commit,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": torch.__version__,
            "gpu_seconds": round(last["clock"]["seconds"], 1),
            "beside": ", ".join(beside),
            "steps": last["step"],
            "steps_done": last["step"],
            "finished": True,
        }
        with path.open("a") as file:
            file.writelines(json.dumps({**entry, "name": self.called(name)}) + "\n" for entry in (about, *found))
        evaluated = [entry for entry in found if entry["kind"] == "evaluation"]
        print(f"{name} is done" + (f": {evaluated[-1]['accuracy']:.2%}" if evaluated else ""), flush=True)

    def called(self, name: str) -> str:
        """In the results, where there may be several seeds."""
        return f"{name}, seed {self.seed}" if self.seed else name


def published(first: str | None) -> str:
    """What to call the weights of a run in a command for others: pane is inside the package."""
    return "pane" if first == "pane" else f"runs/{first}"


def finished(run: Path) -> bool:
    """Whether its weights are there, which are written at the end."""
    return (run / "model" / "config.json").exists()


def ready(out: Path, name: str, names: list[str]) -> bool:
    """Whether what it begins from is there, or nobody makes it."""
    first = PLAN[name].begins_from
    return first is None or first not in names or finished(out / first)


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


def share_the_gpu(out: Path) -> str | None:
    """By MPS, where it is there: kernels of several processes then run at the same time. What ends it."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return None
    for variable, folder in (("CUDA_MPS_PIPE_DIRECTORY", "mps"), ("CUDA_MPS_LOG_DIRECTORY", "mps-log")):
        os.environ[variable] = str((out / folder).resolve())
        Path(os.environ[variable]).mkdir(parents=True, exist_ok=True)
    return control if subprocess.run([control, "-d"], check=False).returncode == 0 else None


if __name__ == "__main__":
    main()
