"""Rare classes: long-tailed CIFAR-10, with and without what `vitrail finetune` does about them.

    python benchmarks/long_tail.py make --data CIFAR10 --out DIR --ratio 100 --seed 0
    python benchmarks/long_tail.py run --data DIR --arm plain --seed 0 --results benchmarks/results/long_tail_cpu.jsonl
    python benchmarks/long_tail.py table --results benchmarks/results/long_tail_cpu.jsonl [--into docs/imbalance.md]

`make` writes Parquet files that vitrail opens: a train part whose classes shrink exponentially from the first to the
last, by the factor `--ratio` in all, and the whole test part. With `--choosing 500`, the test part holds so many
training images of each class instead, which are left out of train: to choose by, without a look at test images.

`run` trains once and adds a line to the results. All arms have the settings of `SETTINGS`; only what balances differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ARMS: dict[str, dict[str, Any]] = {
    "plain": {"objective.balance": "none", "data.balance": 0.0},
    "chosen": {},
    "logits": {"objective.balance": "logits"},
    "logits-0.5": {"objective.balance": "logits", "objective.balance_strength": 0.5},
    "logits-1.5": {"objective.balance": "logits", "objective.balance_strength": 1.5},
    "loss": {"objective.balance": "loss"},
    "sampling": {"objective.balance": "none", "data.balance": 1.0},
    "half-sampling": {"objective.balance": "none", "data.balance": 0.5},
    "sampling-and-logits": {"objective.balance": "logits", "data.balance": 0.25},
}
"""What each arm sets; "chosen" leaves it to `finetune`."""
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
    "run.trackers": (),
    "run.report": False,
}
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
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_arm.setdefault(line["arm"], []).append(line)
    text = "\n".join(make_rows(by_arm))
    if into is None:
        print(text)
        return
    page = into.read_text()
    before, rest = page.split(MARK, 1)
    into.write_text(f"{before}{MARK}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}")


def make_rows(by_arm: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the rows of the table: mean ± standard deviation over the seeds, and the gain over plain training."""
    columns = {"accuracy": "accuracy, %", "balanced_accuracy": "mean recall, %", "worst_recall": "worst class, %"}
    rows = [f"| training | seeds | {' | '.join(columns.values())} |", "|---|---:|" + "---:|" * len(columns)]
    for arm, lines in by_arm.items():
        cells = [show([line[column] for line in lines]) for column in columns]
        rows.append(f"| {arm} | {len(lines)} | {' | '.join(cells)} |")
    plain = {line["seed"]: line for line in by_arm.get("plain", [])}
    for arm, lines in by_arm.items():
        pairs = [(line, plain[line["seed"]]) for line in lines if arm != "plain" and line["seed"] in plain]
        if len(pairs) > 1:
            cells = [show([line[column] - other[column] for line, other in pairs], "+") for column in columns]
            rows.append(f"| {arm} − plain | {len(pairs)} | {' | '.join(cells)} |")
    return rows


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
    tabling = commands.add_parser("table")
    tabling.add_argument("--results", type=Path, required=True)
    tabling.add_argument("--into", type=Path)
    options = vars(parser.parse_args())
    {"make": make, "run": run, "table": table}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
