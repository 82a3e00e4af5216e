"""Measure a frozen model: the paper's few-shot accuracy, a linear probe, nearest neighbours and clusters.

The features of all images are computed once; simple classifiers are fitted to them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.data.open import Data, add_labels_from, choose_test_split, list_splits, name_data, open_data, propose_data
from vitrail.data.sources.source import SPLITS, Source, compute_fingerprint, require_labels
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluation.clusters import cluster_features, measure_agreement
from vitrail.evaluation.features import Cache, Features, extract_features
from vitrail.evaluation.least_squares import L2, SEEDS, SHOTS, score_few_shot
from vitrail.evaluation.linear_probe import assign_folds, choose_strength
from vitrail.evaluation.neighbours import NEIGHBOURS, score_knn
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inference.engine import Engine, Model, get_model, name_model
from vitrail.inference.torch_engine import TorchEngine
from vitrail.model.heads import MlpHead
from vitrail.system.events import OnEvent, open_listener, send_messages, send_progress
from vitrail.system.files import check_out_file, write_out_file
from vitrail.system.intervals import wilson_interval
from vitrail.system.ranks import require_one_process
from vitrail.system.results import Result, Rows

FEATURES = ("representation", "pre-logits")
"""What of a model is measured: its representation y, or the layer between y and the logits, if it has one."""
HELD_OUT = 0.2
"""Share of every class that is held out if the data has no part to test on."""
ROWS = 4096
"""Features that are computed at a time."""


@dataclass(frozen=True)
class FewshotRow:
    """One measured accuracy."""

    method: str
    accuracy: float
    shots: int | None = None
    """Images of each class to learn from; None means all."""
    seed: int | None = None
    """None if the method draws nothing at random."""
    details: dict[str, float] = field(default_factory=dict)
    """More numbers, such as the strength that was chosen."""


@dataclass(frozen=True)
class FewshotSummary:
    """The mean accuracy of a method over all seeds."""

    method: str
    shots: int | None
    accuracy: float
    deviation: float | None
    """Standard deviation over the seeds; None for a single seed."""


@dataclass(frozen=True, repr=False)
class FewshotReport(Result):
    """The accuracies of all methods, and what they were measured on."""

    model: str
    data: str
    tested_on: str
    """The test images, in words."""
    train_images: int
    test_images: int
    unreadable: int
    """Images of either part that could not be read and are left out."""
    classes: int
    most_frequent: float
    """Accuracy of always guessing the most frequent class of the test images."""
    rows: tuple[FewshotRow, ...]
    notes: tuple[str, ...]
    features: str = "representation"
    """What was measured: `representation` (y) or `pre-logits`, the tanh layer between y and the logits."""

    @property
    def chance(self) -> float:
        """The accuracy of guessing at random."""
        return 1 / self.classes

    def summaries(self) -> list[FewshotSummary]:
        """Return one summary for each method and number of shots, in the order of the rows."""
        accuracies: dict[tuple[str, int | None], list[float]] = {}
        for row in self.rows:
            accuracies.setdefault((row.method, row.shots), []).append(row.accuracy)
        summaries = []
        for (method, shots), values in accuracies.items():
            deviation = statistics.stdev(values) if len(values) > 1 else None
            summaries.append(FewshotSummary(method, shots, statistics.fmean(values), deviation))
        return summaries

    def interval(self, summary: FewshotSummary) -> tuple[float, float]:
        """Return the 95% interval of an accuracy that the choice of the test images leaves open."""
        return wilson_interval(round(summary.accuracy * self.test_images), self.test_images)

    def lines(self) -> Iterator[str]:
        """Yield sentences to print below the table."""
        yield f"{self.train_images:,} images of {self.classes} classes to learn from, {self.test_images:,} to test on"
        yield f"tested on {self.tested_on}"
        if self.unreadable:
            yield f"left out, for they cannot be read: {self.unreadable:,} images; `vitrail data check` names them"
        yield from self.notes
        yield f"chance: {self.chance:.1%}; always the most frequent class: {self.most_frequent:.1%}"

    def summary(self) -> Rows:
        """Return the accuracy of each method, and what it was measured on."""
        rows = [("model", self.model), ("data", self.data), ("tested on", f"{self.test_images:,} images")]
        for summary in self.summaries():
            shots = "" if summary.shots is None else f", {summary.shots} shots"
            low, high = self.interval(summary)
            rows.append((summary.method + shots, f"{summary.accuracy:.1%} (95% interval {low:.1%} to {high:.1%})"))
        return [*rows, ("chance", f"{self.chance:.1%}")]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the table of all methods, and the sentences below it."""
        rows = [
            (
                summary.method,
                "all" if summary.shots is None else str(summary.shots),
                f"{summary.accuracy:.1%}",
                "" if summary.deviation is None else f"± {summary.deviation:.1%}",
                *(f"{limit:.1%}" for limit in self.interval(summary)),
            )
            for summary in self.summaries()
        ]
        columns = ("method", "shots", "accuracy", "deviation", "95% from", "to")
        notes = [("note",), *((line,) for line in self.lines())]
        return {f"{self.model} on {self.data}": [columns, *rows], "Notes": notes}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, the accuracy of guessing at random, and the mean over the seeds of each method."""
        return {
            **super().to_dict(),
            "chance": self.chance,
            "summaries": [asdict(summary) for summary in self.summaries()],
        }


@dataclass(frozen=True)
class FewshotTask:
    """The input of a method."""

    train: Features
    test: Features
    classes: int
    shots: Sequence[int]
    seeds: Sequence[int]
    l2: float
    notes: list[str]
    """Methods append sentences for the report."""


def run_least_squares(task: FewshotTask) -> Iterator[FewshotRow]:
    """Fit the paper's closed-form least squares to a few images of each class."""
    results = score_few_shot(task.train, task.test, task.classes, task.shots, task.seeds, task.l2)
    for row in results:
        yield FewshotRow("least-squares", row.accuracy, row.shots, row.seed, {"images": row.images})
    for shots, short in {row.shots: row.short for row in results if row.short}.items():
        task.notes.append(f"{shots} shots: {short} of {task.classes} classes have fewer images, and give all they have")


def run_linear_probe(task: FewshotTask) -> Iterator[FewshotRow]:
    """Fit logistic regression to all images; its strength is chosen on a fifth of them."""
    if not (assign_folds(task.train.labels) == 0).any():
        task.notes.append("linear: left out, for a class needs two images to choose the strength by")
        return
    probe = choose_strength(task.train.values, task.train.labels, task.classes)
    accuracy = probe.linear.accuracy(task.test.values, task.test.labels)
    yield FewshotRow("linear", accuracy, details={"strength": probe.strength})


def run_neighbours(task: FewshotTask) -> Iterator[FewshotRow]:
    """Classify by the votes of the 20 nearest images, and by the nearest image alone."""
    for k in (NEIGHBOURS, 1):
        yield FewshotRow(f"knn, k={k}", score_knn(task.train, task.test, task.classes, k))


def run_clusters(task: FewshotTask) -> Iterator[FewshotRow]:
    """Cluster the test images alone, into as many clusters as they have classes."""
    number = len(task.test.labels.unique())
    agreements = []
    for seed in task.seeds:
        one = measure_agreement(cluster_features(task.test.values, number, seed), task.test.labels)
        agreements.append(one)
        yield FewshotRow("clusters", one.accuracy, seed=seed, details={"nmi": one.nmi, "ari": one.ari})
    nmi, ari = (statistics.fmean(getattr(one, measure) for one in agreements) for measure in ("nmi", "ari"))
    task.notes.append(f"clusters of the test images: NMI {nmi:.3f}, ARI {ari:.3f}; 1 is perfect, and ARI 0 chance")


METHODS: dict[str, Callable[[FewshotTask], Iterator[FewshotRow]]] = {
    "least-squares": run_least_squares,
    "linear": run_linear_probe,
    "knn": run_neighbours,
    "clusters": run_clusters,
}


def fewshot(
    model: Model,
    data: Data,
    test: Data | None = None,
    *,
    labels_from: str | None = None,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    methods: Sequence[str] = tuple(METHODS),
    l2: float = L2,
    features: str = "representation",
    batch_size: int = 64,
    workers: int = 0,
    device: str = "auto",
    precision: str = "fp32",
    cache: Cache = "auto",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
) -> FewshotReport:
    """Fit simple classifiers to the frozen features of a model and score them on test images.

    Events: `message` (text) while a faster precision is prepared, and the progress of the task "features". If it is
    stopped and called again, the features that were computed are found in the cache.

    Args:
        model: a loaded model, anything that `vitrail.load` takes, or an exported file that gives representations.
        data: what to learn from: anything that `open_data` takes.
        test: other data, or a split of `data`; by default its test split, else val, else a fifth that is held out.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group. It holds for other data to test on as well.
        shots: numbers of images of each class, for least squares.
        seeds: for least squares and clusters, which draw at random.
        methods: one or some of `METHODS`.
        l2: regularisation of least squares, above 0.
        features: "representation", the y of the paper; or "pre-logits", the choice of the released evaluator: the tanh
            layer of a pre-training head (`representation_size`), and y for models that have none.
        batch_size: images at a time.
        workers: processes that read images; 0 reads them in this process.
        device: cpu, cuda, mps, …; auto takes a GPU if the machine has one.
        precision: fp32, or faster and less exact: bf16, fp16 and fp8 (GPU), int8 (CPU); auto takes the fastest here.
        cache: where features are cached: a folder, "auto", or None for nowhere.
        out: a file for the report as JSON.
        on_event: called with what happens; by default a terminal or notebook shows a bar.

    Raises:
        ConfigError: an argument is out of range.
        DataError: the data cannot be learned from or tested on.
    """
    require_one_process("fewshot")
    shots, seeds = [*map(int, shots)], [*map(int, seeds)]  # an array would be neither true nor false
    methods = [methods] if isinstance(methods, str) else methods
    check_options(methods, shots, seeds, l2, features)
    place = None if out is None else Path(out)
    check_out_file(place)
    options = InferenceOptions(batch_size, workers, device, precision)
    data = add_labels_from(data, labels_from)
    if test is not None and not _is_split(test):
        test = add_labels_from(test, labels_from)
    train_source, test_source, tested_on = open_train_and_test(data, test)
    if train_source.num_classes == 1 and (problem := propose_data(data)) is not None:
        raise problem
    check_sources(name_data(data), train_source, test_source)
    with open_listener(on_event) as listener:
        engine = open_model(model, options, on_message=send_messages(listener))
        chosen, notes = _choose_features(engine, features)
        train, tested = (
            extract_features(engine, source, options, cache, send_progress(listener, "features"))
            for source in (train_source, test_source)
        )
    if chosen == "pre-logits":
        train, tested = (_to_pre_logits(engine, part) for part in (train, tested))
    if engine.device.type == "cuda":
        train, tested = _move_to(engine.device, train), _move_to(engine.device, tested)
    task = FewshotTask(train, tested, train_source.num_classes, shots, seeds, l2, notes)
    rows = tuple(row for method in dict.fromkeys(methods) for row in METHODS[method](task))
    report = FewshotReport(
        model=name_model(model),
        data=name_data(data),
        tested_on=tested_on,
        train_images=len(train),
        test_images=len(tested),
        unreadable=len(train_source) + len(test_source) - len(train) - len(tested),
        classes=task.classes,
        most_frequent=int(torch.bincount(tested.labels).max()) / len(tested),
        rows=rows,
        notes=tuple(task.notes),
        features=chosen,
    )
    if place is not None:
        write_out_file(place, report.to_dict())
    return report


def check_options(
    methods: Sequence[str], shots: Sequence[int], seeds: Sequence[int], l2: float, features: str = FEATURES[0]
) -> None:
    """Raise a ConfigError for wrong arguments, before anything is computed."""
    if features not in FEATURES:
        raise ConfigError(
            f"features {features!r}{did_you_mean(features, FEATURES) or ':'} give {' or '.join(FEATURES)}"
        )
    for method in methods:
        if method not in METHODS:
            hint = did_you_mean(method, METHODS)
            raise ConfigError(f"unknown method {method!r}{hint}; there are {', '.join(METHODS)}")
    if not methods or not shots or not seeds:
        raise ConfigError("give at least one method, one number of shots and one seed")
    if wrong := [number for number in shots if number < 1]:
        raise ConfigError(f"shots = {wrong[0]}: give numbers of images of each class, from 1 on")
    if not 0 < l2 < math.inf:  # written this way, NaN is refused too
        raise ConfigError(f"l2 = {l2:g}: give a number above 0, such as the paper's {L2:g}")


def _choose_features(engine: Engine, features: str) -> tuple[str, list[str]]:
    """Return which features are measured, and a note if the model has both kinds or lacks the requested one."""
    wants_pre_logits = features == "pre-logits"
    if wants_pre_logits:
        get_model(engine)  # raises for an exported file, which gives out y alone
    if not isinstance(engine, TorchEngine) or not isinstance(engine.model.head, MlpHead):
        note = "features: the representation y, because the model has no pre-logits layer"
        return FEATURES[0], [note] if wants_pre_logits else []
    if wants_pre_logits:
        return features, [
            "features: the pre-logits layer, as in the released evaluator; the representation y is before it"
        ]
    return features, ["features: the representation y; the released evaluator takes the pre-logits layer after it"]


@torch.inference_mode()
def _to_pre_logits(engine: Engine, part: Features) -> Features:
    """Compute the pre-logits layer from y, so that the cache of y serves both."""
    head = get_model(engine).head
    assert isinstance(head, MlpHead)
    weight = head.hidden.weight
    rows = [head.compute_pre_logits(y.to(weight)).float().cpu() for y in part.values.split(ROWS)]
    return replace(part, values=torch.cat(rows))


def open_train_and_test(data: Data, test: Data | None) -> tuple[Source, Source, str]:
    """Return the images to learn from, the images to test on, and a description of the latter."""
    splits = list_splits(data)
    part = next((ours for ours, names in SPLITS.items() if test in names), None) if _is_split(test) else None
    if part == "train":
        raise ConfigError("--test train would test on what was learned from: give val, test or another data set")
    if test is not None and part is None:
        train, (other, tested_on) = _open_training(data, splits), _open_other(test)
        if compute_fingerprint(train) == compute_fingerprint(other):
            raise ConfigError(f"--test {name_data(test)} is what was learned from: give other data, or leave test out")
        return train, other, tested_on
    part = part or choose_test_split(data) or "val"
    if part in splits or part == "test":
        return _open_training(data, splits), open_data(data, part), f"the {part} part of {name_data(data)}"
    tested_on = f"a fifth of every class of {name_data(data)}, held out"
    return open_data(data, "train", HELD_OUT), open_data(data, "val", HELD_OUT), tested_on


def _is_split(test: Data | None) -> bool:
    return isinstance(test, str) and any(test in names for names in SPLITS.values())


def _open_training(data: Data, splits: Sequence[str]) -> Source:
    return open_data(data, "train") if splits else open_data(data)


def _open_other(test: Data) -> tuple[Source, str]:
    part = choose_test_split(test) or ("train" if "train" in list_splits(test) else None)
    name = name_data(test)
    return open_data(test, part), name if part is None else f"the {part} part of {name}"


def check_sources(data: str, train: Source, test: Source) -> None:
    """Raise a DataError if a classifier of `train` cannot be scored on `test`."""
    for source in (train, test):
        require_labels(source, data, "a measurement of few-shot accuracy")
    if train.num_classes < 2:
        classes = "1 class" if train.num_classes == 1 else "no labels"
        raise DataError(f"{data} has {classes}: give data with two or more classes")
    if not len(test):
        raise DataError(
            f"{data} leaves no images to test on: a class needs two or more; or give test data (--test DATA)"
        )
    if train.classes != test.classes or test.num_classes > train.num_classes:
        raise DataError(f"the test images have other classes than the data: {_describe_difference(train, test)}")


def _describe_difference(train: Source, test: Source) -> str:
    for one, other, where in ((test, train, "only in the test images"), (train, test, "not in the test images")):
        if only := sorted(set(one.classes) - set(other.classes)):
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            return f"{only[0]!r}{more} {'is' if not more else 'are'} {where}"
    if train.classes and test.classes:
        return "they are in another order"
    return f"{train.num_classes} there, {test.num_classes} here, and not all have names"


def _move_to(device: torch.device, features: Features) -> Features:
    return replace(features, values=features.values.to(device), labels=features.labels.to(device))
