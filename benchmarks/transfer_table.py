"""The tables at the end of docs/evaluation.md: python benchmarks/transfer_table.py benchmarks/results

From the raw results of two models that were pre-trained on Tiny-ImageNet on one H200.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

MODELS = {
    "runs/tiny-s8": ("ViT S/8", "tiny_imagenet_s8_h200.jsonl"),
    "runs/tiny-bit": ("BiT-R50x1", "tiny_imagenet_bit_r50x1_h200.jsonl"),
}
SETS = {"cifar10": "CIFAR-10", "flowers102": "Flowers-102"}
METHODS = (
    ("least-squares", 1, "least squares, 1 image of each class"),
    ("least-squares", 5, "5 images"),
    ("least-squares", 10, "10 images"),
    ("least-squares", 25, "25 images"),
    ("knn, k=20", None, "20 nearest neighbours, all images"),
    ("linear", None, "linear probe, all images"),
)


def main() -> None:
    folder = Path(sys.argv[1])
    found = json.loads((folder / "transfer_h200.json").read_text())
    columns = [(model, data) for data in SETS for model in MODELS]
    print(row("top-1, %", *(f"{SETS[data]}, {MODELS[model][0]}" for model, data in columns)))
    print("|---|" + "---:|" * len(columns))
    for method, shots, title in METHODS:
        print(row(title, *(few_shot(found, model, data, method, shots) for model, data in columns)))
    print(row("fine-tuned, 300 steps", *(fine_tuned(found, model, data) for model, data in columns)))
    print(row("fine-tuned, 2,000 steps", *(longer(found, model, data) for model, data in columns)))
    print()
    print(row("pre-training on Tiny-ImageNet", *(name for name, _ in MODELS.values())))
    print("|---|" + "---:|" * len(MODELS))
    runs = [json.loads((folder / file).read_text().splitlines()[0]) for _, file in MODELS.values()]
    print(row("validation top-1, %", *(f"{100 * run['result']['accuracy']:.2f}" for run in runs)))
    print(row("epochs", *(str(run["epochs"]) for run in runs)))
    print(row("seconds on one H200", *(f"{run['seconds']:.0f}" for run in runs)))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def few_shot(found: dict, model: str, data: str, method: str, shots: int | None) -> str:
    (report,) = (each for each in found["fewshot"] if (each["model"], each["data"]) == (model, f"sets/{data}"))
    return shown([each["accuracy"] for each in report["rows"] if (each["method"], each["shots"]) == (method, shots)])


def fine_tuned(found: dict, model: str, data: str) -> str:
    """Of three runs; where a time limit cut the third off, of two, which is said."""
    for suite in found["suites"]:
        if suite["model"] == model and len(suite["sets"].get(data, {}).get("runs", [])) == 3:
            return shown([run["accuracy"] for run in suite["sets"][data]["runs"]])
    (partial_run,) = (each for each in found["cut_off"] if (each["model"], each["set"]) == (model, data))
    return shown([run["accuracy"] for run in partial_run["runs"]]) + " (two runs)"


def longer(found: dict, model: str, data: str) -> str:
    for suite in found["suites"]:
        if suite["model"] == model and len(suite["sets"].get(data, {}).get("runs", [])) == 1:
            return shown([run["accuracy"] for run in suite["sets"][data]["runs"]]) + " (one run)"
    return "–"


def shown(shares: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
    return f"{100 * statistics.fmean(shares):.1f}{spread}"


if __name__ == "__main__":
    main()
