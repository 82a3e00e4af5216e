"""Tables and figures of docs/results.md and docs/small-data.md, from the raw results: python benchmarks/results_page.py

In the pages, what stands between <!-- from raw: NAME --> and <!-- end --> is replaced; all other words are written by
hand. The figures go to docs/images. With --check nothing is written, and the exit code is 1 where something would be.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from results_figures import Bars, Curves, Line, Panel, Shown, mark, tenths, write
from results_raw import Raw, Record, Run, percent

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("results.md", "small-data.md")
MARKED = re.compile(r"(<!-- from raw: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Table = Callable[[Raw], str]


def signed(value: float) -> str:
    size = tenths(abs(value))
    return size if size == "0.0" else f"{'+' if value > 0 else '−'}{size}"


def table(heading: list[str], rows: list[list[str]], numbers: int = 0) -> str:
    """In Markdown; so many of the last columns are numbers."""
    lines = [heading, ["---"] * (len(heading) - numbers) + ["---:"] * numbers, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Results: what was trained.


@dataclass(frozen=True)
class Shape:
    """Of a plain ViT with average pooling and positions that are not learned."""

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
FROM_PANE = ("pane-to-cifar10", "pane-to-flowers")
OPTIMIZERS = {"lite4": "AdamW", "stem4": "AdamW"}
"""All others: Muon."""


def trained(raw: Raw, names: dict[str, tuple[str, Shape]]) -> str:
    heading = ["run", "data and model", "seed, commit", "epochs", "seconds", "top-1, %"]
    rows = []
    for name, (data, shape) in names.items():
        run = raw.runs[name]
        what = f"{data} at {shape}, {OPTIMIZERS.get(name, 'Muon')}"
        numbers = [f"{run.epochs:.0f}", f"{run.seconds:.0f}", f"{run.top1:.2f}"]
        rows.append([name, what, f"{run.about['seed']}, {commit(run)}", *numbers])
    return table(heading, rows, numbers=3)


def commit(run: Run) -> str:
    """The commit's name, with a + where more was changed that was committed next."""
    name = run.about["commit"]
    return name[:7] if set(name) <= set(string.hexdigits) else f"{name[:7]}+"


def commands(raw: Raw) -> str:
    """Each run's own, under what shared the GPU with it; settings alone are known of some."""
    lines = ["```bash"]
    for name in (*SCRATCH, *TUNED):
        about = raw.runs[name].about
        lines.append(f"# {name}. Beside it: {about['beside']}")
        lines.append(about.get("command", "# (no recipe: all settings are in cifar10_on_device_h200.jsonl)"))
    return "\n".join([*lines, "```"])


def pane(raw: Raw) -> str:
    """The weights that ship, evaluated by themselves."""
    found = raw.read("pane_evaluation.json")
    shares = {"top-1, %": "top1", "top-5, %": "top5"}
    numbers = {"negative log-likelihood": "negative_log_likelihood", "calibration error": "calibration_error"}
    rows = [[name, *(f"{100 * found[key][end]:.2f}" for end in ENDS)] for name, key in shares.items()]
    rows += [[name, *(f"{found[key][end]:.4f}" for end in ENDS)] for name, key in numbers.items()]
    return table([f"{found['images']:,} images, {found['about']['precision']}", "value", "95% from", "to"], rows, 3)


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


def transfer(raw: Raw) -> str:
    """What pane's representation is worth, beside training from nothing."""
    rows = [[title, *(frozen(raw, data, method, shots) for data in SETS.values())] for method, shots, title in FROZEN]
    rows.append(["fine-tuned, 96 px", *(tuned(raw, name) for name in FROM_PANE)])
    rows.append(["from scratch", *(tuned(raw, name) for name in ("cifar10-scratch", "flowers-scratch"))])
    return table(["top-1, %", *SETS], rows, numbers=2)


def frozen(raw: Raw, data: str, method: str, shots: int | None) -> str:
    found = raw.read(f"pane_fewshot_{data}.json")["summaries"]
    (summary,) = (each for each in found if (each["method"], each["shots"]) == (method, shots))
    spread = "" if summary["deviation"] is None else f" ± {100 * summary['deviation']:.1f}"
    return f"{percent(summary):.1f}{spread}"


def tuned(raw: Raw, name: str) -> str:
    run = raw.runs[name]
    return f"{run.top1:.2f} ({run.epochs:.0f} epochs, {run.seconds:.0f} s)"


def literature_scratch(raw: Raw) -> str:
    """By data, then from the least to the best; ours in bold."""
    found: list[tuple[str, float, list[str]]] = []
    for each in raw.read("literature.json")["from_scratch"]:
        cells = [each["model"], cited(each), each["weights"] or "–", str(each["epochs"]), f"{each['top1']:g}"]
        found.append((each["data"], each["top1"], cells))
    for name, (data, shape) in SCRATCH.items():
        if data != "Flowers-102":  # nobody else has our split
            run = raw.runs[name]
            numbers = [f"{shape.weights / 1e6:.1f}M", f"{run.epochs:.0f}", f"**{run.top1:.2f}**"]
            found.append((data, run.top1, [f"**ours**, {name}", "this page", *numbers]))
    rows = [[data, *cells] for data, _, cells in sorted(found)]
    return table(["data", "model", "source", "weights", "epochs", "top-1, %"], rows, numbers=3)


def cited(each: Record) -> str:
    """Where a number is from, and how sure we are of it."""
    if each["how"] == "recalled":
        return "recalled, not looked up"
    name = "/".join(each["source"].split("/")[-2:])
    return f"[{name}]({each['source']})" + (", from our notes" if each["how"] == "noted" else "")


def literature_pretrained(raw: Raw) -> str:
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
    return table(["model", "source", "CIFAR-10", "Flowers-102"], rows, numbers=2)


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


def cut_off(raw: Raw) -> str:
    rows = []
    for name, title in CUT_OFF.items():
        run = raw.runs[name]
        steps: int = run.about.get("steps") or planned(run)
        last = run.evaluations[-1]["step"]
        rows.append([name, title, f"{run.step:,} of {steps:,}", f"{run.top1:.2f} at {last:,}"])
    return table(["run", "what", "steps", "top-1, % at step"], rows, numbers=2)


def planned(run: Run) -> int:
    """Steps of a run that was planned in epochs of CIFAR-10."""
    settings = run.about["settings"]
    return round(float(settings["schedule"]["epochs"]) * 50_000 / int(settings["data"]["batch_size"]))


TARGETS = (
    ("CIFAR-10 from scratch, plain ViT", 93.5, 95.0, "cifar10-scratch"),
    ("CIFAR-10 from scratch, convolutional stem", 95.5, 96.5, "cifar10-stem"),
    ("Tiny-ImageNet from scratch, plain ViT", 60.0, 64.0, "tiny-imagenet-wide"),
    ("Tiny-ImageNet → CIFAR-10, fine-tuned", 96.5, 97.5, "wide-to-cifar10"),
)


def targets(raw: Raw) -> str:
    rows = []
    for what, wanted, hoped, name in TARGETS:
        top1 = raw.runs[name].top1
        verdict = "reached" if top1 >= wanted else f"not reached: {wanted - top1:.2f} points short"
        verdict += ", and what was hoped for" if top1 >= hoped else ""
        rows.append([what, verdict, f"{wanted}", f"{hoped}", f"{top1:.2f}"])
    return table(["what", "verdict", "wanted", "hoped for", "have"], rows, numbers=3)


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


def ranked(raw: Raw) -> list[str]:
    return sorted(CHANGES, key=lambda name: -raw.runs[name].top1)


def changes(raw: Raw) -> str:
    base = raw.runs[BASE]
    rows = []
    for name in ranked(raw):
        run = raw.runs[name]
        gain = "" if name == BASE else signed(run.top1 - base.top1)
        rows.append([f"{CHANGES[name]} ({name})", changed(run, base), tenths(run.top1), gain])
    command = f"```bash\n{base.about['command']}\n```"
    return f"{command}\n\n{table(['change (run)', 'added to the command', 'top-1, %', 'gain'], rows, numbers=2)}"


def changed(run: Run, base: Run) -> str:
    """What a command has that the base's has not."""
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


def rates(raw: Raw) -> str:
    rows = [[title, *(at_step(raw, name) for name in names)] for title, names in RATES]
    return table(["AdamW, top-1, %", "5e-4", "1e-3", "2e-3"], rows, numbers=3)


def at_step(raw: Raw, name: str | None) -> str:
    """Of a run, or of `run@step`."""
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


def long_runs(raw: Raw) -> str:
    rows = []
    for name, title in LONG.items():
        points = dict(raw.runs[name].over_steps())
        last = f"{raw.runs[name].top1:.2f} ({max(points):,.0f})"
        rows.append([title, *(tenths(points[step]) if step in points else "–" for step in MARKS), last])
    return table(
        ["top-1, % after steps of 256", *(f"{step:,}" for step in MARKS), "last"], rows, numbers=len(MARKS) + 1
    )


def harsh(raw: Raw) -> str:
    names = {"longer-base": "RandAugment once, half of the batches mixed", "longer-harsh": "twice, and all mixed"}
    rows = [[title, *(tenths(raw.runs[name].at(step)) for step in (4_000, 8_000))] for name, title in names.items()]
    return table(["AdamW 1e-3, batches of 128, top-1, %", "4,000 steps", "8,000 steps"], rows, numbers=2)


def alike(raw: Raw, names: dict[str, str]) -> str:
    """Long runs of the ViT with convolutions first, with one thing that differs."""
    rows = []
    for name, title in names.items():
        run = raw.runs[name]
        last = run.evaluations[-1]
        steps = [f"{run.at(step):.2f}" for step in (8_000, 20_000)]
        rows.append([title, *steps, f"{run.top1:.2f}", f"{last['loss']:.3f}", f"{percent(run.training[-1]):.1f}"])
    heading = ["Muon, stem, 150 epochs, all else alike", "8,000 steps", "20,000 steps", "the end", "test loss"]
    return table([*heading, "training top-1 (augmented, mixed)"], rows, numbers=5)


DECAYS = {"cifar10-stem-less-decay": "weight decay 0.05", "cifar10-stem": "weight decay 0.2"}
ROUNDS = {"cifar10-stem-less-decay": "RandAugment once, decay 0.05", "cifar10-stem-twice": "twice, decay 0.05"}


LATE = -7
"""So many evaluations before the end."""


def late(raw: Raw) -> str:
    """The end of pane's training."""
    run = raw.runs["pane"]
    rows = []
    for each in run.evaluations[LATE:]:
        mixed = next(record for record in run.training if record["step"] == each["step"])
        cells = [f"{each['step']:,}", f"{mixed['loss']:.3f}", f"{each['loss']:.3f}", f"{percent(each):.2f}"]
        rows.append(cells)
    return table(["step", "training loss", "validation loss", "validation top-1, %"], rows, numbers=4)


TOGETHER = (
    "pane",
    "cifar10-scratch",
    "cifar10-scratch-250",
    "cifar10-stem-250",
    "tiny-imagenet-150",
    "flowers-scratch",
)


def throughput(raw: Raw) -> str:
    rows = [
        [name, raw.runs[name].about["beside"].split(", on one GPU")[0], f"{raw.runs[name].speed:,.0f}"]
        for name in TOGETHER
    ]
    speeds = [raw.runs[name].speed for name in CHANGES]
    rows.append(["each of the short runs", "the others", f"{min(speeds):,.0f} to {max(speeds):,.0f}"])
    return table(["run", "beside it on the GPU", "images a second"], rows, numbers=1)


TABLES: dict[str, Table] = {
    "scratch": lambda raw: trained(raw, SCRATCH),
    "tuned": lambda raw: trained(raw, TUNED),
    "commands": commands,
    "pane": pane,
    "transfer": transfer,
    "literature-scratch": literature_scratch,
    "literature-pretrained": literature_pretrained,
    "cut-off": cut_off,
    "targets": targets,
    "changes": changes,
    "rates": rates,
    "long-runs": long_runs,
    "harsh": harsh,
    "decay": lambda raw: alike(raw, DECAYS),
    "twice": lambda raw: alike(raw, ROUNDS),
    "late": late,
    "throughput": throughput,
}


# Figures.


def figures(raw: Raw) -> dict[str, Shown]:
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
    bars = [(CHANGES[name], runs[name].top1) for name in ranked(raw)]
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


def filled(page: str, raw: Raw) -> str:
    """The page with all its tables made anew. A name that is not known is a mistake in the page."""

    def made(found: re.Match[str]) -> str:
        return f"{found[1]}\n{TABLES[found[2]](raw)}\n\n{found[3]}"

    return MARKED.sub(made, page)


def stale(raw: Raw, docs: Path = DOCS) -> list[str]:
    """Pages and figures that do not show what the raw results say."""
    texts = {name: (docs / name).read_text(encoding="utf-8") for name in PAGES}
    pages = [name for name, text in texts.items() if filled(text, raw) != text]
    paths = {name: docs / "images" / name for name in figures(raw)}
    drawings = {name: path.read_text(encoding="utf-8") if path.exists() else "" for name, path in paths.items()}
    return pages + [name for name, shown in figures(raw).items() if mark(shown) not in drawings[name]]


def build(raw: Raw, docs: Path = DOCS) -> None:
    for name in PAGES:
        text = (docs / name).read_text(encoding="utf-8")
        (docs / name).write_text(filled(text, raw), encoding="utf-8")
    for name, shown in figures(raw).items():
        write(shown, docs / "images" / name)


def main() -> None:
    match sys.argv[1:]:
        case []:
            build(Raw())
        case ["--check"]:
            old = stale(Raw())
            sys.exit(f"not what the raw results say: {', '.join(old)}; python benchmarks/results_page.py" if old else 0)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
