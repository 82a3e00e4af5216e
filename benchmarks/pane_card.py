"""The model inside the package, src/vitrail/pane: its weights in half precision, and its card from the raw results.

python benchmarks/pane_card.py weights runs/pane
vitrail evaluate --model pane --data tiny-imagenet/ --split val --device cpu --out runs/pane-val
python benchmarks/pane_card.py evaluation runs/pane-val/report.json
python benchmarks/pane_card.py card

The raw results of its training are benchmarks/results/pane_h200.jsonl: a record of the kind about (recipe, command,
seed, commit, device, GPU-seconds), then the run's own metrics.jsonl. The evaluation goes to pane_evaluation.json there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.config import Origin
from vitrail.inference.class_names import list_class_words, list_wnids
from vitrail.model.base import ImageModel
from vitrail.weights.card import format_model_card
from vitrail.weights.save import MODEL_CARD
from vitrail.weights.source import PANE, PANE_FOLDER

RESULTS = Path(__file__).parent / "results"
TRAINING, EVALUATION = RESULTS / "pane_h200.jsonl", RESULTS / "pane_evaluation.json"
KEPT = ("data", "part", "images", "top1", "top5", "negative_log_likelihood", "calibration_error", "about")
"""Of an evaluation's report, which also has every class and every mistake."""
LICENCE = "apache-2.0"
POINTS = 12
"""Of the curve."""
DATA = """\
Tiny-ImageNet-200, and nothing else: 100,000 images of 64 × 64 pixels, 500 for each of 200 classes, and 10,000 to
validate on. Stanford's course CS231n made it of ImageNet's (<https://cs231n.stanford.edu/tiny-imagenet-200.zip>). The
images belong to those who took them; [ImageNet's terms](https://image-net.org/download.php) let people have them for
non-commercial research and education. None is in this package. The weights are under the licence of vitrail,
Apache-2.0; whether the terms of images bind a model that has learned from them is not settled, and differs between
countries: judge for yourself before you earn money with it."""
LIMITS = """\
It is a small model for small images: good for trying everything offline, and a start for fine-tuning. It knows 200
things, and gives every image one of their names, whatever is in it. It has the blind spots and the leanings of
photographs that were gathered on the web about 2010, and was not examined for them. Do not let it decide about
people."""


def main() -> None:
    match sys.argv[1:]:
        case ["weights", run]:
            write_weights(run)
        case ["evaluation", report]:
            found = json.loads(Path(report).read_text())
            EVALUATION.write_text(json.dumps({key: found[key] for key in KEPT}, indent=1) + "\n")
        case ["card"]:
            lines = [json.loads(line) for line in TRAINING.read_text().splitlines()]
            text = card(vitrail.load(PANE_FOLDER), lines, json.loads(EVALUATION.read_text()))
            (PANE_FOLDER / MODEL_CARD).write_text(text, encoding="utf-8")
        case _:
            sys.exit(__doc__)


def write_weights(run: str) -> None:
    """Rounded once, here; `vitrail.load("pane")` computes with them in float32. Classes get the words of their ids."""
    model = vitrail.load(run, dtype=torch.bfloat16)
    model.origin = Origin(source=PANE, format="native", licence=LICENCE)
    model.labels = [readable(wnid) for wnid in model.labels or ()]
    vitrail.save(model, PANE_FOLDER)


def readable(wnid: str) -> str:
    """The usual word for a class of ImageNet; with its id where that is a word for others too."""
    word = dict(zip(list_wnids(), list_class_words(), strict=True))[wnid][0]
    others = sum(word.casefold() == other.casefold() for words in list_class_words() for other in words)
    return word if others == 1 else f"{word}, {wnid}"


def card(model: ImageModel, lines: list[dict[str, Any]], evaluation: dict[str, Any]) -> str:
    """README.md of the folder."""
    about = next(line for line in lines if line["kind"] == "about")
    parts = [
        table(["", ""], training(about)),
        *("## Data", DATA),
        *("## Curve", table(["step", "epoch", "training loss", "validation loss", "validation top-1"], curve(lines))),
        *("## Evaluation", table(["", "value", "95% from", "to"], measured(evaluation)), evaluated(evaluation)),
        *("## Limits", LIMITS),
    ]
    return format_model_card(model, PANE, "native", notes="\n\n".join(parts))


def training(about: dict[str, Any]) -> list[list[str]]:
    """From which anyone can do it again."""
    seconds = about["gpu_seconds"]
    rows = [
        ["recipe", about["recipe"]],
        ["command", f"`{about['command']}`"],
        ["seed", str(about["seed"])],
        ["cost", f"{seconds:,.0f} seconds ({seconds / 60:.1f} minutes) on one {about['device']}"],
        ["code", f"commit {about['commit']}, torch {about['torch']}"],
        ["raw results", f"`benchmarks/results/{TRAINING.name}`"],
    ]
    return rows + [["how", about["note"]]] * ("note" in about)


def curve(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Evaluations, evenly chosen, the first and the last among them, with the last training loss before each."""
    found, loss, epoch = [], "–", "–"
    for line in lines:
        if line["kind"] == "train":
            loss, epoch = f"{line['loss']:.3f}", f"{line['epoch']:.1f}"
        elif line["kind"] == "evaluation":
            found.append([f"{line['step']:,}", epoch, loss, f"{line['loss']:.3f}", f"{line['accuracy']:.2%}"])
    most = min(POINTS, len(found))
    return [found[round(place * (len(found) - 1) / max(most - 1, 1))] for place in range(most)]


def measured(evaluation: dict[str, Any]) -> list[list[str]]:
    shares = {"top-1 accuracy": "top1", "top-5 accuracy": "top5"}
    numbers = {"negative log-likelihood": "negative_log_likelihood", "calibration error": "calibration_error"}
    rows = [[name, *(f"{value:.2%}" for value in evaluation[key].values())] for name, key in shares.items()]
    return rows + [[name, *(f"{value:.4f}" for value in evaluation[key].values())] for name, key in numbers.items()]


def evaluated(evaluation: dict[str, Any]) -> str:
    about = evaluation["about"]
    return (
        f"On the {evaluation['images']:,} images of the {evaluation['part']} part, with the weights as they are here, "
        f"in {about['precision']} on {about['device']}, torch {about['torch']}: `vitrail evaluate --model {PANE} "
        f"--data tiny-imagenet/ --split {evaluation['part']} --device cpu`."
    )


def table(heading: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [heading, *rows]]  # else it would end the cell
    first, *rest = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([first, "|---" * len(heading) + "|", *rest])


if __name__ == "__main__":
    main()
