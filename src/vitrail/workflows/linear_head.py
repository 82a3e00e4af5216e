"""Fit a linear head to the frozen features of a model, in seconds: logistic regression, nothing else is trained.

Cross-validation predicts every image with a classifier that was fitted without it. So all images are used, the accuracy
is honest, and an image whose prediction is confident of another class than its label may be mislabelled.
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
from vitrail.evaluation.linear_classifier import LinearClassifier
from vitrail.evaluation.linear_probe import STRENGTHS, OutOfFoldPredictions, cross_validate, fit_probe
from vitrail.inference.batches import InferenceOptions, open_model, run_batches
from vitrail.system.events import Progress
from vitrail.model.base import ImageModel
from vitrail.model.heads import DistilledHead
from vitrail.system.files import short_name, write_whole
from vitrail.system.intervals import wilson_interval
from vitrail.system.ranks import require_one_process
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.workflows.finetune import summarise_data

ALLOWED = ("folder", "run.folder", "image_size", "model.image_size")
"""Keys that `overrides` may set; the other keys of a training run have no meaning here."""
MODEL_FOLDER, MISLABELLED_FILE = "model", "mislabelled.csv"
DEFAULT_STRENGTH = STRENGTHS[len(STRENGTHS) // 3]
"""The strength if every class has one image, so that cross-validation cannot choose one."""
TRUSTED_ACCURACY = 0.8
"""Accuracy above which a suspicion is roughly more often right than wrong."""
MOST_LISTED = 20
"""Largest number of suspects that are printed; the file has all."""
CHECKED_IMAGES = 8
"""Number of images on which the saved model is checked."""
SAVED_TOLERANCE, FITTED_TOLERANCE = 1e-6, 1e-3
"""Tolerated differences, as a share of the largest logit: of the loaded from the saved model, and of the head in single
precision from the fitted classifier."""
FEW = 1000
"""Number of images below which starting reader processes takes longer than reading."""


def fit_linear_head(
    data: str,
    model: str,
    overrides: Sequence[str] = (),
    options: InferenceOptions | None = None,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Fit and save a classifier; yield lines to print. The model goes to runs/quick-DATA-from-MODEL/model.

    Args:
        data: DATA, with at least two classes.
        model: MODEL whose features are used as they are.
        overrides: `folder=…` and `image_size=…`.
    """
    require_one_process("--quick")
    config = resolve_options(data, model, overrides)
    folder = config.run.folder
    check_folder(folder)
    summary = summarise_data(data)
    network: ImageModel = load(model, image_size=config.model.image_size, dtype=torch.float32)
    splits = list_splits(data)
    source = open_data(data, "train") if splits else open_data(data)
    # In full precision, as the model will be used.
    options = replace(options or InferenceOptions(workers=0 if summary.images < FEW else 2), precision="fp32")
    train = extract_features(network, source, options, progress=progress)
    check_classes(data, source, train)
    yield (
        f"{len(train):,} images of {summary.classes} classes at {show_size(network.image_size)} pixels: "
        f"{train.values.shape[1]} features each, from {model}"
    )
    if unreadable := len(source) - len(train):
        counts = f"{unreadable:,} of {len(source):,} images"
        yield f"left out, for they cannot be read: {counts}; `vitrail data check` names them"
    strength, accuracy = DEFAULT_STRENGTH, 1.0
    suspects: list[Suspect] = []
    if bool((torch.bincount(train.labels) > 1).any()):
        predictions = cross_validate(train.values, train.labels, summary.classes)
        strength, suspects = predictions.strength, find_suspects(predictions, train.labels, summary.classes)
        is_right = predictions.guesses[predictions.known] == train.labels[predictions.known]
        accuracy = float(is_right.double().mean())
        yield f"accuracy on images that it was fitted without: {format_accuracy(is_right)}"
    else:
        yield "every class has one image: how good it is cannot be told"
    classifier = fit_probe(train.values, train.labels, summary.classes, strength)
    for part in [name for name in ("val", "test") if name in splits]:
        try:
            yield score_split(part, open_data(data, part), source, network, classifier, options, progress)
        except DataError as error:
            yield f"{part} is not scored: {error}"
    set_head(network, classifier, source.classes)
    check_head(network, classifier, train, source, options)
    save_and_verify(network, folder, train, source, options, model)
    write_suspects(folder / MISLABELLED_FILE, suspects, source, train)
    yield from describe_suspects(suspects, source, train, folder / MISLABELLED_FILE, accuracy)
    yield f"model: {folder / MODEL_FOLDER}"
    yield (
        f'next: in Python, model = vitrail.load("{folder}"); or train all of it, which takes longer and may be better: '
        f"vitrail finetune --data {shlex.quote(data)} --from {shlex.quote(model)}"
    )


def resolve_options(data: str, model: str, overrides: Sequence[str]) -> RunConfig:
    """Return folder and image size as the configuration of a training run."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and key not in ALLOWED:
            hint = did_you_mean(key, ALLOWED) or ": folder=… and image_size=… can be given"
            raise ConfigError(f"--quick trains nothing, so {key!r} means nothing to it{hint}; or leave --quick out")
    name = f"quick-{short_name(data)}-from-{short_name(model)}"
    tree = {"data": {"source": data}, "model": {"weights": model}, "schedule": {"steps": 1}}
    return resolve({**tree, "run": {"folder": f"runs/{name}"}}, overrides)


def check_folder(folder: Path) -> None:
    """Raise a ConfigError if the folder holds other files, or a model that was trained."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give another folder=…")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name not in (MODEL_FOLDER, MISLABELLED_FILE) and not name.startswith(".")]
    if MODEL_FOLDER in names and MISLABELLED_FILE not in names:
        others = [MODEL_FOLDER]
    if others:
        raise ConfigError(f"{folder} holds {others[0]}, which --quick did not write: give a new folder=…")


def check_classes(data: str, source: Source, train: Features) -> None:
    """Raise a DataError if no image of a class can be read."""
    counts = torch.bincount(train.labels, minlength=source.num_classes)
    if int(counts.min()) == 0:
        missing = int(counts.argmin())
        name = repr(source.classes[missing]) if source.classes else f"class {missing}"
        raise DataError(f"{data} has no image of {name} that can be read: `vitrail data check` tells what is wrong")


def format_accuracy(is_right: Tensor) -> str:
    """Return the accuracy of (N,) hits, with its 95% interval, as text."""
    hits, count = int(is_right.sum()), len(is_right)
    low, high = wilson_interval(hits, count)
    return f"{hits / count:.1%} of {count:,} (95% interval {low:.1%} to {high:.1%})"


def score_split(
    part: str,
    other: Source,
    source: Source,
    network: ImageModel,
    classifier: LinearClassifier,
    options: InferenceOptions,
    progress: Progress | None,
) -> str:
    """Return a line with the accuracy on another split of the data."""
    if other.classes != source.classes or other.num_classes > source.num_classes:
        return f"{part}: not scored, for its classes are not those of train; `vitrail data check` tells how they differ"
    features = extract_features(network, other, options, progress=progress)
    return f"{part} accuracy: {format_accuracy(classifier.predict(features.values) == features.labels)}"


class Suspect(NamedTuple):
    """An image whose label may be wrong."""

    row: int
    """Its row among the features."""
    thinks: int
    """The class that is predicted."""
    probability: float
    """Probability of that class."""


def find_suspects(predictions: OutOfFoldPredictions, labels: Tensor, num_classes: int) -> list[Suspect]:
    """Return the images whose prediction contradicts their label, the most confident first.

    As in confident learning (arXiv 1911.00068), the threshold of a class is the mean probability of that class over the
    images labelled with it. A suspect is below the threshold of its own class, and at or above the threshold of another
    class, which is the most probable. So a class that is hard to recognise is not suspected as a whole.
    """
    sums = predictions.label_probability.new_zeros(num_classes).scatter_add_(
        0, labels[predictions.known], predictions.label_probability[predictions.known]
    )
    threshold = sums / torch.bincount(labels[predictions.known], minlength=num_classes).clamp(min=1)
    differs = predictions.known & (predictions.guesses != labels) & (predictions.label_probability < threshold[labels])
    is_suspect = differs & (predictions.confidence >= threshold[predictions.guesses])
    suspects = [
        Suspect(row, int(predictions.guesses[row]), float(predictions.confidence[row]))
        for row in is_suspect.nonzero().flatten().tolist()
    ]
    return sorted(suspects, key=lambda suspect: -suspect.probability)


def set_head(network: ImageModel, classifier: LinearClassifier, classes: Sequence[str]) -> None:
    """Copy the fitted classifier into the model's head."""
    network.replace_head(len(classifier.bias), classes or None)
    head = network.head
    with torch.no_grad():
        if isinstance(head, DistilledHead):
            # The logits are the mean of two layers, each on its half of the features.
            for half, weight in zip((head.linear, head.distilled), classifier.weight.chunk(2, dim=1), strict=True):
                half.weight.copy_(2 * weight)
                half.bias.copy_(classifier.bias)
            return
        layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        if not layers or layers[-1].weight.numel() != classifier.weight.numel() or layers[-1].bias is None:
            raise ConfigError("this model's head is not a linear layer on its representation: leave --quick out")
        layers[-1].weight.copy_(classifier.weight.view_as(layers[-1].weight))
        layers[-1].bias.copy_(classifier.bias)


def check_head(
    network: ImageModel, classifier: LinearClassifier, train: Features, source: Source, options: InferenceOptions
) -> None:
    """Raise a ConfigError if the model's logits are not the classifier's: a foreign head may do more than a product."""
    logits = compute_logits(network, train, source, options)
    expected = classifier.scores(train.values[: len(logits)]).to(logits)
    if not _is_near(logits, expected, FITTED_TOLERANCE):
        raise ConfigError("this model's head changes its representation before the last layer: leave --quick out")


def save_and_verify(
    network: ImageModel, folder: Path, train: Features, source: Source, options: InferenceOptions, model: str
) -> None:
    """Save the model and check that the loaded model computes the same."""
    notes = f"A head fitted by logistic regression to {len(train):,} images; the rest is as it was in {model}."
    network.learned_from = compute_fingerprint(source)
    before = compute_logits(network, train, source, options)
    saved = save(network, folder / MODEL_FOLDER, notes=notes)
    if not _is_near(compute_logits(load(saved), train, source, options), before, SAVED_TOLERANCE):
        raise WeightsError(f"{saved} computes something else after loading than before saving: please report this")


def compute_logits(network: ImageModel, train: Features, source: Source, options: InferenceOptions) -> Tensor:
    """Return the model's logits for the first readable images."""
    subset = Subset(source, train.indices[:CHECKED_IMAGES].numpy())
    options = InferenceOptions(len(subset), 0, options.device, "fp32")
    batches = run_batches(open_model(network, options), subset, options)
    return torch.cat([output.logits.cpu() for _, output in batches if output.logits is not None])


def _is_near(one: Tensor, other: Tensor, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= share * (1 + other.abs().max()))


def write_suspects(path: Path, suspects: Sequence[Suspect], source: Source, train: Features) -> None:
    """Write all suspects as CSV; only the heading if there are none."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("name", "label", "thinks", "probability"))
    for suspect in suspects:
        name, label = name_image_and_label(suspect, source, train)
        table.writerow((name, label, name_class(source, suspect.thinks), f"{suspect.probability:.4f}"))
    write_whole(path, text.getvalue().encode("utf-8"))


def describe_suspects(
    suspects: Sequence[Suspect], source: Source, train: Features, path: Path, accuracy: float
) -> Iterator[str]:
    """Yield a line for each of the most confident suspects, then their number."""
    for suspect in suspects[:MOST_LISTED]:
        name, label = name_image_and_label(suspect, source, train)
        prediction = f"looks like {name_class(source, suspect.thinks)} ({suspect.probability:.0%})"
        yield f"perhaps mislabelled: {name} is labelled {label}, {prediction}"
    if suspects:
        yield f"perhaps mislabelled, in all: {len(suspects):,} of {len(train):,} images, see {path}"
        if accuracy < TRUSTED_ACCURACY:
            yield f"with {accuracy:.0%} right, most of these will be its own mistakes: a better model doubts fewer"
    else:
        yield "no image seems to be mislabelled"


def name_image_and_label(suspect: Suspect, source: Source, train: Features) -> tuple[str, str]:
    """Return the name of the image and the name of its label."""
    return source.display_name(int(train.indices[suspect.row])), name_class(source, int(train.labels[suspect.row]))


def name_class(source: Source, label: int) -> str:
    """Return the name of a class, or its number if classes have no names."""
    return source.classes[label] if source.classes else str(label)
