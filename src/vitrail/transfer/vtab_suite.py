"""The suite "vtab": 19 tasks, 1,000 training images each, one protocol for all.

1,000 training images of each task are drawn and written as shards into the suite's folder: every run uses the same
images, and people can look at them. With several learning rates, 800 images train and 200 choose the rate; the final
runs train on all 1,000. The test part stays where it is.

runs/suite-vtab-NAME/TASK/images/choosing/{train,val}, images/all
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.order import Indices
from vitrail.data.packing.pack import pack_data
from vitrail.data.sources.source import Source, hash_name, make_printable
from vitrail.errors import ConfigError, DataError
from vitrail.recipes import find_recipe
from vitrail.system.files import write_whole
from vitrail.training.config import RunConfig
from vitrail.transfer.suite_data import (
    DataLocation,
    PickedSamples,
    RelabelledSource,
    SuiteData,
    SuiteParts,
    list_data_notes,
    open_suite_parts,
)
from vitrail.transfer.suite_plan import SuitePlan, TransferTarget
from vitrail.transfer.suite_table import NOTHING, PAPER_MODELS, TABLE_2, Rows, SuiteTable, format_mean
from vitrail.transfer.transfer import TransferResult, list_remarks, run_on_first_rank
from vitrail.transfer.vtab_tasks import GROUPS, TASKS, VtabTask

TRAIN, VAL = 800, 200
"""Images to train on, and images that choose the learning rate."""
WHOLE_IMAGE: dict[str, Any] = {"crop_area": (1.0, 1.0), "crop_ratio": (0.01, 100.0)}
"""Turns random crops off. The wide range of ratios keeps very long images whole."""
TITLE = "VTAB (19 tasks)"
CHOOSING, ALL = "choosing", "all"


# ---- A task's images -------------------------------------------------------------------------------------------------


def make_target(plan: SuitePlan, name: str, places: SuiteData) -> TransferTarget:
    """Draw the images of a task; they are written before the first run."""
    task, place = TASKS[name], places.sets[name]
    parts = relabel_parts(task, place, open_suite_parts(task.name, place.data))
    train, val = split_train_val(parts)
    folder = plan.folder / task.name / "images"
    counts = (
        ("images to train on", len(train) + len(val), TRAIN + VAL),
        ("classes", parts.train.num_classes, task.classes),
        ("test images", len(parts.test), task.images[2]),
    )
    recipe = find_recipe("finetune-vtab")
    changes = {**recipe.settings["data"]["augmentation"], **({} if task.crop else WHOLE_IMAGE)}
    return TransferTarget(
        name=task.name,
        recipe=recipe,
        changes={"data": {"augmentation": changes if task.mirror else {**changes, "flip": 0.0}}},
        choosing={"source": str(folder / CHOOSING), "validate_on": "val", "holdout": None},
        chosen_on=f"the {len(val)} images that choose",
        training={"source": str(folder / ALL), "validate_on": "none", "holdout": 0.0},
        images=(len(train), len(train) + len(val)),
        test=parts.test,
        notes=list_data_notes(parts, counts),
        prepare=partial(_prepare, folder, train, val),
    )


def relabel_parts(task: VtabTask, place: DataLocation, parts: SuiteParts) -> SuiteParts:
    """Return the parts with the task's labels and classes; raw annotations are turned into labels."""
    if place.raw and (task.label is None or not task.whole):
        what = "its labels are classes as they are" if task.label is None else "its annotation is no whole number"
        function = "" if task.label is None else f"vitrail.transfer.vtab_labels.{task.label.__name__}"
        how = f"label the data by {function}" if function else "leave raw out"
        raise ConfigError(f"{task.name}: raw = true means nothing to it, since {what}: {how}")
    if parts.train.classes and not place.raw:
        return parts
    largest = max(source.num_classes for source in (parts.train, parts.val, parts.test) if source is not None)
    if not place.raw and largest > task.classes:
        raw = ", or raw = true where they are the original's annotations" if task.label and task.whole else ""
        raise DataError(
            f"{task.name}: {place.data} has labels up to {largest - 1}, and the task {task.classes} "
            f"classes: give labels from 0 on{raw}"
        )
    make = partial(RelabelledSource, classes=task.classes, label=task.label if place.raw else None)
    val = None if parts.val is None else make(parts.val)
    made = SuiteParts(make(parts.train), val, make(parts.test), parts.tested_on)
    try:
        for source in (made.train, made.val, made.test):
            if source is not None:
                source.labels(0, len(source))
    except DataError as error:
        raise DataError(f"{task.name}: {place.data}: {error}") from None
    return made


def split_train_val(parts: SuiteParts) -> tuple[PickedSamples, PickedSamples]:
    """Draw up to 800 images to train on and 200 that choose, from train and val, or from train alone."""
    if parts.val is not None:
        return (
            PickedSamples([(parts.train, int(index)) for index in draw_samples(parts.train, TRAIN)]),
            PickedSamples([(parts.val, int(index)) for index in draw_samples(parts.val, VAL)]),
        )
    together = [(parts.train, int(index)) for index in draw_samples(parts.train, TRAIN + VAL)]
    choose = max(len(together) * VAL // (TRAIN + VAL), 1)
    if len(together) < 2:
        raise DataError(f"{parts.train.name(0)} is the only image to train on: a task needs 2 or more")
    return PickedSamples(together[:-choose]), PickedSamples(together[-choose:])


def draw_samples(source: Source, count: int, seed: int = 0) -> Indices:
    """Return the numbers of `count` random samples. Only the seed and the samples' names decide which."""
    salt = seed.to_bytes(16, "big", signed=True)
    keys = [hash_name(salt, source.identity(index)) for index in range(len(source))]
    chosen: Indices = np.argsort(np.array(keys, dtype=np.uint64), kind="stable")[:count]
    return chosen


def _prepare(folder: Path, train: PickedSamples, val: PickedSamples, config: RunConfig, choose: bool) -> None:
    """Write the images as shards, unless they exist; those that choose only if a rate is to be chosen."""

    def work() -> None:
        _pack(PickedSamples([*train.samples, *val.samples]), folder / ALL)
        if choose:
            _pack(train, folder / CHOOSING / "train")
            _pack(val, folder / CHOOSING / "val")
            names = "".join(f"{make_printable(name)}\n" for name in train.classes)
            write_whole(folder / CHOOSING / "classes.txt", names.encode())

    run_on_first_rank(config, work)


def _pack(source: Source, folder: Path) -> None:
    pack_data(source, folder, skip_broken=True, workers=1)


# ---- The table -------------------------------------------------------------------------------------------------------


def table_rows(results: dict[str, TransferResult]) -> Rows:
    """Return a row for each task that has a result, with the paper's results at its end."""
    return [
        (
            task.title,
            task.group,
            format_mean(results[name].accuracies),
            str(len(results[name].runs)),
            f"{results[name].rate:g}",
            f"{results[name].runs[0].count:,}",
            *(f"{number:.1f}" for number in task.paper),
        )
        for name, task in TASKS.items()
        if name in results
    ]


def mean_accuracies(results: dict[str, TransferResult]) -> dict[str, list[float]]:
    """Return the mean accuracy of each group and of all tasks, for each seed, by a title for the table."""
    means: dict[str, list[float]] = {}
    for group in GROUPS:
        members = [name for name, task in TASKS.items() if task.group == group]
        ran = [name for name in members if name in results]
        if ran:
            some = "" if len(ran) == len(members) else f"{len(ran)} of "
            means[f"{group} ({some}{len(members)} tasks)"] = _average(results, ran)
    whole = len(results) == len(TASKS)
    ran_at_all = "1 task" if len(results) == 1 else f"{len(results)} tasks"
    title = TITLE if whole else f"mean over the {ran_at_all} that ran (not VTAB)"
    means[title] = _average(results, list(results))
    return means


def _average(results: dict[str, TransferResult], names: Sequence[str]) -> list[float]:
    by_seed = zip(*(results[name].accuracies for name in names), strict=True)
    return [sum(shares) / len(shares) for shares in by_seed]


def make_tables(model: str, results: dict[str, TransferResult]) -> list[SuiteTable]:
    """Return the table of the tasks and that of the means, both beside the paper's."""
    columns = ("task", "group", model, "runs", "learning rate", "test images", *PAPER_MODELS[:3])
    summary = [
        (title, format_mean(shares), *TABLE_2.get(title, (NOTHING,) * len(PAPER_MODELS)))
        for title, shares in mean_accuracies(results).items()
    ]
    tasks = SuiteTable(columns, table_rows(results), left=2)
    return [tasks, SuiteTable(("top-1, %", model, *PAPER_MODELS), summary)]


def list_notes(results: dict[str, TransferResult], places: SuiteData) -> list[str]:
    """Return the sentences below the tables."""
    sources = {name: f"{task.origin}, {task.url}, in TensorFlow Datasets {task.tfds}" for name, task in TASKS.items()}
    return list(list_remarks(results, places.sets, sources))


def describe_results(plan: SuitePlan, results: dict[str, TransferResult], places: SuiteData) -> dict[str, Any]:
    """Return the content of suite.json."""
    return {
        "suite": "vtab",
        "model": plan.model,
        "papers_protocol": not any(result.deviations for result in results.values()),
        "tasks": {name: _describe_task(TASKS[name], result) for name, result in results.items()},
        "means": {title: sum(shares) / len(shares) for title, shares in mean_accuracies(results).items()},
        "missing": {name: task.url for name, task in TASKS.items() if name not in places.sets},
        "paper": dict(zip(PAPER_MODELS, TABLE_2[TITLE], strict=True)),
    }


def _describe_task(task: VtabTask, result: TransferResult) -> dict[str, Any]:
    paper = dict(zip(PAPER_MODELS, task.paper, strict=False))  # table 9 has the first three
    return {"group": task.group, **result.to_dict(), "paper": paper}
