"""`vitrail evaluate --suite vtab`: 19 tasks, 1,000 training images each, one protocol for all.

Of each task 1,000 training images are drawn and kept as shards in the suite's folder, so that every run of it sees the
same, and a person can look at them. With several learning rates 800 train and 200 choose; in the end all are trained
on. The test part stays where it is.

runs/suite-vtab-NAME/TASK/images/choosing/{train,val}, images/all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from vitrail.transfer import paper_suite
from vitrail.transfer.suite_data import (
    DataLocation,
    PickedSamples,
    RelabelledSource,
    SuiteData,
    SuiteParts,
    describe_count_differences,
    find_suite_data,
    open_suite_parts,
)
from vitrail.transfer.suite_table import NOTHING, PAPER_MODELS, TABLE_2, Rows, format_mean, format_table, write_results
from vitrail.transfer.transfer import (
    RUNS,
    SuitePlan,
    TransferResult,
    TransferTarget,
    list_remarks,
    make_config,
    make_plan,
    run_on_first_rank,
    transfer_to,
)
from vitrail.transfer.vtab_tasks import GROUPS, TASKS, VtabTask

TRAIN, VAL = 800, 200
"""Images that train and images that choose."""
WHOLE_IMAGE: dict[str, Any] = {"crop_area": (1.0, 1.0), "crop_ratio": (0.01, 100.0)}
"""No crop; the ratio, because an image that is longer than the usual ones would be cut to them."""
TITLE = "VTAB (19 tasks)"
CHOOSING, ALL = "choosing", "all"


def run_vtab_suite(
    model: str,
    data: str,
    folder: Path | None = None,
    runs: int = RUNS,
    overrides: Sequence[str] = (),
    rates: Sequence[float] | None = None,
) -> Iterator[str]:
    """Lines to print, as they come; the last are the table. The arguments are those of `run_paper_suite`.

    Without `rates` there is one, the paper's, and nothing to choose.
    """
    settled = make_plan("vtab", model, folder, runs, overrides, rates)
    places = find_suite_data(data, TASKS, {**paper_suite.SETS, **TASKS})
    yield from places.remarks
    work = [_subject(settled, TASKS[name], place) for name, place in places.sets.items()]
    for subject, _ in work:
        make_config(settled, subject)  # whatever is wrong is said before anything is trained
    outcomes: dict[str, TransferResult] = {}
    for subject, prepare in work:
        outcomes[subject.name] = yield from transfer_to(settled, subject, prepare)
        _write(settled, outcomes, places)
    yield from format_results(settled, outcomes, places)


# ---- A task's images -------------------------------------------------------------------------------------------------


def _subject(
    plan: SuitePlan, task: VtabTask, place: DataLocation
) -> tuple[TransferTarget, Callable[[RunConfig, bool], None]]:
    """The task with its images drawn, and what writes them down."""
    parts = relabel_parts(task, place, open_suite_parts(task.name, place.data))
    train, val = split_train_val(parts)
    folder = plan.folder / task.name / "images"
    notes = [] if parts.tested_on == "test" else [f"there is no part test: scored on {parts.tested_on}"]
    unlike = describe_count_differences(
        [
            ("images to train on", len(train) + len(val), TRAIN + VAL),
            ("classes", parts.train.num_classes, task.classes),
            ("test images", len(parts.test), task.images[2]),
        ]
    )
    recipe = find_recipe("finetune-vtab")
    changes = {**recipe.settings["data"]["augmentation"], **({} if task.crop else WHOLE_IMAGE)}
    subject = TransferTarget(
        name=task.name,
        recipe=recipe,
        changes={"data": {"augmentation": changes if task.mirror else {**changes, "flip": 0.0}}},
        choosing={"source": str(folder / CHOOSING), "validate_on": "val", "holdout": None},
        chosen_on=f"the {len(val)} images that choose",
        training={"source": str(folder / ALL), "validate_on": "none", "holdout": 0.0},
        images=(len(train), len(train) + len(val)),
        test=parts.test,
        notes=(*notes, unlike) if unlike else tuple(notes),
    )
    return subject, partial(_prepare, folder, train, val)


def relabel_parts(task: VtabTask, place: DataLocation, parts: SuiteParts) -> SuiteParts:
    """With the task's labels: made of the original's annotations where they are raw, and with as many classes."""
    if place.raw and (task.label is None or not task.whole):
        what = "its labels are classes as they are" if task.label is None else "its annotation is no whole number"
        how = (
            "leave raw out"
            if task.label is None
            else f"label the data by vitrail.transfer.vtab_labels.{task.label.__name__}"
        )
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
    made = SuiteParts(
        make(parts.train), None if parts.val is None else make(parts.val), make(parts.test), parts.tested_on
    )
    try:
        for source in (made.train, made.val, made.test):
            if source is not None:
                source.labels(0, len(source))
    except DataError as error:
        raise DataError(f"{task.name}: {place.data}: {error}") from None
    return made


def split_train_val(parts: SuiteParts) -> tuple[PickedSamples, PickedSamples]:
    """800 images that train and 200 that choose: of train and val, or all of train; where there are fewer, all."""
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
    """So many samples, in an order that the seed and their names decide: the same everywhere and every time."""
    salt = seed.to_bytes(16, "big", signed=True)
    keys = [hash_name(salt, source.identity(index)) for index in range(len(source))]
    chosen: Indices = np.argsort(np.array(keys, dtype=np.uint64), kind="stable")[:count]
    return chosen


def _prepare(folder: Path, train: PickedSamples, val: PickedSamples, config: RunConfig, choose: bool) -> None:
    """The images as shards, unless they are there; those that choose only where there is a choice."""

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


def table_rows(outcomes: dict[str, TransferResult]) -> Rows:
    """A task each."""
    return [
        (
            task.title,
            task.group,
            format_mean(outcomes[name].accuracies),
            str(len(outcomes[name].runs)),
            f"{outcomes[name].rate:g}",
            f"{outcomes[name].runs[0].count:,}",
        )
        for name, task in TASKS.items()
        if name in outcomes
    ]


def mean_accuracies(outcomes: dict[str, TransferResult]) -> dict[str, list[float]]:
    """The mean over the tasks of each group and over all, for each seed; named as what they are."""
    found: dict[str, list[float]] = {}
    for group in GROUPS:
        all_of_it = [name for name, task in TASKS.items() if task.group == group]
        ran = [name for name in all_of_it if name in outcomes]
        if ran:
            some = "" if len(ran) == len(all_of_it) else f"{len(ran)} of "
            found[f"{group} ({some}{len(all_of_it)} tasks)"] = _over(outcomes, ran)
    whole = len(outcomes) == len(TASKS)
    ran_at_all = "1 task" if len(outcomes) == 1 else f"{len(outcomes)} tasks"
    title = TITLE if whole else f"mean over the {ran_at_all} that ran (not VTAB)"
    found[title] = _over(outcomes, list(outcomes))
    return found


def _over(outcomes: dict[str, TransferResult], names: Sequence[str]) -> list[float]:
    by_seed = zip(*(outcomes[name].accuracies for name in names), strict=True)
    return [sum(shares) / len(shares) for shares in by_seed]


def format_results(plan: SuitePlan, outcomes: dict[str, TransferResult], places: SuiteData) -> list[str]:
    """The tasks, their means beside the paper's, and what there is to be said of it."""
    tasks = format_table(
        ("task", "group", plan.model, "runs", "learning rate", "test images"), table_rows(outcomes), left=2
    )
    summary = [
        (title, format_mean(shares), *TABLE_2.get(title, (NOTHING,) * len(PAPER_MODELS)))
        for title, shares in mean_accuracies(outcomes).items()
    ]
    together = format_table(("top-1, %", plan.model, *PAPER_MODELS), summary)
    sources = {name: f"{task.origin}, {task.url}, in TensorFlow Datasets {task.tfds}" for name, task in TASKS.items()}
    return [*tasks, "", *together, "", *list_remarks(outcomes, places.sets, sources)]


def _write(plan: SuitePlan, outcomes: dict[str, TransferResult], places: SuiteData) -> None:
    found: dict[str, Any] = {
        "suite": "vtab",
        "model": plan.model,
        "papers_protocol": not any(outcome.deviations for outcome in outcomes.values()),
        "tasks": {name: {"group": TASKS[name].group, **outcome.as_json()} for name, outcome in outcomes.items()},
        "means": {title: sum(shares) / len(shares) for title, shares in mean_accuracies(outcomes).items()},
        "missing": {name: task.url for name, task in TASKS.items() if name not in places.sets},
        "paper": dict(zip(PAPER_MODELS, TABLE_2[TITLE], strict=True)),
    }
    write_results(plan.folder, f"VTAB: {plan.model}", format_results(plan, outcomes, places), found)
