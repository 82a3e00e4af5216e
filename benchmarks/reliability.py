"""What sets of labels and scores of unknown images are worth, measured on CIFAR-10.

    python benchmarks/reliability.py measure --cifar10 DATA --flowers DATA --third fashion-mnist=FILE
    python benchmarks/reliability.py page

`measure` fits a head to pane's features of 20,000 training images, unless --model names a classifier, and divides the
10,000 test images 20 times at random: one half is calibrated on, the other half is measured. The digits are those of
scikit-learn. The first --third is the data that chooses the score; it may be DATA, an idx file such as
t10k-images-idx3-ubyte.gz, or a tar file with images. The results go into benchmarks/results/reliability.json.

`page` writes the tables of docs/reliability.md from that file.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import vitrail
from vitrail.data.open import list_splits
from vitrail.data.sources.source import Source
from vitrail.evaluation.labels import match_classes
from vitrail.evaluation.reliability import SPLITS, Outputs, compute_outputs, draw_images
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.reliability.sets import count_left_out, find_least_belief, measure_beliefs
from vitrail.reliability.space import NeighbourSpace
from vitrail.reliability.unknown import MOST_IN_BANK, NEIGHBOURS, SCORE_KINDS, UnknownScore, measure_auroc
from vitrail.system.device import device_name

Array = NDArray[Any]
RESULTS = Path(__file__).parent / "results" / "reliability.json"
PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
TRAINING_SHARE = 0.4
COVERAGES = (0.8, 0.9, 0.95, 0.99)
MOST = 2000
"""Images of each strange data set."""
PENALTY, FREE_RANKS = 0.05, 2
"""The penalty of RAPS for each label beyond the first two."""
CHOSEN_FROM = SCORE_KINDS
NAMES = {
    "softmax": "max-softmax",
    "energy": "energy",
    "neighbours": "neighbours (shipped)",
    "direction": "k-NN by direction alone, as published",
    "whitened": "k-NN by whitened value alone",
}


def open_strange(name: str) -> Source:
    """Open images without a meaning to the model: an idx file, a tar file of images, or DATA."""
    path = Path(name)
    if path.name.endswith(".gz"):
        with gzip.open(path) as file:
            header, content = file.read(16), file.read()
        count, height, width = (int.from_bytes(header[start : start + 4], "big") for start in (4, 8, 12))
        pixels = np.frombuffer(content, np.uint8).reshape(count, height, width)
        return vitrail.open_data([(np.repeat(each[..., None], 3, axis=2), "image") for each in pixels[: 2 * MOST]])
    if path.suffix == ".tar":
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.name.endswith(".jpg")]
            return vitrail.open_data([(archive.extractfile(each).read(), "image") for each in members])  # type: ignore
    return vitrail.open_data(name, "test" if "test" in list_splits(name) else None)


def sum_before(probabilities: Array, penalty: float) -> Array:
    """(N, K) → (N, K): one minus the probability of all labels up to this one, less a penalty (APS, RAPS)."""
    order = np.argsort(-probabilities, axis=1, kind="stable")
    ranked = np.take_along_axis(probabilities.astype(np.float64), order, axis=1).cumsum(axis=1)
    ranked += penalty * np.maximum(np.arange(1, probabilities.shape[1] + 1) - FREE_RANKS, 0)
    beliefs = np.empty_like(ranked)
    np.put_along_axis(beliefs, order, 1 - ranked, axis=1)
    beliefs[np.arange(len(beliefs)), order[:, 0]] = 2.0  # the best label is in every set, as in ours
    return beliefs


SET_SCORES: dict[str, Callable[[Array], Array]] = {
    "probability (shipped)": lambda probabilities: measure_beliefs(probabilities).astype(np.float64),
    "APS, without randomness": lambda probabilities: sum_before(probabilities, 0.0),
    "RAPS, without randomness": lambda probabilities: sum_before(probabilities, PENALTY),
}


def measure_sets(outputs: Outputs) -> list[dict[str, Any]]:
    """Return coverage and size of sets for each score and level, over random halvings."""
    labels, rows = outputs.is_right.argmax(axis=1), []
    for name, score in SET_SCORES.items():
        beliefs = score(outputs.probabilities)
        right = beliefs[np.arange(len(labels)), labels]
        for coverage in COVERAGES:
            rng, reached, sizes, alone, worst = np.random.default_rng(0), [], [], [], []
            for _ in range(SPLITS):
                fitted, tested = np.split(rng.permutation(len(labels)), [len(labels) // 2])
                if name == "probability (shipped)":
                    threshold = find_least_belief(np.sort(right[fitted]), coverage)
                else:
                    rank = count_left_out(len(fitted), coverage)
                    threshold = float(np.sort(right[fitted])[rank - 1]) if rank else -np.inf
                inside, size = right[tested] >= threshold, (beliefs[tested] >= threshold).sum(axis=1)
                reached.append(float(inside.mean()))
                sizes.append(float(size.mean()))
                alone.append(float((size == 1).mean()))
                worst.append(min(float(inside[labels[tested] == each].mean()) for each in np.unique(labels)))
            rows.append(
                {
                    "score": name,
                    "coverage": coverage,
                    "reached": float(np.mean(reached)),
                    "least": min(reached),
                    "most": max(reached),
                    "size": float(np.mean(sizes)),
                    "alone": float(np.mean(alone)),
                    "worst_class": float(np.mean(worst)),
                }
            )
    return rows


def measure_parts(bank: Array, known: Array, others: dict[str, Array], part: str) -> tuple[Array, dict[str, Array]]:
    """Return distances to the bank in one part of the space of neighbours."""
    space = NeighbourSpace(bank)
    columns = slice(None, bank.shape[1]) if part == "whitened" else slice(bank.shape[1], None)
    rows = space.rows[:, columns]

    def measure(embeddings: Array) -> Array:
        points = space.place(embeddings)[:, columns]
        squares = (points**2).sum(axis=1)[:, None] + (rows**2).sum(axis=1) - 2 * points @ rows.T
        return np.partition(squares, NEIGHBOURS - 1, axis=1)[:, NEIGHBOURS - 1]

    return measure(known), {name: measure(embeddings) for name, embeddings in others.items()}


def measure_unknown(known: Outputs, strange: dict[str, Outputs]) -> list[dict[str, Any]]:
    """Return for each score and strange data set: AUROC, and the share found at 5% false alarms."""
    table: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for split in range(SPLITS):
        fitted, tested = np.split(np.random.default_rng(split).permutation(len(known)), [len(known) // 2])
        for kind in NAMES:
            if kind in SCORE_KINDS:
                score = UnknownScore.fit(kind, known.logits[fitted], known.embeddings[fitted])
                of_known = score.measure(known.logits[tested], known.embeddings[tested])
                others = {name: score.measure(each.logits, each.embeddings) for name, each in strange.items()}
                alarms = float(np.mean([score.judge(each).is_unknown for each in of_known]))
                found = {
                    name: float(np.mean([score.judge(each).is_unknown for each in rows]))
                    for name, rows in others.items()
                }
            else:
                embeddings = {name: each.embeddings for name, each in strange.items()}
                bank = known.embeddings[fitted[:MOST_IN_BANK]]
                of_known, others = measure_parts(bank, known.embeddings[tested], embeddings, kind)
                limit = np.quantile(of_known, 0.95)
                alarms, found = 0.05, {name: float((rows > limit).mean()) for name, rows in others.items()}
            for name, rows in others.items():
                table.setdefault((kind, name), []).append((measure_auroc(of_known, rows), found[name], alarms))
    results = []
    for (kind, name), rows in table.items():
        auroc, found, alarms = np.mean(rows, axis=0).tolist()
        deviation = float(np.std([row[0] for row in rows]))
        results.append(
            {
                "score": kind,
                "data": name,
                "auroc": auroc,
                "deviation": deviation,
                "found": found,
                "false_alarms": alarms if kind in SCORE_KINDS else None,
            }
        )
    return results


def measure(arguments: argparse.Namespace) -> None:
    """Measure everything and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        trained: dict[str, Any] = {"model": "given"}
        if model is None:
            settings = {"share": TRAINING_SHARE, "report": False}
            result = vitrail.finetune(arguments.cifar10, quick=True, folder=f"{folder}/run", settings=settings)
            model = result.model
            trained = {"model": "pane, a linear head", "training_share": TRAINING_SHARE}
        options = InferenceOptions(device=arguments.device)
        engine = open_model(model, options)
        test = vitrail.open_data(arguments.cifar10, "test")
        labels = match_classes(engine.class_names, engine.num_classes, test.classes, test.num_classes)
        known = compute_outputs(engine, test, options, labels, seed=0)
        third = dict(each.split("=", 1) for each in arguments.third)
        sources = {"flowers": open_strange(arguments.flowers), "digits": vitrail.open_data("digits")}
        sources |= {name: open_strange(path) for name, path in third.items()}
        strange = {
            name: compute_outputs(engine, draw_images(source, MOST, 0), options, None, seed=0)
            for name, source in sources.items()
        }
    unknown = measure_unknown(known, strange)
    chooser = next(iter(third))
    at_third = {each["score"]: each["auroc"] for each in unknown if each["data"] == chooser}
    chosen = max(CHOSEN_FROM, key=lambda kind: at_third[kind])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    content = {
        "commit": commit,
        "vitrail": vitrail.__version__,
        "torch": torch.__version__,
        "device": device_name(engine.device),
        "machine": platform.machine(),
        **trained,
        "accuracy": float((known.probabilities.argmax(axis=1) == known.is_right.argmax(axis=1)).mean()),
        "test_images": len(known),
        "splits": SPLITS,
        "seeds": "0 to 19",
        "strange_images": {name: len(each) for name, each in strange.items()},
        "chosen_on": chooser,
        "chosen": chosen,
        "sets": measure_sets(known),
        "unknown": unknown,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    print(make_tables(content))


def make_tables(content: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the page by the names of their places."""
    sets = ["| score | asked for | reached, over 20 halvings | labels in a set | sets of one | worst class |"]
    sets += ["|---|---|---|---|---|---|"]
    for row in content["sets"]:
        reached = f"{row['reached']:.2%} ({row['least']:.1%} to {row['most']:.1%})"
        cells = [row["score"], f"{row['coverage']:.0%}", reached, f"{row['size']:.2f}", f"{row['alone']:.0%}"]
        sets.append(f"| {' | '.join(cells)} | {row['worst_class']:.1%} |")
    data = list(content["strange_images"])
    heads = [f"{name}, which chose" if name == content["chosen_on"] else name for name in data]
    unknown = [f"| score | {' | '.join(heads)} | false alarms |", "|---" * (len(data) + 2) + "|"]
    for kind, words in NAMES.items():
        rows = {row["data"]: row for row in content["unknown"] if row["score"] == kind}
        cells = [f"{100 * rows[name]['auroc']:.2f} ({rows[name]['found']:.0%})" for name in data]
        alarms = rows[data[0]]["false_alarms"]
        mark = "**" if kind == content["chosen"] else ""
        shown = "" if alarms is None else f"{alarms:.1%}"
        unknown.append(f"| {mark}{words}{mark} | {' | '.join(cells)} | {shown} |")
    facts = (
        f"A linear head on pane's features, {content['accuracy']:.1%} of {content['test_images']:,} test images of "
        f"CIFAR-10 right; {content['device']}, commit {content['commit']}."
    )
    return {"facts": facts, "sets": "\n".join(sets), "unknown": "\n".join(unknown)}


def write_page(content: dict[str, Any], page: str) -> str:
    """Return the page with new tables between its marks."""
    for name, table in make_tables(content).items():
        start, end = f"<!-- {name}: written by benchmarks/reliability.py page -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(start)
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n{table}\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("--cifar10", required=True)
    measuring.add_argument("--flowers", required=True)
    measuring.add_argument("--third", action="append", required=True, metavar="NAME=DATA")
    measuring.add_argument("--model", help="a classifier of CIFAR-10's classes; by default one is made")
    measuring.add_argument("--device", default="auto")
    verbs.add_parser("page")
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments)
    else:
        PAGE.write_text(write_page(json.loads(RESULTS.read_text()), PAGE.read_text()))


if __name__ == "__main__":
    main()
