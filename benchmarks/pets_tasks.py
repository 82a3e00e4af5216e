"""Tags and numbers on real photographs: breed and species of pets as tags, the size of the head as a number.

    python benchmarks/pets_tasks.py make --data PETS --out DIR       # three tables beside the images
    python benchmarks/pets_tasks.py run --data DIR --out FILE.jsonl  # appends a row for each task and seed
    python benchmarks/pets_tasks.py table --rows FILE.jsonl

PETS is a folder with pets128.tar (images/NAME.jpg), images.csv (file, breed, species, split) and head_boxes.csv (file,
xmin, ymin, xmax, ymax, split). Every task is trained by `vitrail.finetune` with the same start, time and settings, once
for each seed; the test split is scored once. `breeds` is the single-label model that the tags are compared with.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

import vitrail
from vitrail.benchmark.machine import read_commit

KEPT = ("top1", "balanced_accuracy", "measures", "tables", "images", "broken")
"""The parts of a report that are recorded."""
TASKS = {"breeds": "labels", "tags": "tags", "heads": "numbers"}
"""The table of each task, and its kind."""


def make_tables(data: Path, out: Path) -> None:
    """Unpack the images, and write a folder for each task with a CSV that names them."""
    out.mkdir(parents=True)
    with tarfile.open(data / "pets128.tar") as archive:
        archive.extractall(out, [member for member in archive if member.name.startswith("images/")], filter="data")
    with (data / "images.csv").open(newline="") as file:
        pets = list(csv.DictReader(file))
    with (data / "head_boxes.csv").open(newline="") as file:
        boxes = list(csv.DictReader(file))
    rows = {
        "breeds": [[each["file"], each["breed"], each["split"]] for each in pets],
        "tags": [[each["file"], f"{each['breed']}|{each['species']}", each["split"]] for each in pets],
        "heads": [[each["file"], f"{measure_head(each):.2f}", each["split"]] for each in boxes],
    }
    for name, columns in {"breeds": "label", "tags": "tags", "heads": "head_size"}.items():
        with (out / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["image", columns, "split"])
            writer.writerows([f"images/{image}", target, split] for image, target, split in rows[name])


def measure_head(box: dict[str, str]) -> float:
    """Return the size of a head in pixels: the side of a square with the area of its box."""
    width, height = (float(box[f"{side}max"]) - float(box[f"{side}min"]) for side in "xy")
    return math.sqrt(width * height)


def run_task(data: Path, name: str, seed: int, minutes: float | None, folder: Path) -> dict[str, Any]:
    """Train one model, score the test split, and return what was measured."""
    began = time.perf_counter()
    settings: dict[str, Any] = {"run.seed": seed, "data.holdout_seed": seed, "run.report": False}
    settings |= {"run.most_seconds": 3600}  # the steps that were planned are trained, also on a machine that gets busy
    options: dict[str, Any] = {"task": TASKS[name]} if name != "breeds" else {}
    options |= {"quick": True} if minutes is None else {"minutes": minutes}
    if minutes is None:
        settings = {}
    result = vitrail.finetune(data / f"{name}.csv", folder=folder, settings=settings, **options)
    trained = time.perf_counter() - began
    report = vitrail.evaluate(result.model, data / f"{name}.csv", "test")
    return {
        "task": name,
        "seed": seed,
        "way": "quick" if minutes is None else f"{minutes:g} minutes",
        "seconds": trained,
        "steps": None if result.config is None else result.config.schedule.steps,
        "image_size": result.model.architecture.image_size,
        "images": report.images,
        "commit": read_commit(),
        "device": "cpu" if str(next(result.model.parameters()).device) == "cpu" else "gpu",
        "report": {key: value for key, value in report.to_dict().items() if key in KEPT},
    }


def pick_measures(row: dict[str, Any]) -> dict[str, float]:
    """Return the measures of a row by name."""
    report = row["report"]
    if row["task"] == "breeds":
        return {"accuracy": report["top1"]["value"]}
    return {measured["name"]: measured["value"] for measured in report["measures"]}


def make_table(rows: list[dict[str, Any]]) -> str:
    """Return a table in Markdown: mean ± deviation over the seeds."""
    lines = ["| table | trained for | seeds | measure | mean ± deviation |", "|---|---|---:|---|---:|"]
    for name in TASKS:
        for way in dict.fromkeys(row["way"] for row in rows if row["task"] == name):
            found = [pick_measures(row) for row in rows if (row["task"], row["way"]) == (name, way)]
            for measure in found[0]:
                values = [each[measure] for each in found]
                spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
                lines.append(f"| {name} | {way} | {len(values)} | {measure} | {statistics.mean(values):.4f}{spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["make", "run", "table"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="of each training; without it only a head is fitted")
    parser.add_argument("--runs", type=Path, default=Path("runs/pets-tasks"), help="where the runs go")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make_tables(arguments.data, arguments.out)
    elif arguments.command == "table":
        print(make_table([json.loads(line) for line in arguments.rows.read_text().splitlines()]))
    else:
        for seed in arguments.seeds:
            for name in arguments.tasks:
                folder = arguments.runs / f"{name}-{arguments.minutes or 'quick'}-{seed}"
                row = run_task(arguments.data, name, seed, arguments.minutes, folder)
                with arguments.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(name, seed, pick_measures(row), flush=True)


if __name__ == "__main__":
    main()
