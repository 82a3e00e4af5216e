"""What a frozen model is worth on a data set: the paper's few-shot, a linear probe, neighbours and clusters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.data.open import open_data, list_splits, choose_test_split
from vitrail.data.sources.source import SPLITS, ListSource, Source, compute_fingerprint
from vitrail.data.transforms.preprocess import prepare
from vitrail.errors import ConfigError, DataError, did_you_mean
from vitrail.evaluation.clusters import measure_agreement, cluster_features
from vitrail.evaluation.features import Features, extract_features
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.least_squares import L2, SEEDS, SHOTS, score_few_shot
from vitrail.evaluation.linear_probe import choose_strength, assign_folds
from vitrail.evaluation.neighbours import NEIGHBOURS, score_knn, find_nearest
from vitrail.inference.batches import InferenceOptions, Progress, single_rank
from vitrail.model.base import ImageModel
from vitrail.system.ranks import require_one_process
from vitrail.weights.load import load

HELD_OUT = 0.2
"""Of every class, where the data has no part to test on."""
SHOWN = 10
"""Neighbours."""

Cache = Path | Literal["auto"] | None


@dataclass(frozen=True)
class FewshotRow:
    """One measurement."""

    method: str
    accuracy: float
    shots: int | None = None
    """Images of each class that were learned from; None for all."""
    seed: int | None = None
    """None where nothing is drawn."""
    details: dict[str, float] = field(default_factory=dict)
    """What else there is to say about it, such as the strength that was chosen."""


@dataclass(frozen=True)
class FewshotSummary:
    """All seeds of a method."""

    method: str
    shots: int | None
    accuracy: float
    """The mean."""
    deviation: float | None
    """Of the seeds; None for one."""


@dataclass(frozen=True)
class FewshotReport:
    """What came of it."""

    model: str
    data: str
    tested_on: str
    """In words."""
    train_images: int
    test_images: int
    unreadable: int
    """Images that were left out of either part."""
    classes: int
    most_frequent: float
    """The share of the most frequent class among the test images: what always saying it would score."""
    rows: tuple[FewshotRow, ...]
    notes: tuple[str, ...]

    @property
    def chance(self) -> float:
        """What guessing would score."""
        return 1 / self.classes

    def summaries(self) -> list[FewshotSummary]:
        """One for each method and number of shots, in the order they came."""
        together: dict[tuple[str, int | None], list[float]] = {}
        for row in self.rows:
            together.setdefault((row.method, row.shots), []).append(row.accuracy)
        return [
            FewshotSummary(method, shots, statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None)
            for (method, shots), found in together.items()
        ]

    def interval(self, summary: FewshotSummary) -> tuple[float, float]:
        """In which the accuracy lies on images like the test images, for what was learned here."""
        return wilson_interval(round(summary.accuracy * self.test_images), self.test_images)

    def lines(self) -> Iterator[str]:
        """What stands around the table."""
        yield f"{self.train_images:,} images of {self.classes} classes to learn from, {self.test_images:,} to test on"
        yield f"tested on {self.tested_on}"
        if self.unreadable:
            yield f"left out, for they cannot be read: {self.unreadable:,} images; `vitrail data check` names them"
        yield from self.notes
        yield f"chance: {self.chance:.1%}; always the most frequent class: {self.most_frequent:.1%}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "chance": self.chance, "summaries": [asdict(summary) for summary in self.summaries()]}


@dataclass(frozen=True)
class FewshotTask:
    """What a method is given."""

    train: Features
    test: Features
    classes: int
    shots: Sequence[int]
    seeds: Sequence[int]
    l2: float
    notes: list[str]


def run_least_squares(task: FewshotTask) -> Iterator[FewshotRow]:
    """The paper's: a few images of each class, closed form."""
    found = score_few_shot(task.train, task.test, task.classes, task.shots, task.seeds, task.l2)
    for row in found:
        yield FewshotRow("least-squares", row.accuracy, row.shots, row.seed, {"images": row.images})
    for shots, short in {row.shots: row.short for row in found if row.short}.items():
        task.notes.append(f"{shots} shots: {short} of {task.classes} classes have fewer images, and give all they have")


def run_linear_probe(task: FewshotTask) -> Iterator[FewshotRow]:
    """Logistic regression on all images, its strength chosen on a fifth of them."""
    if not (assign_folds(task.train.labels) == 0).any():
        task.notes.append("linear: left out, for a class needs two images to choose the strength by")
        return
    choice = choose_strength(task.train.values, task.train.labels, task.classes)
    accuracy = choice.linear.accuracy(task.test.values, task.test.labels)
    yield FewshotRow("linear", accuracy, details={"strength": choice.strength})


def run_neighbours(task: FewshotTask) -> Iterator[FewshotRow]:
    """The votes of many neighbours, and the nearest alone."""
    for k in (NEIGHBOURS, 1):
        yield FewshotRow(f"knn, k={k}", score_knn(task.train, task.test, task.classes, k))


def run_clusters(task: FewshotTask) -> Iterator[FewshotRow]:
    """The test images alone, in as many clusters as there are classes among them."""
    number = len(task.test.labels.unique())
    found = [measure_agreement(cluster_features(task.test.values, number, seed), task.test.labels) for seed in task.seeds]
    for seed, one in zip(task.seeds, found, strict=True):
        yield FewshotRow("clusters", one.accuracy, seed=seed, details={"nmi": one.nmi, "ari": one.ari})
    nmi, ari = (statistics.fmean(values) for values in ([one.nmi for one in found], [one.ari for one in found]))
    task.notes.append(f"clusters of the test images: NMI {nmi:.3f}, ARI {ari:.3f}; 1 is perfect, and ARI 0 chance")


METHODS: dict[str, Callable[[FewshotTask], Iterator[FewshotRow]]] = {
    "least-squares": run_least_squares,
    "linear": run_linear_probe,
    "knn": run_neighbours,
    "clusters": run_clusters,
}


def fewshot(
    model: str,
    data: str,
    test: str | None = None,
    shots: Sequence[int] = SHOTS,
    seeds: Sequence[int] = SEEDS,
    methods: Sequence[str] = tuple(METHODS),
    l2: float = L2,
    options: InferenceOptions | None = None,
    cache: Cache = "auto",
    progress: Progress | None = None,
) -> FewshotReport:
    """Run the methods on the representations of a model.

    `test`: another data set, or a part of this one; if None, its test part, or val, or a fifth that is held out.
    """
    require_one_process("fewshot")
    check_options(methods, shots, seeds, l2)
    options = options or InferenceOptions()
    train_source, test_source, tested_on = open_train_and_test(data, test)
    check_sources(data, train_source, test_source)
    network = load(model, dtype=torch.float32)
    train = extract_features(network, train_source, options, cache, progress)
    tested = extract_features(network, test_source, options, cache, progress)
    device = single_rank(options).device
    if device.type == "cuda":
        train, tested = _moved(train, device), _moved(tested, device)
    task = FewshotTask(train, tested, train_source.num_classes, shots, seeds, l2, [])
    rows = tuple(row for method in dict.fromkeys(methods) for row in METHODS[method](task))
    return FewshotReport(
        model=model,
        data=data,
        tested_on=tested_on,
        train_images=len(train),
        test_images=len(tested),
        unreadable=len(train_source) + len(test_source) - len(train) - len(tested),
        classes=task.classes,
        most_frequent=int(torch.bincount(tested.labels).max()) / len(tested),
        rows=rows,
        notes=tuple(task.notes),
    )


def check_options(methods: Sequence[str], shots: Sequence[int], seeds: Sequence[int], l2: float) -> None:
    """What a person gave, before anything is computed."""
    for method in methods:
        if method not in METHODS:
            raise ConfigError(
                f"unknown method {method!r}{did_you_mean(method, METHODS)}; there are {', '.join(METHODS)}"
            )
    if not methods or not shots or not seeds:
        raise ConfigError("give at least one method, one number of shots and one seed")
    if wrong := [number for number in shots if number < 1]:
        raise ConfigError(f"shots = {wrong[0]}: give numbers of images of each class, from 1 on")
    if l2 <= 0:
        raise ConfigError(f"l2 = {l2:g}: give a number above 0, such as the paper's {L2:g}")


def open_train_and_test(data: str, test: str | None) -> tuple[Source, Source, str]:
    """What to learn from, what to test on, and the latter in words."""
    splits = list_splits(data)
    part = next((ours for ours, names in SPLITS.items() if test in names), None)
    if part == "train":
        raise ConfigError("--test train would test on what was learned from: give val, test or another data set")
    if test is not None and part is None:
        train, (other, told) = _training(data, splits), _other(test)
        if compute_fingerprint(train) == compute_fingerprint(other):
            raise ConfigError(f"--test {test} is what was learned from: give other data, or leave --test out")
        return train, other, told
    part = part or choose_test_split(data) or "val"
    if part in splits or part == "test":
        return _training(data, splits), open_data(data, part), f"the {part} part of {data}"
    told = f"a fifth of every class of {data}, held out"
    return open_data(data, "train", HELD_OUT), open_data(data, "val", HELD_OUT), told


def _training(data: str, splits: Sequence[str]) -> Source:
    return open_data(data, "train") if splits else open_data(data)


def _other(test: str) -> tuple[Source, str]:
    part = choose_test_split(test) or ("train" if "train" in list_splits(test) else None)
    return open_data(test, part), test if part is None else f"the {part} part of {test}"


def check_sources(data: str, train: Source, test: Source) -> None:
    """Whether the one can be learned from and the other tested on."""
    if train.num_classes < 2:
        raise DataError(f"{data} has {train.num_classes} class: give data with two or more")
    if not len(test):
        raise DataError(f"{data} leaves no images to test on: a class needs two or more, or give --test DATA")
    if train.classes != test.classes or test.num_classes > train.num_classes:
        raise DataError(f"the classes of the test images are not those to learn from: {_unlike(train, test)}")


def _unlike(train: Source, test: Source) -> str:
    for one, other, told in ((test, train, "only in the test images"), (train, test, "not in the test images")):
        if only := sorted(set(one.classes) - set(other.classes)):
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            return f"{only[0]!r}{more} {'is' if not more else 'are'} {told}"
    if train.classes and test.classes:
        return "they are in another order"
    return f"{train.num_classes} there, {test.num_classes} here, and not all have names"


def _moved(features: Features, device: torch.device) -> Features:
    return replace(features, values=features.values.to(device), labels=features.labels.to(device))


@dataclass(frozen=True)
class SimilarImage:
    """A neighbour."""

    name: str
    label: str
    similarity: float


def find_similar_images(
    model: str,
    data: str,
    image: str,
    number: int = SHOWN,
    options: InferenceOptions | None = None,
    cache: Cache = "auto",
    progress: Progress | None = None,
) -> list[SimilarImage]:
    """The images of the data (of its training part, where it has parts) that are most similar to one, nearest first."""
    options = options or InferenceOptions()
    network: ImageModel = load(model, dtype=torch.float32)
    try:
        prepare(image, network.preprocessing)
    except DataError as error:
        raise DataError(f"{image}: {error}") from None
    source = _training(data, list_splits(data))
    query = extract_features(network, ListSource([(image, 0)]), options, cache=None)
    bank = extract_features(network, source, options, cache, progress)
    similarities, places = find_nearest(query.values, bank.values, number)
    return [
        SimilarImage(
            source.display_name(int(bank.indices[place])),
            source.classes[bank.labels[place]] if source.classes else str(int(bank.labels[place])),
            similarity,
        )
        for similarity, place in zip(similarities[0].tolist(), places[0].tolist(), strict=True)
    ]
