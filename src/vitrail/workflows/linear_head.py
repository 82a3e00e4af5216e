"""A classifier in seconds: logistic regression on what a trained model makes of the images; nothing else is trained.

Every image is also judged by a classifier that was fitted without it. So all images are used and the accuracy is still
an honest one; and where such a classifier is sure of another class than the label says, the label may be wrong.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.config import show_size
from vitrail.data.open import list_splits, open_data
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.errors import ConfigError, DataError, WeightsError, did_you_mean
from vitrail.evaluation.features import Features, extract_features
from vitrail.evaluation.intervals import wilson_interval
from vitrail.evaluation.linear_classifier import LinearClassifier
from vitrail.evaluation.linear_probe import STRENGTHS, OutOfFoldPredictions, cross_validate, fit_probe
from vitrail.inference.batches import InferenceOptions, Progress, run_batches
from vitrail.model.base import ImageModel
from vitrail.model.heads import DistilledHead
from vitrail.system.files import short_name, write_whole
from vitrail.system.ranks import require_one_process
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.workflows.finetune import summarise_data

ALLOWED = ("folder", "run.folder", "image_size", "model.image_size")
"""What can be given: nothing is trained, so nothing else of a training run means anything."""
MODEL, MISLABELLED = "model", "mislabelled.csv"
UNGUIDED = STRENGTHS[len(STRENGTHS) // 3]
"""The strength where every class has one image, so that nothing can tell which is best."""
BELIEVED = 0.8
"""Accuracy from which its doubts are more often right than wrong, roughly."""
SHOWN = 20
"""Images that are named as perhaps mislabelled; the file has all."""
CHECKED = 8
"""Images on which the saved model is run again."""
SAME, FITTED = 1e-6, 1e-3
"""Of the largest logit: by how much a loaded model may differ from the one that was saved, and its head, in single
precision, from what was fitted."""
FEW = 1000
"""Images below which starting processes to read them takes longer than reading."""


def fit_linear_head(
    data: str,
    model: str,
    overrides: Sequence[str] = (),
    options: InferenceOptions | None = None,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Lines to print, as they come. The model goes to runs/quick-DATA-from-MODEL/model."""
    require_one_process("--quick")
    config = resolve_options(data, model, overrides)
    folder = config.run.folder
    check_folder(folder)
    look = summarise_data(data)
    network: ImageModel = load(model, image_size=config.model.image_size, dtype=torch.float32)
    splits = list_splits(data)
    source = open_data(data, "train") if splits else open_data(data)
    # In full precision, for that is how the model will be used.
    options = replace(options or InferenceOptions(workers=0 if look.images < FEW else 2), precision="fp32")
    train = extract_features(network, source, options, progress=progress)
    check_classes(data, source, train)
    yield (
        f"{len(train):,} images of {look.classes} classes at {show_size(network.image_size)} pixels: "
        f"{train.values.shape[1]} features each, from {model}"
    )
    if unreadable := len(source) - len(train):
        told = f"{unreadable:,} of {len(source):,} images"
        yield f"left out, for they cannot be read: {told}; `vitrail data check` names them"
    strength, accuracy = UNGUIDED, 1.0
    suspected: list[Suspect] = []
    if bool((torch.bincount(train.labels) > 1).any()):
        judged = cross_validate(train.values, train.labels, look.classes)
        strength, suspected = judged.strength, find_suspects(judged, train.labels, look.classes)
        right = judged.guesses[judged.known] == train.labels[judged.known]
        accuracy = float(right.double().mean())
        yield f"accuracy on images that it was fitted without: {format_accuracy(right)}"
    else:
        yield "every class has one image: how good it is cannot be told"
    linear = fit_probe(train.values, train.labels, look.classes, strength)
    for part in [name for name in ("val", "test") if name in splits]:
        try:
            yield scored(part, open_data(data, part), source, network, linear, options, progress)
        except DataError as error:
            yield f"{part} is not scored: {error}"
    set_head(network, linear, source.classes)
    check_head(network, linear, train, source, options)
    save_and_verify(network, folder, train, source, options, model)
    write_suspects(folder / MISLABELLED, suspected, source, train)
    yield from describe_suspects(suspected, source, train, folder / MISLABELLED, accuracy)
    yield f"model: {folder / MODEL}"
    yield (
        f'next: in Python, model = vitrail.load("{folder}"); or train all of it, which takes longer and may be better: '
        f"vitrail finetune --data {shlex.quote(data)} --from {shlex.quote(model)}"
    )


def resolve_options(data: str, model: str, overrides: Sequence[str]) -> RunConfig:
    """The folder and the image size, in the words of a training run."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and key not in ALLOWED:
            hint = did_you_mean(key, ALLOWED) or ": folder=… and image_size=… can be given"
            raise ConfigError(f"--quick trains nothing, so {key!r} means nothing to it{hint}; or leave --quick out")
    name = f"quick-{short_name(data)}-from-{short_name(model)}"
    tree = {"data": {"source": data}, "model": {"weights": model}, "schedule": {"steps": 1}}
    return resolve({**tree, "run": {"folder": f"runs/{name}"}}, overrides)


def check_folder(folder: Path) -> None:
    """Nothing is written among other files, and no trained model is replaced by this one."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give another folder=…")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in found if name not in (MODEL, MISLABELLED) and not name.startswith(".")]
    if MODEL in found and MISLABELLED not in found:
        others = [MODEL]
    if others:
        raise ConfigError(f"{folder} holds {others[0]}, which is not by --quick: give a new folder=…")


def check_classes(data: str, source: Source, train: Features) -> None:
    """A class of which nothing can be read cannot be learned."""
    counts = torch.bincount(train.labels, minlength=source.num_classes)
    if int(counts.min()) == 0:
        missing = int(counts.argmin())
        name_class = repr(source.classes[missing]) if source.classes else f"class {missing}"
        raise DataError(f"{data} has no image of {name_class} that can be read: `vitrail data check` tells what is wrong")


def format_accuracy(right: Tensor) -> str:
    """Of (N,) hits, with what it could be by chance."""
    hits, count = int(right.sum()), len(right)
    low, high = wilson_interval(hits, count)
    return f"{hits / count:.1%} of {count:,} (95% interval {low:.1%} to {high:.1%})"


def scored(
    part: str, other: Source, source: Source, network: ImageModel, linear: LinearClassifier, options: InferenceOptions, progress: Progress | None
) -> str:
    """On a part of the data that was set aside."""
    if other.classes != source.classes or other.num_classes > source.num_classes:
        return f"{part}: not scored, for its classes are not those of train; `vitrail data check` tells how they differ"
    features = extract_features(network, other, options, progress=progress)
    return f"{part} accuracy: {format_accuracy(linear.predict(features.values) == features.labels)}"


class Suspect(NamedTuple):
    """An image whose label may be wrong."""

    row: int
    """Its place among the features."""
    thinks: int
    """The class that it looks like."""
    probability: float
    """Of that class."""


def find_suspects(judged: OutOfFoldPredictions, labels: Tensor, num_classes: int) -> list[Suspect]:
    """Images that look like another class than their label says, the surest first.

    As in confident learning (arXiv 1911.00068): a class's threshold is the mean probability that its own images have of
    it. An image is suspected whose own class falls below its threshold while another is most probable and reaches its.
    So a class that is hard to tell is not suspected as a whole.
    """
    sums = judged.label_probability.new_zeros(num_classes).scatter_add_(0, labels[judged.known], judged.label_probability[judged.known])
    threshold = sums / torch.bincount(labels[judged.known], minlength=num_classes).clamp(min=1)
    unlike = judged.known & (judged.guesses != labels) & (judged.label_probability < threshold[labels])
    sure = unlike & (judged.confidence >= threshold[judged.guesses])
    found = [
        Suspect(row, int(judged.guesses[row]), float(judged.confidence[row]))
        for row in sure.nonzero().flatten().tolist()
    ]
    return sorted(found, key=lambda suspect: -suspect.probability)


def set_head(network: ImageModel, linear: LinearClassifier, classes: Sequence[str]) -> None:
    """What was fitted becomes the model's head."""
    network.replace_head(len(linear.bias), classes or None)
    head = network.head
    with torch.no_grad():
        if isinstance(head, DistilledHead):
            # The logits are the mean of two halves, each with its part of the features.
            for half, weight in zip((head.linear, head.distilled), linear.weight.chunk(2, dim=1), strict=True):
                half.weight.copy_(2 * weight)
                half.bias.copy_(linear.bias)
            return
        layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        if not layers or layers[-1].weight.numel() != linear.weight.numel() or layers[-1].bias is None:
            raise ConfigError("this model's head is no linear layer on its representation: leave --quick out")
        layers[-1].weight.copy_(linear.weight.view_as(layers[-1].weight))
        layers[-1].bias.copy_(linear.bias)


def check_head(network: ImageModel, linear: LinearClassifier, train: Features, source: Source, options: InferenceOptions) -> None:
    """The model must say what was fitted: a head of another library may do more than it seems to."""
    found = compute_logits(network, train, source, options)
    fitted = linear.scores(train.values[: len(found)]).to(found)
    if not _is_near(found, fitted, FITTED):
        raise ConfigError("this model's head does not take its representation as it is: leave --quick out")


def save_and_verify(network: ImageModel, folder: Path, train: Features, source: Source, options: InferenceOptions, model: str) -> None:
    """Save the model, load it again, and see that it says the same."""
    notes = f"A head fitted by logistic regression to {len(train):,} images; the rest is as it was in {model}."
    network.learned_from = compute_fingerprint(source)
    before = compute_logits(network, train, source, options)
    saved = save(network, folder / MODEL, notes=notes)
    if not _is_near(compute_logits(load(saved), train, source, options), before, SAME):
        raise WeightsError(f"{saved} was saved, and when loaded again says something else: please report this")


def compute_logits(network: ImageModel, train: Features, source: Source, options: InferenceOptions) -> Tensor:
    """What a model says about the first of the images that can be read."""
    some = Subset(source, train.indices[:CHECKED].numpy())
    options = InferenceOptions(len(some), 0, options.device, "fp32")
    return torch.cat([computed.cpu() for _, computed in run_batches(network, some, network, options)])


def _is_near(one: Tensor, other: Tensor, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= share * (1 + other.abs().max()))


def write_suspects(path: Path, found: Sequence[Suspect], source: Source, train: Features) -> None:
    """All of them, as a table for any program; an empty one where there are none."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("name", "label", "thinks", "probability"))
    for suspect in found:
        name, label = name_image_and_label(suspect, source, train)
        table.writerow((name, label, name_class(source, suspect.thinks), f"{suspect.probability:.4f}"))
    write_whole(path, text.getvalue().encode("utf-8"))


def describe_suspects(
    found: Sequence[Suspect], source: Source, train: Features, path: Path, accuracy: float
) -> Iterator[str]:
    """The surest of them, a line each."""
    for suspect in found[:SHOWN]:
        name, label = name_image_and_label(suspect, source, train)
        likeness = f"looks like {name_class(source, suspect.thinks)} ({suspect.probability:.0%})"
        yield f"perhaps mislabelled: {name} is labelled {label}, {likeness}"
    if found:
        yield f"perhaps mislabelled, in all: {len(found):,} of {len(train):,} images, see {path}"
        if accuracy < BELIEVED:
            yield f"with {accuracy:.0%} right, most of these will be its own mistakes: a better model doubts fewer"
    else:
        yield "no image seems to be mislabelled"


def name_image_and_label(suspect: Suspect, source: Source, train: Features) -> tuple[str, str]:
    """An image's name and the name of its label."""
    return source.display_name(int(train.indices[suspect.row])), name_class(source, int(train.labels[suspect.row]))


def name_class(source: Source, label: int) -> str:
    """A class's name, or its number."""
    return source.classes[label] if source.classes else str(label)
