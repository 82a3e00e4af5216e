"""Fit a linear head to the frozen features of a model, in seconds: logistic regression, nothing else is trained.

Cross-validation predicts every image with a classifier that was fitted without it. So all images are used, the accuracy
is honest, and an image whose prediction is confident of another class than its label may be mislabelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.open import Data, list_splits, name_data, open_data, open_training_images
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.errors import ConfigError, DataError, WeightsError, did_you_mean
from vitrail.evaluation.features import Features, extract_features
from vitrail.evaluation.linear_classifier import LinearClassifier
from vitrail.evaluation.linear_probe import STRENGTHS, cross_validate, fit_probe
from vitrail.inference.batches import InferenceOptions, open_model, run_batches
from vitrail.inference.engine import Model
from vitrail.model.base import ImageModel
from vitrail.model.heads import DistilledHead
from vitrail.system.events import OnEvent, Progress, open_listener, send_progress
from vitrail.system.files import short_name
from vitrail.system.intervals import Estimate, estimate_share
from vitrail.system.ranks import require_one_process
from vitrail.system.results import to_plain
from vitrail.training.config import RunConfig
from vitrail.training.resolve import Settings, name_settings, resolve
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.workflows.finetune_result import MISLABELLED_FILE, FinetuneResult
from vitrail.workflows.finetune_settings import summarise_data
from vitrail.workflows.start_model import name_model, open_start
from vitrail.workflows.suspects import SuspectRow, find_suspects, name_suspects, write_suspects

ALLOWED = ("folder", "run.folder", "image_size", "model.image_size")
"""Keys that may be set; the other keys of a training run have no meaning here."""
MODEL_FOLDER = "model"
DEFAULT_STRENGTH = STRENGTHS[len(STRENGTHS) // 3]
"""The strength if every class has one image, so that cross-validation cannot choose one."""
CHECKED_IMAGES = 8
"""Number of images on which the saved model is checked."""
SAVED_TOLERANCE, FITTED_TOLERANCE = 1e-6, 1e-3
"""Tolerated differences, as a share of the largest logit: of the loaded from the saved model, and of the head in single
precision from the fitted classifier."""
FEW = 1000
"""Number of images below which starting reader processes takes longer than reading."""


def fit_linear_head(
    data: Data,
    model: Model,
    *,
    folder: str | Path | None = None,
    settings: Settings | None = None,
    options: InferenceOptions | None = None,
    on_event: OnEvent | None = None,
) -> FinetuneResult:
    """Fit and save a classifier: `finetune` with `quick`.

    Args:
        data: DATA, a Source or a list of (image, label) pairs, with at least two classes.
        model: MODEL or a loaded model, whose features are used as they are.
        folder: where the classifier goes; by default runs/quick-DATA-from-MODEL.
        settings: `image_size` and `folder`, as a dictionary or `key=value` texts.
        options: where the features are computed; always in full precision, as the model will be used.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        features: model, images, all_images (those that cannot be read too), classes, image_size, features (of each).
        cross_validation: accuracy (value, low, high; None if every class has one image), images.
        score: split, accuracy, images, problem: the accuracy on val or test, or None and why.
        progress: passes over images.
    """
    require_one_process("quick")
    start, data_name = model if isinstance(model, ImageModel) else str(model), name_data(data)
    config = resolve_options(data_name, name_model(start), folder, settings if settings is not None else ())
    folder = config.run.folder
    check_folder(folder)
    summary = summarise_data(data)
    network = open_start(start, config.model.image_size)
    source = open_training_images(data)
    options = replace(options or InferenceOptions(workers=0 if summary.images < FEW else 2), precision="fp32")
    with open_listener(on_event) as listener:
        progress = send_progress(listener, "features")
        train = extract_features(network, source, options, progress=progress)
        check_classes(data_name, source, train)
        listener("features", _describe_features(network, name_model(start), source, train))
        checked = check_by_cross_validation(train, summary.classes)
        listener("cross_validation", {"accuracy": to_plain(checked.accuracy), "images": checked.images})
        classifier = fit_probe(train.values, train.labels, summary.classes, checked.strength)
        scores: dict[str, Estimate] = {}
        for split in [name for name in ("val", "test") if name in list_splits(data)]:
            score = score_split(split, data, source, network, classifier, options, progress)
            listener("score", to_plain(score))
            if score.accuracy is not None:
                scores[split] = score.accuracy
        set_head(network, classifier, source.classes)
        check_head(network, classifier, train, source, options)
        saved = save_and_verify(network, folder, train, source, options, name_model(start))
        suspects = name_suspects(checked.suspects, source, train)
        write_suspects(folder / MISLABELLED_FILE, suspects)
    return FinetuneResult(
        model=network.cpu(),
        folder=folder,
        weights=saved,
        config=None,
        accuracy=checked.accuracy,
        evaluated=checked.images,
        scores=scores,
        suspects=suspects,
    )


def _describe_features(network: ImageModel, name: str, source: Source, train: Features) -> dict[str, Any]:
    """Return the values of a `features` event."""
    return {
        "model": name,
        "images": len(train),
        "all_images": len(source),
        "classes": source.num_classes,
        "image_size": list(network.image_size),
        "features": train.values.shape[1],
    }


def resolve_options(data: str, model: str, folder: str | Path | None, settings: Settings) -> RunConfig:
    """Return folder and image size as the configuration of a training run."""
    for key in sorted(name_settings(settings)):
        if key not in ALLOWED:
            hint = did_you_mean(key, ALLOWED) or ": folder=… and image_size=… can be given"
            raise ConfigError(f"quick trains nothing, so {key!r} means nothing to it{hint}; or leave --quick out")
        if folder is not None and key.endswith("folder"):
            raise ConfigError("the folder was given twice: leave out run.folder, or the argument folder")
    place = str(folder) if folder is not None else f"runs/quick-{short_name(data)}-from-{short_name(model)}"
    tree = {"data": {"source": data}, "model": {"weights": model}, "schedule": {"steps": 1}}
    return resolve({**tree, "run": {"folder": place}}, settings)


class CrossValidation(NamedTuple):
    """What predictions say about images that they were fitted without."""

    accuracy: Estimate | None
    images: int
    strength: float
    """The best strength of the regularisation."""
    suspects: list[SuspectRow]


def check_by_cross_validation(train: Features, classes: int) -> CrossValidation:
    """Predict every image without it. If every class has one image, there is nothing to learn from."""
    if not bool((torch.bincount(train.labels) > 1).any()):
        return CrossValidation(None, 0, DEFAULT_STRENGTH, [])
    predictions = cross_validate(train.values, train.labels, classes)
    is_right = predictions.guesses[predictions.known] == train.labels[predictions.known]
    suspects = find_suspects(predictions, train.labels, classes)
    accuracy = estimate_share(int(is_right.sum()), len(is_right))
    return CrossValidation(accuracy, len(is_right), predictions.strength, suspects)


def check_folder(folder: Path) -> None:
    """Raise a ConfigError if the folder holds other files, or a model that was trained."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give another folder=…")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name not in (MODEL_FOLDER, MISLABELLED_FILE) and not name.startswith(".")]
    if MODEL_FOLDER in names and MISLABELLED_FILE not in names:
        others = [MODEL_FOLDER]
    if others:
        raise ConfigError(f"{folder} holds {others[0]}, which quick (--quick) did not write: give a new folder=…")


def check_classes(data: str, source: Source, train: Features) -> None:
    """Raise a DataError if no image of a class can be read."""
    counts = torch.bincount(train.labels, minlength=source.num_classes)
    if int(counts.min()) == 0:
        missing = int(counts.argmin())
        name = repr(source.classes[missing]) if source.classes else f"class {missing}"
        raise DataError(f"{data} has no image of {name} that can be read: `vitrail data check` tells what is wrong")


class SplitScore(NamedTuple):
    """The accuracy on another split of the data."""

    split: str
    accuracy: Estimate | None
    images: int
    problem: str = ""
    """Why there is no accuracy; empty if there is one."""


def score_split(
    split: str,
    data: Data,
    source: Source,
    network: ImageModel,
    classifier: LinearClassifier,
    options: InferenceOptions,
    progress: Progress,
) -> SplitScore:
    """Measure on another split of the data. A split that cannot be used is no reason to lose the model."""
    try:
        other = open_data(data, split)
        if other.classes != source.classes or other.num_classes > source.num_classes:
            raise DataError("its classes are not those of train; `vitrail data check` tells how they differ")
        features = extract_features(network, other, options, progress=progress)
    except DataError as error:
        return SplitScore(split, None, 0, str(error))
    hits = int((classifier.predict(features.values) == features.labels).sum())
    return SplitScore(split, estimate_share(hits, len(features)), len(features))


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
) -> Path:
    """Save the model, check that the loaded model computes the same, and return the folder of the weights."""
    notes = f"A head fitted by logistic regression to {len(train):,} images; the rest is as it was in {model}."
    network.learned_from = compute_fingerprint(source)
    before = compute_logits(network, train, source, options)
    saved = save(network, folder / MODEL_FOLDER, notes=notes)
    if not _is_near(compute_logits(load(saved), train, source, options), before, SAVED_TOLERANCE):
        raise WeightsError(f"{saved} computes something else after loading than before saving: please report this")
    return saved


def compute_logits(network: ImageModel, train: Features, source: Source, options: InferenceOptions) -> Tensor:
    """Return the model's logits for the first readable images."""
    subset = Subset(source, train.indices[:CHECKED_IMAGES].numpy())
    options = InferenceOptions(len(subset), 0, options.device, "fp32")
    batches = run_batches(open_model(network, options), subset, options)
    return torch.cat([output.logits.cpu() for _, output in batches if output.logits is not None])


def _is_near(one: Tensor, other: Tensor, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= share * (1 + other.abs().max()))
