"""Rare classes: long-tailed CIFAR-10, with and without what `vitrail finetune` does about them.

    python benchmarks/long_tail.py make --data CIFAR10 --out DIR --ratio 100 --seed 0
    python benchmarks/long_tail.py run --data DIR --arm plain --seed 0 --results benchmarks/results/long_tail_cpu.jsonl
    python benchmarks/long_tail.py heads --data CIFAR10 --results benchmarks/results/long_tail_heads_cpu.jsonl
    python benchmarks/long_tail.py table --results benchmarks/results/long_tail_cpu.jsonl [--into docs/training.md]

`make` writes Parquet files that vitrail opens: a train part whose classes shrink exponentially from the first to the
last, by the factor `--ratio` in all, and the whole test part. With `--choosing 500`, the test part holds so many
training images of each class instead, which are left out of train: to choose by, without a look at test images.

`run` trains once and adds a line to the results. All arms have the settings of `SETTINGS`; only what balances differs.

`heads` fits heads in closed form to the frozen features of pane, plain and balanced, at many ratios: how much is gained
and lost, to choose the ratio from which `finetune` balances. Another class is the largest for each seed. Only training
images are used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"objective.balance": "none", "data.balance": 0.0},
    "finetune": {},
    "logits": {"objective.balance": "logits"},
    "logits-0.5": {"objective.balance": "logits", "objective.balance_strength": 0.5},
    "logits-1.5": {"objective.balance": "logits", "objective.balance_strength": 1.5},
    "loss": {"objective.balance": "loss"},
    "sampling": {"objective.balance": "none", "data.balance": 1.0},
    "half-sampling": {"objective.balance": "none", "data.balance": 0.5},
    "quarter-sampling-and-logits": {"objective.balance": "logits", "data.balance": 0.25},
    "half-sampling-and-logits": {"objective.balance": "logits", "data.balance": 0.5},
}
"""What each arm sets; "finetune" leaves it to `finetune`."""
SETTINGS: dict[str, Any] = {
    "model.image_size": 32,
    "data.batch_size": 32,
    "data.in_memory": True,
    "data.workers": 0,
    "data.augmentation.crop_area": (0.5, 1.0),
    "optimizer.kind": "adamw",
    "optimizer.learning_rate": 3e-4,
    "optimizer.weight_decay": 0.05,
    "schedule.steps": 500,
    "schedule.warmup_steps": 50,
    "run.evaluate_every": 125,
    "run.checkpoint_every": 125,
    "run.precision": "bf16",
    "run.threads": 1,
    "run.trackers": (),
    "run.report": False,
}
HEAD_SIZES, HEAD_RATIOS, HEAD_SEEDS, HEAD_TESTS = (600, 150), (2, 3, 5, 10, 30, 100), range(5), 200
"""Of `heads`: images of the largest class, ratios, seeds, and images of each class that measure."""
HEAD_MARK = "<!-- from raw: long tail, heads -->"
MARK, END = "<!-- from raw: long tail -->", "<!-- end -->"


def make(data: str, out: Path, ratio: float, seed: int, choosing: int) -> None:
    """Write the long-tailed images."""
    import numpy as np

    from vitrail.data.open import open_data
    from vitrail.data.sources.source import Subset, order_within_strata

    train = open_data(data, "train")
    order, starts, sizes = order_within_strata(train, seed, purpose="long tail")
    counts = count_long_tail(int(sizes.min()) - choosing, len(sizes), ratio)
    kept = [order[start + choosing : start + choosing + count] for start, count in zip(starts, counts, strict=True)]
    left_out = [order[start : start + choosing] for start in starts]
    out.mkdir(parents=True, exist_ok=True)
    write_parquet(Subset(train, np.sort(np.concatenate(kept))), out / "train.parquet")
    test = Subset(train, np.sort(np.concatenate(left_out))) if choosing else open_data(data, "test")
    write_parquet(test, out / "test.parquet")
    (out / "classes.txt").write_text("\n".join(train.classes) + "\n")
    about = {"data": Path(data).name, "ratio": ratio, "seed": seed, "choosing": choosing, "counts": counts}
    (out / "about.json").write_text(json.dumps(about) + "\n")
    print(f"{out}: {sum(counts):,} training images, {dict(zip(train.classes, counts, strict=True))}")


def count_long_tail(most: int, classes: int, ratio: float) -> list[int]:
    """Return the images of each class: they shrink by the same factor from class to class."""
    return [round(most * ratio ** (-place / (classes - 1))) for place in range(classes)]


def write_parquet(source: Any, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    samples = [source.read(index) for index in range(len(source))]
    images = [{"bytes": sample.content, "path": source.name(n)} for n, sample in enumerate(samples)]
    table = pa.table({"image": images, "label": [sample.label for sample in samples]})
    pq.write_table(table, path, row_group_size=1000)


def run(data: Path, arm: str, seed: int, results: Path, given: list[str]) -> None:
    """Train one arm, measure it on all images of test, and add a line to the results."""
    import torch

    import vitrail

    about = json.loads((data / "about.json").read_text())
    settings = {**SETTINGS, **dict(pair.split("=", 1) for pair in given)}
    texts = [
        f"{key}={json.dumps(value)}" if not isinstance(value, str) else f"{key}={value}"
        for key, value in {**settings, **ARMS[arm], "run.seed": seed}.items()
    ]
    events: list[dict[str, Any]] = []

    def listen(kind: str, values: dict[str, Any]) -> None:
        if kind in ("balance", "evaluation"):
            events.append({"event": kind, **values})

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = vitrail.finetune(str(data), "pane", folder=Path(folder) / "run", settings=texts, on_event=listen)
    recalls = {score.name: score.hits / score.images for score in result.judged.classes}
    line = {
        "arm": arm,
        "seed": seed,
        "data": about,
        "settings": {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()},
        "sets": ARMS[arm],
        "commit": find_commit(),
        "device": name_device(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "images": result.judged.images,
        "accuracy": result.judged.top1.value,
        "recalls": recalls,
        "worst_recall": min(recalls.values()),
        "balanced_accuracy": statistics.fmean(recalls.values()),
        "events": events,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{arm} seed {seed}: accuracy {line['accuracy']:.4f}, worst class {line['worst_recall']:.4f}, "
        f"{line['seconds']:.0f} s",
        {name: round(value, 3) for name, value in recalls.items()},
    )


def heads(data: str, results: Path) -> None:
    """Fit plain and balanced heads to long-tailed parts of the training images, and write what each finds."""
    import numpy as np
    import torch

    import vitrail
    from vitrail.data.open import open_data
    from vitrail.data.sources.source import Subset, order_within_strata
    from vitrail.evaluation.discriminant import cross_fit, fit_discriminant
    from vitrail.evaluation.features import extract_features
    from vitrail.inference.batches import InferenceOptions, open_model

    model, train = vitrail.load("pane", image_size=32), open_data(data, "train")
    order, starts, _ = order_within_strata(train, 7, purpose="heads")
    chosen = np.sort(np.concatenate([order[start : start + max(HEAD_SIZES) + HEAD_TESTS] for start in starts]))
    options = InferenceOptions(batch_size=64, workers=0, precision="bf16")
    found = extract_features(open_model(model, options), Subset(train, chosen), options, cache=None)
    values, labels, classes = found.values.double(), found.labels, len(starts)
    shared = {"commit": find_commit(), "device": name_device(), "torch": torch.__version__, "image_size": 32}
    with results.open("w") as file:
        for most, ratio, seed in itertools.product(HEAD_SIZES, HEAD_RATIOS, HEAD_SEEDS):
            rng = np.random.default_rng(seed)
            counts = [0] * classes
            fitting, judging = [], []
            for label, count in zip(rng.permutation(classes), count_long_tail(most, classes, ratio), strict=True):
                rows = rng.permutation(np.flatnonzero(labels.numpy() == label))
                judging.append(rows[:HEAD_TESTS])
                fitting.append(rows[HEAD_TESTS : HEAD_TESTS + count])
                counts[label] = count
            fit, judge = np.concatenate(fitting), np.concatenate(judging)
            for balance in (0.0, 0.5, 1.0):
                shrinkage = cross_fit(values[fit], labels[fit], classes, balance=balance).shrinkage
                head = fit_discriminant(values[fit], labels[fit], classes, shrinkage, balance)
                hits = (head.predict(values[judge]) == labels[judge]).numpy()
                recalls = [float(hits[labels[judge].numpy() == label].mean()) for label in range(classes)]
                line = {"most": most, "ratio": ratio, "seed": seed, "balance": balance, "counts": counts}
                file.write(json.dumps({**line, "recalls": recalls, **shared}) + "\n")
            print(f"{most} images, {ratio}:1, seed {seed}", flush=True)


def find_commit() -> str:
    """Return the commit of the code, marked if it was changed."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def name_device() -> str:
    import os

    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def table(results: Path, into: Path | None) -> None:
    """Print the table of the results, or write it between the marks of a page."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    is_heads = "most" in lines[0]
    mark, text = (HEAD_MARK, make_head_rows(lines)) if is_heads else (MARK, make_rows(lines))
    if into is None:
        print("\n".join(text))
        return
    before, rest = into.read_text().split(mark, 1)
    into.write_text("\n".join([f"{before}{mark}", "", *text, "", f"{END}{rest.split(END, 1)[1]}"]))


def make_rows(lines: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table: mean ± standard deviation over the seeds, and the gain over plain training."""
    columns = {"accuracy": "accuracy, %", "worst_recall": "worst class, %", "common": "in the proportions of train, %"}
    lines = [{**line, "common": weigh([*line["recalls"].values()], line["data"]["counts"])} for line in lines]
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], []).append(line)
    rows = [f"| training | seeds | {' | '.join(columns.values())} |", "|---|---:|" + "---:|" * len(columns)]
    for arm, own in by_arm.items():
        cells = [show([line[column] for line in own]) for column in columns]
        rows.append(f"| {arm} | {len(own)} | {' | '.join(cells)} |")
    plain = {line["seed"]: line for line in by_arm.get("plain", [])}
    for arm, own in by_arm.items():
        pairs = [(line, plain[line["seed"]]) for line in own if arm != "plain" and line["seed"] in plain]
        if len(pairs) > 1:
            cells = [show([line[column] - other[column] for line, other in pairs], "+") for column in columns]
            rows.append(f"| {arm} − plain, pair by pair | {len(pairs)} | {' | '.join(cells)} |")
    return rows


def make_head_rows(lines: list[dict[str, Any]]) -> list[str]:
    """Return a row for each ratio: of plain heads, and what balanced ones have more, mean ± deviation over seeds."""
    measures = {"worst class": min, "mean recall": statistics.fmean, "accuracy in the proportions of train": None}
    titles = " | ".join(f"{name}, % | balanced" for name in measures)
    rows = [f"| largest class | ratio | {titles} |", "|---:|---:|" + "---:|---:|" * len(measures)]

    def measure(line: dict[str, Any], name: str) -> float:
        if (function := measures[name]) is not None:
            return function(line["recalls"])
        return weigh(line["recalls"], line["counts"])

    for most, ratio in dict.fromkeys((line["most"], line["ratio"]) for line in lines):
        own = [line for line in lines if (line["most"], line["ratio"]) == (most, ratio)]
        plain, balanced = ([line for line in own if line["balance"] == balance] for balance in (0.0, 1.0))
        cells = [str(most), f"{ratio}:1"]
        for name in measures:
            values = [[measure(line, name) for line in part] for part in (plain, balanced)]
            cells += [f"{100 * statistics.fmean(values[0]):.1f}", show(list(map(operator.sub, *values[::-1])), "+")]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def weigh(recalls: list[float], counts: list[int]) -> float:
    """Return the accuracy on images in these proportions."""
    return sum(map(operator.mul, recalls, counts)) / sum(counts)


def show(shares: list[float], sign: str = "") -> str:
    spread = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * statistics.fmean(shares):{sign}.1f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--data", required=True)
    making.add_argument("--out", type=Path, required=True)
    making.add_argument("--ratio", type=float, default=100)
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--choosing", type=int, default=0)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--arm", choices=ARMS, required=True)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--results", type=Path, required=True)
    running.add_argument("given", nargs="*", help="settings for all arms, key=value")
    heading = commands.add_parser("heads")
    heading.add_argument("--data", required=True)
    heading.add_argument("--results", type=Path, required=True)
    tabling = commands.add_parser("table")
    tabling.add_argument("--results", type=Path, required=True)
    tabling.add_argument("--into", type=Path)
    options = vars(parser.parse_args())
    {"make": make, "run": run, "heads": heads, "table": table}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
