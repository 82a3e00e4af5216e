"""Write the tables and figures of docs/results.md, docs/small-data.md and benchmarks/RESULTS.md from the raw results.

    python benchmarks/results_page.py            write them
    python benchmarks/results_page.py --check    write nothing; the exit code is 1 if something is out of date

In the pages, the text between <!-- from raw: NAME --> and <!-- end --> is replaced; all other text is written by hand.
The figures go to docs/images.
"""

from __future__ import annotations

import json
import re
import statistics
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results_figures import Bars, Curves, Line, Panel, Shown, mark, tenths, write
from results_raw import Raw, Record, Run, percent

ROOT = Path(__file__).parent.parent
PAGES = ("docs/results.md", "docs/small-data.md", "benchmarks/RESULTS.md")
IMAGES = "docs/images"
MARKED = re.compile(r"(<!-- from raw: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Callable[[Raw], str]


def format_gain(value: float) -> str:
    size = tenths(abs(value))
    return size if size == "0.0" else f"{'+' if value > 0 else '−'}{size}"


def make_table(heading: list[str], rows: list[list[str]], numbers: int = 0) -> str:
    """Return a Markdown table whose last `numbers` columns are aligned to the right."""
    lines = [heading, ["---"] * (len(heading) - numbers) + ["---:"] * numbers, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Results: what was trained.


@dataclass(frozen=True)
class Shape:
    """The size of a plain ViT with average pooling and fixed positions."""

    patch: int
    mlp_dim: int
    classes: int
    size: int
    width: int = 256
    depth: int = 7
    stem: tuple[int, ...] = ()
    """Channels of 3×3 convolutions in place of the patch projection."""

    @property
    def weights(self) -> int:
        square = self.width * self.width + self.width
        mlp = 2 * self.width * self.mlp_dim + self.mlp_dim + self.width
        block = 4 * square + mlp + 4 * self.width
        return self.first_layer + self.depth * block + 2 * self.width + self.classes * (self.width + 1)

    @property
    def first_layer(self) -> int:
        if not self.stem:
            return 3 * self.patch**2 * self.width + self.width
        pairs = zip((3, *self.stem), self.stem, strict=False)
        return sum(9 * before * after + 2 * after for before, after in pairs) + self.width * (self.stem[-1] + 1)

    def __str__(self) -> str:
        first = "convolutional stem" if self.stem else f"patches of {self.patch}"
        return f"{self.size} px: {self.weights / 1e6:.1f}M weights, {first}, width {self.width}, depth {self.depth}"


STEM = (64, 128, 256)
SCRATCH = {
    "cifar10-scratch": ("CIFAR-10", Shape(4, 512, 10, 32)),
    "cifar10-stem-less-decay": ("CIFAR-10", Shape(4, 512, 10, 32, stem=STEM)),
    "cifar10-stem-twice": ("CIFAR-10", Shape(4, 512, 10, 32, stem=STEM)),
    "cifar10-stem": ("CIFAR-10", Shape(4, 512, 10, 32, stem=STEM)),
    "cifar10-stem-wide": ("CIFAR-10", Shape(4, 768, 10, 32, width=384, stem=(64, 128, 384))),
    "lite4": ("CIFAR-10", Shape(4, 512, 10, 32)),
    "stem4": ("CIFAR-10", Shape(4, 512, 10, 32, stem=STEM)),
    "pane": ("Tiny-ImageNet", Shape(8, 1024, 200, 64)),
    "pane-again": ("Tiny-ImageNet", Shape(8, 1024, 200, 64)),
    "tiny-imagenet-stem": ("Tiny-ImageNet", Shape(8, 1024, 200, 64, stem=STEM)),
    "tiny-imagenet-wide": ("Tiny-ImageNet", Shape(8, 1536, 200, 64, width=384, depth=9)),
    "flowers-scratch": ("Flowers-102", Shape(8, 1024, 102, 96)),
}
TUNED = {
    "pane-to-cifar10": ("CIFAR-10", Shape(8, 1024, 10, 96)),
    "pane-to-cifar10-20": ("CIFAR-10", Shape(8, 1024, 10, 96)),
    "stem-to-cifar10": ("CIFAR-10", Shape(8, 1024, 10, 96, stem=STEM)),
    "wide-to-cifar10": ("CIFAR-10", Shape(8, 1536, 10, 96, width=384, depth=9)),
    "pane-to-flowers": ("Flowers-102", Shape(8, 1024, 102, 96)),
}
SEEDS = {
    "`cifar10-stem`": ("cifar10-stem", "cifar10-stem, seed 1", "cifar10-stem, seed 2"),
    "`cifar10-scratch optimizer.weight_decay=0.2`": tuple(
        f"cifar10-scratch, weight decay 0.2, seed {seed}" for seed in range(3)
    ),
}
SEEDED = sorted({name for names in SEEDS.values() for name in names} - {"cifar10-stem"})
HELD_OUT = ("0.05", "0.2", "0.4")
"""Weight decays that were compared on held-out training images."""
PHOTO_SETTINGS = ("kind", "rate", "steps", "size")
FROM_PANE = ("pane-to-cifar10", "pane-to-flowers")
OPTIMIZERS = {"lite4": "AdamW", "stem4": "AdamW"}
"""Optimizers that are not Muon."""


def list_runs(raw: Raw, names: dict[str, tuple[str, Shape]]) -> str:
    heading = ["run", "data and model", "epochs", "seconds", "top-1, %"]
    rows = []
    for name, (data, shape) in names.items():
        run = raw.runs[name]
        what = f"{data} at {shape}, {OPTIMIZERS.get(name, 'Muon')}"
        numbers = [f"{run.epochs:.0f}", f"{run.seconds:.0f}", f"{run.top1:.2f}"]
        rows.append([name, what, *numbers])
    return make_table(heading, rows, numbers=3)


def list_seeds(raw: Raw) -> str:
    """List the accuracy of each seed, with the mean and the sample standard deviation."""
    rows = []
    for title, names in SEEDS.items():
        accuracies = [raw.runs[name].top1 for name in names]
        spread = f"{statistics.mean(accuracies):.2f} ± {statistics.stdev(accuracies):.2f}"
        rows.append([title, *(f"{accuracy:.2f}" for accuracy in accuracies), spread])
    return make_table(["recipe", "seed 0", "seed 1", "seed 2", "mean"], rows, numbers=4)


def list_held_out(raw: Raw) -> str:
    """Compare weight decays of plain ViTs on a tenth of the training images that was held out."""
    recipes = ("cifar10-scratch", "tiny-imagenet")
    rows = [
        [decay, *(f"{raw.runs[f'{recipe}, held out, weight decay {decay}'].top1:.2f}" for recipe in recipes)]
        for decay in HELD_OUT
    ]
    return make_table(["weight decay", *(f"`{recipe}`, held-out top-1, %" for recipe in recipes)], rows, numbers=2)


def list_photo_trainings(raw: Raw) -> str:
    """Compare ways to train on 245 photos: means over three draws of breeds."""
    lines = (raw.folder / "finetune_photos_h200.jsonl").read_text().splitlines()
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in map(json.loads, lines):
        if record.get("kind") != "about":
            key = tuple(record[name] if name != "size" else record[name][0] for name in PHOTO_SETTINGS)
            groups.setdefault(key, []).append(record)
    rows = []
    for (kind, rate, steps, size), records in groups.items():
        what = "linear head, closed form" if kind is None else f"{kind}, {rate:g}, {steps} steps"
        tested, reported = ([100 * record[name] for record in records] for name in ("test", "reported"))
        spread = f"{statistics.mean(tested):.1f} ± {statistics.stdev(tested):.1f}"
        rows.append([what, str(size), spread, f"{statistics.mean(reported):.1f}"])
    rows.sort(key=lambda row: -float(row[2].split()[0]))
    return make_table(["245 photos, from pane", "px", "test photos, %", "printed, %"], rows, numbers=3)


def format_commit(run: Run) -> str:
    """Return the short commit id, with a + if the working tree had changes."""
    name = run.about["commit"]
    return name[:7] if set(name) <= set(string.hexdigits) else f"{name[:7]}+"


def list_commands(raw: Raw) -> str:
    """List the command of each run, with its seed, its commit and the runs that shared its GPU."""
    lines = ["```bash"]
    for name in (*SCRATCH, *TUNED, *SEEDED):
        about = raw.runs[name].about
        lines.append(
            f"# {name} (seed {about['seed']}, commit {format_commit(raw.runs[name])}). Beside it: {about['beside']}"
        )
        lines.append(about.get("command", "# (no recipe: all settings are in cifar10_on_device_h200.jsonl)"))
    return "\n".join([*lines, "```"])


def evaluate_pane(raw: Raw) -> str:
    """Tabulate the evaluation of the weights in the package."""
    report = raw.read("pane_evaluation.json")
    shares = {"top-1, %": "top1", "top-5, %": "top5"}
    numbers = {"negative log-likelihood": "negative_log_likelihood", "calibration error": "calibration_error"}
    rows = [[name, *(f"{100 * report[key][end]:.2f}" for end in ENDS)] for name, key in shares.items()]
    rows += [[name, *(f"{report[key][end]:.4f}" for end in ENDS)] for name, key in numbers.items()]
    return make_table(
        [f"{report['images']:,} images, {report['about']['precision']}", "value", "95% from", "to"], rows, 3
    )


ENDS = ("value", "low", "high")
SETS = {"CIFAR-10": "cifar10", "Flowers-102": "flowers102"}
FROZEN = (
    ("least-squares", 1, "frozen, least squares, 1 image of each class"),
    ("least-squares", 5, "… 5 images"),
    ("least-squares", 10, "… 10 images"),
    ("least-squares", 25, "… 25 images"),
    ("knn, k=20", None, "frozen, 20 nearest neighbours, all images"),
    ("linear", None, "frozen, linear probe, all images"),
)


def compare_transfer(raw: Raw) -> str:
    """Compare pane's frozen features, fine-tuning from pane, and training from scratch."""
    rows = [
        [title, *(format_fewshot(raw, data, method, shots) for data in SETS.values())]
        for method, shots, title in FROZEN
    ]
    rows.append(["fine-tuned, 96 px", *(format_run(raw, name) for name in FROM_PANE)])
    rows.append(["from scratch", *(format_run(raw, name) for name in ("cifar10-scratch", "flowers-scratch"))])
    return make_table(["top-1, %", *SETS], rows, numbers=2)


def format_fewshot(raw: Raw, data: str, method: str, shots: int | None) -> str:
    summaries = raw.read(f"pane_fewshot_{data}.json")["summaries"]
    (summary,) = (each for each in summaries if (each["method"], each["shots"]) == (method, shots))
    spread = "" if summary["deviation"] is None else f" ± {100 * summary['deviation']:.1f}"
    return f"{percent(summary):.1f}{spread}"


def format_run(raw: Raw, name: str) -> str:
    run = raw.runs[name]
    return f"{run.top1:.2f} ({run.epochs:.0f} epochs, {run.seconds:.0f} s)"


def list_scratch_results(raw: Raw) -> str:
    """List published results and ours (in bold), by data set and accuracy."""
    results: list[tuple[str, float, list[str]]] = []
    for each in raw.read("literature.json")["from_scratch"]:
        cells = [each["model"], cite_source(each), each["weights"] or "–", str(each["epochs"]), f"{each['top1']:g}"]
        results.append((each["data"], each["top1"], cells))
    for name, (data, shape) in SCRATCH.items():
        if data != "Flowers-102":  # nobody else has our split
            run = raw.runs[name]
            numbers = [f"{shape.weights / 1e6:.1f}M", f"{run.epochs:.0f}", f"**{run.top1:.2f}**"]
            results.append((data, run.top1, [f"**ours**, {name}", "this page", *numbers]))
    rows = [[data, *cells] for data, _, cells in sorted(results)]
    return make_table(["data", "model", "source", "weights", "epochs", "top-1, %"], rows, numbers=3)


def cite_source(each: Record) -> str:
    """Return the source of a published number, and whether we looked it up."""
    if each["how"] == "recalled":
        return "recalled, not looked up"
    name = "/".join(each["source"].split("/")[-2:])
    return f"[{name}]({each['source']})" + (", from our notes" if each["how"] == "noted" else "")


def list_pretrained_results(raw: Raw) -> str:
    rows = [
        [
            f"{each['model']}, pre-trained on {each['on']}",
            each["source"],
            *(f"{each[data]:.2f}" for data in SETS.values()),
        ]
        for each in raw.read("literature.json")["pretrained"]
    ]
    pane, flowers, wide = (f"**{raw.runs[name].top1:.2f}**" for name in (*FROM_PANE, "wide-to-cifar10"))
    rows.insert(0, ["**ours**, pane, pre-trained on Tiny-ImageNet", "this page", pane, f"{flowers} (other split)"])
    rows.insert(1, ["**ours**, tiny-imagenet-wide, pre-trained on Tiny-ImageNet", "this page", wide, "–"])
    return make_table(["model", "source", "CIFAR-10", "Flowers-102"], rows, numbers=2)


CUT_OFF = {
    "cifar10-scratch-250": "CIFAR-10, plain, Muon, 250 epochs",
    "cifar10-stem-250": "CIFAR-10, convolutional stem, Muon, 250 epochs",
    "tiny-imagenet-150": "Tiny-ImageNet, plain, Muon, 150 epochs",
    "m4": "CIFAR-10, plain, 10.7M weights, AdamW, 130 epochs",
    "stem2": "CIFAR-10, convolutional stem to 256 tokens, AdamW, 80 epochs",
    "longer-base": "CIFAR-10, plain, AdamW 1e-3, 60 epochs of batches of 128",
    "longer-lr2": "… learning rate 2e-3",
    "longer-harsh": "… RandAugment twice, mixing always",
}


def list_unfinished(raw: Raw) -> str:
    rows = []
    for name, title in CUT_OFF.items():
        run = raw.runs[name]
        steps: int = run.about.get("steps") or count_planned_steps(run)
        last = run.evaluations[-1]["step"]
        rows.append([name, title, f"{run.step:,} of {steps:,}", f"{run.top1:.2f} at {last:,}"])
    return make_table(["run", "what", "steps", "top-1, % at step"], rows, numbers=2)


def count_planned_steps(run: Run) -> int:
    """Return the planned steps of a run on CIFAR-10 whose length was given in epochs."""
    settings = run.about["settings"]
    return round(float(settings["schedule"]["epochs"]) * 50_000 / int(settings["data"]["batch_size"]))


TARGETS = (
    ("CIFAR-10 from scratch, plain ViT", 93.5, 95.0, "cifar10-scratch"),
    ("CIFAR-10 from scratch, convolutional stem", 95.5, 96.5, "cifar10-stem"),
    ("Tiny-ImageNet from scratch, plain ViT", 60.0, 64.0, "tiny-imagenet-wide"),
    ("Tiny-ImageNet → CIFAR-10, fine-tuned", 96.5, 97.5, "wide-to-cifar10"),
)


def list_targets(raw: Raw) -> str:
    rows = []
    for what, wanted, hoped, name in TARGETS:
        top1 = raw.runs[name].top1
        verdict = "reached" if top1 >= wanted else f"not reached: {wanted - top1:.2f} points short"
        verdict += ", and what was hoped for" if top1 >= hoped else ""
        rows.append([what, verdict, f"{wanted}", f"{hoped}", f"{top1:.2f}"])
    return make_table(["what", "verdict", "wanted", "hoped for", "have"], rows, numbers=3)


# Small data: what moved the numbers.

BASE = "short-base"
CHANGES = {
    BASE: "the base: AdamW, learning rate 1e-3",
    "short-lr5": "learning rate 5e-4",
    "short-b95": "β₂ 0.95 instead of 0.999",
    "short-noclip": "no clipping of gradients",
    "short-fp32": "fp32 instead of bf16",
    "short-patch01": "patch projection at a tenth of the rate",
    "short-learned": "learned positions instead of sine-cosine",
    "short-token": "learned positions and a class token",
    "short-nomix": "no mixing, RandAugment or erasing",
    "short-ls01": "layer scale from 0.1",
    "short-stem": "convolutional stem",
    "short-muon1": "Muon instead of AdamW",
    "short-muon3": "Muon, learning rate 3e-3",
}


def rank_changes(raw: Raw) -> list[str]:
    return sorted(CHANGES, key=lambda name: -raw.runs[name].top1)


def list_changes(raw: Raw) -> str:
    base = raw.runs[BASE]
    rows = []
    for name in rank_changes(raw):
        run = raw.runs[name]
        gain = "" if name == BASE else format_gain(run.top1 - base.top1)
        rows.append([f"{CHANGES[name]} ({name})", describe_change(run, base), tenths(run.top1), gain])
    command = f"```bash\n{base.about['command']}\n```"
    return f"{command}\n\n{make_table(['change (run)', 'added to the command', 'top-1, %', 'gain'], rows, numbers=2)}"


def describe_change(run: Run, base: Run) -> str:
    """Return the settings that a run's command adds to the base's command."""
    ours, theirs = run.about["command"], base.about["command"]
    if run is base:
        return ""
    if "cifar10-stem" in ours:
        return "`cifar10-stem` as recipe, `optimizer.weight_decay=0.05`"
    return f"`{ours.removeprefix(theirs).strip()}`" if ours != theirs else "(a changed optimiser, no setting)"


RATES = (
    ("plain, 3.7M, batches of 512, 3,907 steps", ("lite4-5e-4", "lite4-1e-3", "lite4-2e-3")),
    ("plain, 3.7M, batches of 128, 3,000 steps", ("short-lr5", "short-base", None)),
    ("plain, 3.7M, batches of 128, 4,000 of 23,438 steps", (None, "longer-base@4000", "longer-lr2@4000")),
    ("the same two, 8,000 of 23,438 steps", (None, "longer-base@8000", "longer-lr2@8000")),
)


def compare_rates(raw: Raw) -> str:
    rows = [[title, *(accuracy_at(raw, name) for name in names)] for title, names in RATES]
    return make_table(["AdamW, top-1, %", "5e-4", "1e-3", "2e-3"], rows, numbers=3)


def accuracy_at(raw: Raw, name: str | None) -> str:
    """Return the accuracy at the end of a run, or at a step of it for "run@step"."""
    if name is None:
        return "–"
    run, _, step = name.partition("@")
    return tenths(raw.runs[run].at(int(step)) if step else raw.runs[run].top1)


LONG = {
    "cifar10-scratch": "Muon 1.5e-3, plain",
    "lite4": "AdamW 6e-4, plain",
    "stem4": "AdamW 6e-4, convolutional stem",
    "cifar10-stem-less-decay": "Muon 1.5e-3, convolutional stem, decay 0.05",
}
MARKS = (4_000, 8_000, 12_000, 28_000)


def compare_long_runs(raw: Raw) -> str:
    rows = []
    for name, title in LONG.items():
        points = dict(raw.runs[name].over_steps())
        last = f"{raw.runs[name].top1:.2f} ({max(points):,.0f})"
        rows.append([title, *(tenths(points[step]) if step in points else "–" for step in MARKS), last])
    return make_table(
        ["top-1, % after steps of 256", *(f"{step:,}" for step in MARKS), "last"], rows, numbers=len(MARKS) + 1
    )


def compare_augmentation(raw: Raw) -> str:
    names = {"longer-base": "RandAugment once, half of the batches mixed", "longer-harsh": "twice, and all mixed"}
    rows = [[title, *(tenths(raw.runs[name].at(step)) for step in (4_000, 8_000))] for name, title in names.items()]
    return make_table(["AdamW 1e-3, batches of 128, top-1, %", "4,000 steps", "8,000 steps"], rows, numbers=2)


def compare_runs(raw: Raw, names: dict[str, str]) -> str:
    """Compare long runs of the ViT with a convolutional stem that differ in one setting."""
    rows = []
    for name, title in names.items():
        run = raw.runs[name]
        last = run.evaluations[-1]
        steps = [f"{run.at(step):.2f}" for step in (8_000, 20_000)]
        rows.append([title, *steps, f"{run.top1:.2f}", f"{last['loss']:.3f}", f"{percent(run.training[-1]):.1f}"])
    heading = ["Muon, stem, 150 epochs", "8,000 steps", "20,000 steps", "the end", "test loss"]
    return make_table([*heading, "training top-1 (augmented, mixed)"], rows, numbers=5)


DECAYS = {"cifar10-stem-less-decay": "weight decay 0.05", "cifar10-stem": "weight decay 0.2"}
ROUNDS = {"cifar10-stem-less-decay": "RandAugment once, decay 0.05", "cifar10-stem-twice": "twice, decay 0.05"}


LATE = -7
"""The figure and the table show the last 7 evaluations."""


def list_last_evaluations(raw: Raw) -> str:
    """Tabulate the end of pane's training."""
    run = raw.runs["pane"]
    rows = []
    for each in run.evaluations[LATE:]:
        mixed = next(record for record in run.training if record["step"] == each["step"])
        cells = [f"{each['step']:,}", f"{mixed['loss']:.3f}", f"{each['loss']:.3f}", f"{percent(each):.2f}"]
        rows.append(cells)
    return make_table(["step", "training loss", "validation loss", "validation top-1, %"], rows, numbers=4)


TOGETHER = (
    "pane",
    "cifar10-scratch",
    "cifar10-scratch-250",
    "cifar10-stem-250",
    "tiny-imagenet-150",
    "flowers-scratch",
)


def list_throughput(raw: Raw) -> str:
    rows = [
        [name, raw.runs[name].about["beside"].split(", on one GPU")[0], f"{raw.runs[name].speed:,.0f}"]
        for name in TOGETHER
    ]
    speeds = [raw.runs[name].speed for name in CHANGES]
    rows.append(["each of the short runs", "the others", f"{min(speeds):,.0f} to {max(speeds):,.0f}"])
    return make_table(["run", "beside it on the GPU", "images a second"], rows, numbers=1)


TABLES: dict[str, Table] = {
    "scratch": lambda raw: list_runs(raw, SCRATCH),
    "tuned": lambda raw: list_runs(raw, TUNED),
    "seeds": list_seeds,
    "held-out": list_held_out,
    "photos": list_photo_trainings,
    "commands": list_commands,
    "pane": evaluate_pane,
    "transfer": compare_transfer,
    "literature-scratch": list_scratch_results,
    "literature-pretrained": list_pretrained_results,
    "cut-off": list_unfinished,
    "targets": list_targets,
    "changes": list_changes,
    "rates": compare_rates,
    "long-runs": compare_long_runs,
    "harsh": compare_augmentation,
    "decay": lambda raw: compare_runs(raw, DECAYS),
    "twice": lambda raw: compare_runs(raw, ROUNDS),
    "late": list_last_evaluations,
    "throughput": list_throughput,
}


# Figures.


def make_figures(raw: Raw) -> dict[str, Shown]:
    runs = raw.runs
    cifar10 = {
        "cifar10-scratch": "plain",
        "cifar10-stem": "stem, decay 0.2",
        "pane-to-cifar10": "from pane, 96 px",
    }
    cifar10["wide-to-cifar10"] = "from wide, 96 px"
    tiny_imagenet = {"pane": "pane", "pane-again": "pane, run again", "tiny-imagenet-stem": "stem"}
    tiny_imagenet["tiny-imagenet-wide"] = "wide"
    flowers = {"flowers-scratch": (0, "scratch, 96 px"), "pane-to-flowers": (3, "from pane, 96 px")}
    panels = [
        Panel("CIFAR-10", "epochs", [Line(cifar10[n], runs[n].over_epochs(), i) for i, n in enumerate(cifar10)], 55),
        Panel(
            "Tiny-ImageNet",
            "epochs",
            [Line(t, runs[n].over_epochs(), i) for i, (n, t) in enumerate(tiny_imagenet.items())],
            25,
        ),
        Panel("Flowers-102", "epochs", [Line(t, runs[n].over_epochs(), i) for n, (i, t) in flowers.items()], 50),
    ]
    long = [Line(t, runs[n].over_steps(), i) for i, (n, t) in enumerate(LONG.items())]
    bars = [(CHANGES[name], runs[name].top1) for name in rank_changes(raw)]
    top1, losses = (runs["pane"].over_steps(name)[LATE:] for name in ("accuracy", "loss"))
    end = [
        Panel("Top-1", "step", [Line("validation", top1)], start=top1[0][0] - 1_000),
        Panel("Loss", "step", [Line("validation", losses, 1)], start=top1[0][0] - 1_000, percent=False),
    ]
    decay = [
        Panel("Top-1", "step", [Line(t, runs[n].over_steps(), i) for i, (n, t) in enumerate(DECAYS.items())], 84),
        Panel(
            "Loss",
            "step",
            [Line(t, runs[n].over_steps("loss"), i) for i, (n, t) in enumerate(DECAYS.items())],
            percent=False,
        ),
    ]
    return {
        "results-curves.svg": Curves("Validation accuracy of the main runs", panels),
        "small-data-changes.svg": Bars(
            "One change at a time: CIFAR-10 after 3,000 steps", "top-1, % (seed 0)", bars, CHANGES[BASE]
        ),
        "small-data-long.svg": Curves("CIFAR-10, long runs", [Panel("Test accuracy", "steps of 256 images", long, 55)]),
        "small-data-decay.svg": Curves("CIFAR-10 test images, convolutions first: weight decay", decay),
        "small-data-late.svg": Curves("Validation of pane: the loss turns before the accuracy does", end),
    }


# Pages.


def fill_tables(page: str, raw: Raw) -> str:
    """Return the page with all its tables written anew. An unknown name of a table is a KeyError."""

    def write_table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{TABLES[match[2]](raw)}\n\n{match[3]}"

    return MARKED.sub(write_table, page)


def find_stale(raw: Raw, root: Path = ROOT) -> list[str]:
    """Return the pages and figures that differ from the raw results, as paths below `root`."""
    texts = {name: (root / name).read_text(encoding="utf-8") for name in PAGES}
    pages = [name for name, text in texts.items() if fill_tables(text, raw) != text]
    stale_figures = []
    for name, figure in make_figures(raw).items():
        path = root / IMAGES / name
        if not path.exists() or mark(figure) not in path.read_text(encoding="utf-8"):
            stale_figures.append(f"{IMAGES}/{name}")
    return pages + stale_figures


def write_pages(raw: Raw, root: Path = ROOT) -> None:
    for name in PAGES:
        text = (root / name).read_text(encoding="utf-8")
        (root / name).write_text(fill_tables(text, raw), encoding="utf-8")
    for name, figure in make_figures(raw).items():
        write(figure, root / IMAGES / name)


def main() -> None:
    match sys.argv[1:]:
        case []:
            write_pages(Raw())
        case ["--check"]:
            stale = find_stale(Raw())
            sys.exit(f"out of date: {', '.join(stale)}; run python benchmarks/results_page.py" if stale else 0)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
