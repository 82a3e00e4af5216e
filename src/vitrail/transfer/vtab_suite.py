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
from vitrail.data.packing.pack import pack
from vitrail.data.sources.source import Source, name_key, shown
from vitrail.errors import ConfigError, DataError
from vitrail.recipes import find as find_recipe
from vitrail.system.files import write_whole
from vitrail.training.config import RunConfig
from vitrail.transfer import paper_suite
from vitrail.transfer.suite_data import Chosen, Labelled, Parts, Place, Places, counted, find, opened
from vitrail.transfer.suite_table import NOTHING, PAPER_MODELS, TABLE_2, Rows, aligned, shown_mean, write
from vitrail.transfer.transfer import RUNS, Outcome, Plan, Subject, configured, first_alone, plan, remarks, transferred
from vitrail.transfer.vtab import GROUPS, TASKS, Task

TRAIN, VAL = 800, 200
"""Images that train and images that choose."""
WHOLE_IMAGE: dict[str, Any] = {"crop_area": (1.0, 1.0), "crop_ratio": (0.01, 100.0)}
"""No crop; the ratio, because an image that is longer than the usual ones would be cut to them."""
TITLE = "VTAB (19 tasks)"
CHOOSING, ALL = "choosing", "all"


def run(
    model: str,
    data: str,
    folder: Path | None = None,
    runs: int = RUNS,
    overrides: Sequence[str] = (),
    rates: Sequence[float] | None = None,
) -> Iterator[str]:
    """Lines to print, as they come; the last are the table. The arguments are `vitrail.transfer.paper_suite.run`'s.

    Without `rates` there is one, the paper's, and nothing to choose.
    """
    settled = plan("vtab", model, folder, runs, overrides, rates)
    places = find(data, TASKS, {**paper_suite.SETS, **TASKS})
    yield from places.remarks
    work = [_subject(settled, TASKS[name], place) for name, place in places.sets.items()]
    for subject, _ in work:
        configured(settled, subject)  # whatever is wrong is said before anything is trained
    outcomes: dict[str, Outcome] = {}
    for subject, prepare in work:
        outcomes[subject.name] = yield from transferred(settled, subject, prepare)
        _write(settled, outcomes, places)
    yield from lines(settled, outcomes, places)


# ---- A task's images -------------------------------------------------------------------------------------------------


def _subject(plan: Plan, task: Task, place: Place) -> tuple[Subject, Callable[[RunConfig, bool], None]]:
    """The task with its images drawn, and what writes them down."""
    parts = labelled(task, place, opened(task.name, place.data))
    train, val = divided(parts)
    folder = plan.folder / task.name / "images"
    notes = [] if parts.tested_on == "test" else [f"there is no part test: scored on {parts.tested_on}"]
    unlike = counted(
        [
            ("images to train on", len(train) + len(val), TRAIN + VAL),
            ("classes", parts.train.num_classes, task.classes),
            ("test images", len(parts.test), task.images[2]),
        ]
    )
    recipe = find_recipe("finetune-vtab")
    changes = {**recipe.settings["data"]["augmentation"], **({} if task.crop else WHOLE_IMAGE)}
    subject = Subject(
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


def labelled(task: Task, place: Place, parts: Parts) -> Parts:
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
    make = partial(Labelled, classes=task.classes, label=task.label if place.raw else None)
    made = Parts(make(parts.train), None if parts.val is None else make(parts.val), make(parts.test), parts.tested_on)
    try:
        for source in (made.train, made.val, made.test):
            if source is not None:
                source.labels(0, len(source))
    except DataError as error:
        raise DataError(f"{task.name}: {place.data}: {error}") from None
    return made


def divided(parts: Parts) -> tuple[Chosen, Chosen]:
    """800 images that train and 200 that choose: of train and val, or all of train; where there are fewer, all."""
    if parts.val is not None:
        return (
            Chosen([(parts.train, int(index)) for index in drawn(parts.train, TRAIN)]),
            Chosen([(parts.val, int(index)) for index in drawn(parts.val, VAL)]),
        )
    together = [(parts.train, int(index)) for index in drawn(parts.train, TRAIN + VAL)]
    choose = max(len(together) * VAL // (TRAIN + VAL), 1)
    if len(together) < 2:
        raise DataError(f"{parts.train.name(0)} is the only image to train on: a task needs 2 or more")
    return Chosen(together[:-choose]), Chosen(together[-choose:])


def drawn(source: Source, count: int, seed: int = 0) -> Indices:
    """So many samples, in an order that the seed and their names decide: the same everywhere and every time."""
    salt = seed.to_bytes(16, "big", signed=True)
    keys = [name_key(salt, source.identity(index)) for index in range(len(source))]
    chosen: Indices = np.argsort(np.array(keys, dtype=np.uint64), kind="stable")[:count]
    return chosen


def _prepare(folder: Path, train: Chosen, val: Chosen, config: RunConfig, choose: bool) -> None:
    """The images as shards, unless they are there; those that choose only where there is a choice."""

    def work() -> None:
        _pack(Chosen([*train.samples, *val.samples]), folder / ALL)
        if choose:
            _pack(train, folder / CHOOSING / "train")
            _pack(val, folder / CHOOSING / "val")
            names = "".join(f"{shown(name)}\n" for name in train.classes)
            write_whole(folder / CHOOSING / "classes.txt", names.encode())

    first_alone(config, work)


def _pack(source: Source, folder: Path) -> None:
    pack(source, folder, skip_broken=True, workers=1)


# ---- The table -------------------------------------------------------------------------------------------------------


def rows(outcomes: dict[str, Outcome]) -> Rows:
    """A task each."""
    return [
        (
            task.title,
            task.group,
            shown_mean(outcomes[name].accuracies),
            str(len(outcomes[name].runs)),
            f"{outcomes[name].rate:g}",
            f"{outcomes[name].runs[0].count:,}",
        )
        for name, task in TASKS.items()
        if name in outcomes
    ]


def means(outcomes: dict[str, Outcome]) -> dict[str, list[float]]:
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


def _over(outcomes: dict[str, Outcome], names: Sequence[str]) -> list[float]:
    by_seed = zip(*(outcomes[name].accuracies for name in names), strict=True)
    return [sum(shares) / len(shares) for shares in by_seed]


def lines(plan: Plan, outcomes: dict[str, Outcome], places: Places) -> list[str]:
    """The tasks, their means beside the paper's, and what there is to be said of it."""
    tasks = aligned(("task", "group", plan.model, "runs", "learning rate", "test images"), rows(outcomes), left=2)
    summary = [
        (title, shown_mean(shares), *TABLE_2.get(title, (NOTHING,) * len(PAPER_MODELS)))
        for title, shares in means(outcomes).items()
    ]
    together = aligned(("top-1, %", plan.model, *PAPER_MODELS), summary)
    sources = {name: f"{task.origin}, {task.url}, in TensorFlow Datasets {task.tfds}" for name, task in TASKS.items()}
    return [*tasks, "", *together, "", *remarks(outcomes, places.sets, sources)]


def _write(plan: Plan, outcomes: dict[str, Outcome], places: Places) -> None:
    found: dict[str, Any] = {
        "suite": "vtab",
        "model": plan.model,
        "papers_protocol": not any(outcome.deviations for outcome in outcomes.values()),
        "tasks": {name: {"group": TASKS[name].group, **outcome.as_json()} for name, outcome in outcomes.items()},
        "means": {title: sum(shares) / len(shares) for title, shares in means(outcomes).items()},
        "missing": {name: task.url for name, task in TASKS.items() if name not in places.sets},
        "paper": dict(zip(PAPER_MODELS, TABLE_2[TITLE], strict=True)),
    }
    write(plan.folder, f"VTAB: {plan.model}", lines(plan, outcomes, places), found)
