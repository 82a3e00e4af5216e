"""The suite "paper": the transfer results of the paper's table 2, for any model.

For each data set the learning rate is chosen on held-out training images. Then the model is trained on all training
images, once for each seed, and scored on the test part. The settings are those of the recipes finetune-….
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.order import Indices
from vitrail.data.sources.source import Source, hold_out
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.real import count_real_hits, read_real_labels
from vitrail.inference import class_names
from vitrail.recipes import find_recipe
from vitrail.transfer.suite_data import SuiteData, list_data_notes, open_suite_parts
from vitrail.transfer.suite_plan import Extra, SuitePlan, TransferTarget
from vitrail.transfer.suite_table import NOTHING, PAPER_MODELS, TABLE_2, Rows, SuiteTable, format_mean
from vitrail.transfer.transfer import NONE, TransferResult, list_remarks


@dataclass(frozen=True)
class PaperSet:
    """A data set of the paper's table 2."""

    name: str
    title: str
    recipe: str
    test: int
    """Number of test images."""
    url: str


_SETS = (
    PaperSet("imagenet", "ImageNet", "finetune-imagenet", 50_000, "https://www.image-net.org/download.php"),
    PaperSet("cifar10", "CIFAR-10", "finetune-cifar10", 10_000, "https://www.cs.toronto.edu/~kriz/cifar.html"),
    PaperSet("cifar100", "CIFAR-100", "finetune-cifar100", 10_000, "https://www.cs.toronto.edu/~kriz/cifar.html"),
    PaperSet("pets", "Oxford-IIIT Pets", "finetune-pets", 3_669, "https://www.robots.ox.ac.uk/~vgg/data/pets/"),
    PaperSet(
        "flowers102", "Flowers-102", "finetune-flowers", 6_149, "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
    ),
)
SETS = {each.name: each for each in _SETS}
IMAGENET = "imagenet"
REAL_TITLE, REAL_HITS, REAL_COUNT = "ImageNet ReaL", "real_hits", "real_count"
REAL_URL = "https://github.com/google-research/reassessed-imagenet"


def make_target(plan: SuitePlan, name: str, places: SuiteData) -> TransferTarget:
    """Open the data of a set. Images are held out of the part train, even if there is a part val."""
    each, place, real = SETS[name], places.sets[name], places.real
    if place.raw:
        raise ConfigError(f"{each.name}: raw is for the tasks of VTAB: leave it out")
    recipe, parts = find_recipe(each.recipe), open_suite_parts(each.name, place.data)
    assert recipe.holdout is not None  # every recipe of the paper has one
    if parts.test.num_classes > parts.train.num_classes:
        raise DataError(f"{each.name}: {place.data} has labels in {parts.tested_on} that train has no image of")
    rest, _ = hold_out(parts.train, recipe.holdout, seed=0)
    counts = (
        ("training images", len(parts.train), recipe.data_set.images),
        ("classes", parts.train.num_classes, recipe.data_set.classes),
        ("test images", len(parts.test), each.test),
    )
    return TransferTarget(
        name=each.name,
        recipe=recipe,
        changes={},
        choosing={"source": place.data, "validate_on": "holdout", "holdout": recipe.holdout},
        chosen_on=f"the held-out {recipe.holdout:.0%}",
        training={"source": place.data, "validate_on": "none", "holdout": 0.0},
        images=(len(rest), len(parts.train)),
        test=parts.test,
        notes=list_data_notes(parts, counts),
        extra=_make_real_counter(parts.test, real) if each.name == IMAGENET and real is not None else None,
    )


def _make_real_counter(test: Source, path: Path) -> Extra:
    """Return a function that counts guesses that are among the image's ReaL labels."""
    labels = read_real_labels(path)
    numbers = class_names.find_class_numbers(test.classes or None, test.num_classes) or ()
    certain = [number for number in numbers if number is not None]
    if len(certain) < test.num_classes:
        raise DataError(
            "imagenet: its classes are not all certainly ImageNet's, which ReaL labels are made of: name them by their "
            "WordNet ids, or leave real.json out"
        )
    count_real_hits(labels, [test.name(0)], [0])  # raises errors about the names before anything is trained

    def count(source: Source, predictions: Indices) -> dict[str, int]:
        read = [index for index, prediction in enumerate(predictions) if prediction != NONE]
        names = (source.name(index) for index in read)
        hits, number, _ = count_real_hits(labels, names, (certain[predictions[index]] for index in read))
        return {REAL_HITS: hits, REAL_COUNT: number}

    return count


# ---- The table -------------------------------------------------------------------------------------------------------


def table_rows(results: dict[str, TransferResult]) -> Rows:
    """Return the rows of the paper's table with our results in them."""
    ours: dict[str, tuple[str, str, str]] = {}
    for name, result in results.items():
        rate = f"{result.rate:g}"
        ours[SETS[name].title] = (format_mean(result.accuracies), str(len(result.runs)), rate)
        shares = real_accuracies(result)
        if shares:
            ours[REAL_TITLE] = (format_mean(shares), str(len(shares)), rate)
    return [(title, *ours.get(title, (NOTHING,) * 3), *numbers) for title, numbers in TABLE_2.items()]


def real_accuracies(result: TransferResult) -> list[float]:
    """Return the accuracies of the runs by ReaL labels; empty if they were not counted."""
    return [run.extra[REAL_HITS] / run.extra[REAL_COUNT] for run in result.runs if run.extra.get(REAL_COUNT)]


def make_tables(model: str, results: dict[str, TransferResult]) -> list[SuiteTable]:
    """Return the paper's table with our results in it."""
    return [SuiteTable(("top-1, %", model, "runs", "learning rate", *PAPER_MODELS), table_rows(results))]


def list_notes(results: dict[str, TransferResult], places: SuiteData) -> list[str]:
    """Return the sentences below the table."""
    sources = {name: f"it is to be had from {each.url}" for name, each in SETS.items()}
    notes = list(list_remarks(results, places.sets, sources))
    if IMAGENET in places.sets and places.real is None:
        notes.append(f"{REAL_TITLE} has no labels: real.json is to be had from {REAL_URL}")
    return [*notes, "VTAB is a suite of its own: --suite vtab"]


def describe_results(plan: SuitePlan, results: dict[str, TransferResult], places: SuiteData) -> dict[str, Any]:
    """Return the content of suite.json."""
    return {
        "suite": "paper",
        "model": plan.model,
        "papers_protocol": not any(result.deviations for result in results.values()),
        "sets": {name: _describe_set(result) for name, result in results.items()},
        "missing": {name: each.url for name, each in SETS.items() if name not in places.sets},
        "paper": {title: dict(zip(PAPER_MODELS, numbers, strict=True)) for title, numbers in TABLE_2.items()},
    }


def _describe_set(result: TransferResult) -> dict[str, Any]:
    shares = real_accuracies(result)
    return {**result.to_dict(), **({"real_mean": sum(shares) / len(shares)} if shares else {})}
