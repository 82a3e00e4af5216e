"""Fit a linear head to the frozen features of a model, in seconds: in closed form, nothing is trained.

Cross-fitting predicts every image with a classifier that was fitted, and tuned, without it. So all images are used, the
accuracy is honest, and an image whose prediction is confident of another class than its label may be mislabelled.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrail.data.open import Data, list_splits, name_data, open_data, open_training_images
from vitrail.data.sources.source import Source, Subset, compute_fingerprint, take_share
from vitrail.errors import ConfigError, DataError, WeightsError, did_you_mean
from vitrail.evaluation.discriminant import CrossFit, Shrinkage, cross_fit, fit_discriminant
from vitrail.evaluation.features import Features, extract_features
from vitrail.evaluation.labels import match_classes
from vitrail.evaluation.linear_classifier import LinearClassifier
from vitrail.evaluation.predictions import PredictionTable
from vitrail.evaluation.report import EvaluationReport, make_report
from vitrail.inference.batches import InferenceOptions, open_model, run_batches
from vitrail.inference.engine import Engine, Model
from vitrail.inference.fastest_engine import open_fastest_engine
from vitrail.inspection.scores import DoubtfulImage, ModelScores
from vitrail.model.base import ImageModel
from vitrail.model.heads import DistilledHead
from vitrail.reliability.sets import LEAST_IMAGES
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, Progress, open_listener, send_messages, send_progress
from vitrail.system.files import hide_folders, short_name
from vitrail.system.intervals import Estimate, estimate_share
from vitrail.system.ranks import require_one_process
from vitrail.system.results import to_plain
from vitrail.training.config import RunConfig
from vitrail.training.resolve import Settings, flatten_settings, name_settings, resolve
from vitrail.training.trained_model import linear_head_cost
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.workflows.calibrate_trained import calibrate_trained
from vitrail.workflows.finetune_result import MISLABELLED_FILE, FinetuneResult
from vitrail.workflows.finetune_settings import name_run_folder, summarise_data
from vitrail.workflows.imbalance import choose_head_balance
from vitrail.workflows.quick_folder import MODEL_FOLDER, check_folder, check_same_task
from vitrail.workflows.run_report import write_report, write_scored_report
from vitrail.workflows.start_model import name_model, open_start
from vitrail.workflows.suspects import SuspectRow, find_suspects, name_suspects, write_suspects

ALLOWED = (
    *("folder", "run.folder", "image_size", "model.image_size", "report", "run.report"),
    *("share", "data.share", "share_seed", "data.share_seed"),
    *("objective.balance", "balance_strength", "objective.balance_strength"),
)
"""Keys that may be set; the other keys of a training run have no meaning here."""
"""What this writes into its folder."""
DEFAULT_SHRINKAGE = Shrinkage(10.0, 1.0)
"""The shrinkage if every class has one image, so that nothing can choose one."""
CHECKED_IMAGES = 8
"""Number of images on which the saved model is checked."""
SAVED_TOLERANCE, FITTED_TOLERANCE = 1e-6, 1e-3
"""Tolerated differences, as a share of the largest logit: of the loaded from the saved model, and of the head in single
precision from the fitted classifier."""
GPU_BATCH = 256
FEW = 500
"""Number of images below which preparing a faster precision, or reader processes, takes longer than it saves."""


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
        folder: where the classifier goes; by default runs/DATA-quick, or runs/DATA-quick-from-MODEL.
        settings: `image_size`, `folder`, `report`, `share`, `share_seed`, `objective.balance` and `balance_strength`,
            as a dictionary or `key=value` texts.
        options: where and in which precision the features are computed; by default in the fastest one that is close
            to fp32 on these images.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        features: model, images, all_images (those that cannot be read too), classes, image_size, features (of each),
            precision.
        balance: ratio, choice, share, why: where classes differ much in size: the head expects each equally often.
        cross_validation: accuracy (value, low, high; None if every class has one image), images.
        score: split, accuracy, images, problem: the accuracy on val or test, or None and why.
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: passes over images.
    """
    require_one_process("quick")
    start, data_name = model if isinstance(model, ImageModel) else str(model), name_data(data)
    config = resolve_options(data_name, name_model(start), folder, settings if settings is not None else ())
    folder = config.run.folder
    check_folder(folder)
    began = time.perf_counter()
    with open_listener(on_event) as listener:
        progress = send_progress(listener, "features")
        source = open_training_images(data)
        check_same_task(folder, source.task)
        if config.data.share is not None:
            source = take_share(source, config.data.share, config.data.share_seed)
        progress(0, len(source))
        summary = summarise_data(data)
        network = open_start(start, config.model.image_size)
        engine, options = open_feature_engine(network, source, options, listener)
        train = extract_features(engine, source, options, progress=progress)
        check_classes(data_name, source, train)
        listener(
            "features", {"precision": engine.precision, **_describe_features(network, name_model(start), source, train)}
        )
        counts, given_keys = torch.bincount(train.labels, minlength=summary.classes).tolist(), name_keys(settings)
        balance = choose_head_balance(config, given_keys, counts, source.classes, listener)
        checked = check_by_cross_fitting(train, summary.classes, balance)
        listener("cross_validation", {"accuracy": to_plain(checked.accuracy), "images": checked.images})
        classifier = fit_discriminant(train.values, train.labels, summary.classes, checked.shrinkage, balance)
        scores: dict[str, Estimate] = {}
        for split in [name for name in ("val", "test") if name in list_splits(data)]:
            score = score_split(split, data, source, engine, classifier, options, progress)
            listener("score", to_plain(score))
            if score.accuracy is not None:
                scores[split] = score.accuracy
        set_head(network, classifier, source.classes)
        check_head(network, classifier, train, source, options)
        seconds = time.perf_counter() - began
        network.training_cost = linear_head_cost(network, len(train), seconds, engine.device)
        suspects = name_suspects(checked.suspects, source, train)
        folder.mkdir(parents=True, exist_ok=True)
        write_suspects(folder / MISLABELLED_FILE, suspects)  # first: it marks the folder as one of a quick head
        notes = (
            f"A linear head fitted in closed form to {len(train):,} images; the rest is as it was in "
            f"{hide_folders(name_model(start))}."
        )
        network.learned_from = compute_fingerprint(source)
        calibrate_trained(network, _open_untouched_images(data, source), options, listener, data_name)
        saved = save_and_verify(network, folder, train, source, options, notes)
        scored, report = None, None
        if checked.predictions is not None:
            scored = _describe_scores(checked, train, source, network, short_name(data_name))
            if config.run.report:
                report = _write_report(network, folder, scored, listener)
    return FinetuneResult(
        model=network.cpu(),
        folder=folder,
        weights=saved,
        config=None,
        accuracy=checked.accuracy,
        evaluated=checked.images,
        scores=scores,
        suspects=suspects,
        judged=None if scored is None else scored.report,
        report=report,
    )


def _open_untouched_images(data: Data, source: Source) -> Source | None:
    """Return the first split, of test and val, that can calibrate: neither chooses anything here. None if there is
    none."""
    for split in [name for name in ("test", "val") if name in list_splits(data)]:
        with contextlib.suppress(DataError):
            images = open_data(data, split)
            if images.classes == source.classes and len(images) >= LEAST_IMAGES:
                return images
    return None


def open_feature_engine(
    network: ImageModel, source: Source, options: InferenceOptions | None, listener: OnEvent
) -> tuple[Engine, InferenceOptions]:
    """Open the model for a pass over the images, and return the options of this pass: those given, or good ones."""
    if options is not None:
        return open_model(network, options), options
    is_few = len(source) < FEW
    device = choose_device("auto").type
    batch = GPU_BATCH if device == "cuda" else InferenceOptions.batch_size
    options = InferenceOptions(batch_size=batch, workers=0 if is_few else choose_workers(device))
    if is_few:
        return open_model(network, options), options
    engine = open_fastest_engine(network, source, options, send_messages(listener))
    return engine, replace(options, precision=engine.precision)


def choose_workers(device: str) -> int:
    """Return the number of reader processes: half of the cores beside a GPU; none on a CPU, whose cores are busy."""
    return min(8, max((os.cpu_count() or 1) // 2, 1)) if device != "cpu" else 0


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
            hint = did_you_mean(key, ALLOWED) or ": folder=…, image_size=…, share=… and report=false can be given"
            raise ConfigError(f"quick trains nothing, so {key!r} means nothing to it{hint}; or leave --quick out")
        if folder is not None and key.endswith("folder"):
            raise ConfigError("the folder was given twice: leave out run.folder, or the argument folder")
    place = str(folder) if folder is not None else f"runs/{name_run_folder(data, model, is_quick=True)}"
    tree = {"data": {"source": data}, "model": {"weights": model}, "schedule": {"steps": 1}}
    return resolve({**tree, "run": {"folder": place}}, settings)


def name_keys(settings: Settings | None) -> set[str]:
    """Return the keys of the settings without their sections."""
    return {name.rpartition(".")[2] for name in name_settings(settings or ())}


def select_allowed(settings: Settings) -> Settings:
    """Return the settings that have a meaning for a linear head."""
    if isinstance(settings, Mapping):
        return {key: value for key, value in flatten_settings(settings) if key in ALLOWED}
    return [setting for setting in settings if setting.partition("=")[0].strip() in ALLOWED]


class CrossValidation(NamedTuple):
    """What predictions say about images that they were fitted without."""

    accuracy: Estimate | None
    images: int
    shrinkage: Shrinkage
    """The best for the final classifier."""
    suspects: list[SuspectRow]
    predictions: CrossFit | None
    """None if every class has one image."""


def check_by_cross_fitting(train: Features, classes: int, balance: float = 0.0) -> CrossValidation:
    """Predict every image without it. If every class has one image, there is nothing to learn from."""
    if not bool((torch.bincount(train.labels) > 1).any()):
        return CrossValidation(None, 0, DEFAULT_SHRINKAGE, [], None)
    predictions = cross_fit(train.values, train.labels, classes, balance=balance)
    is_right = predictions.guesses[predictions.known] == train.labels[predictions.known]
    suspects = find_suspects(predictions, train.labels, classes)
    accuracy = estimate_share(int(is_right.sum()), len(is_right))
    return CrossValidation(accuracy, len(is_right), predictions.shrinkage, suspects, predictions)


def _describe_scores(
    checked: CrossValidation, train: Features, source: Source, network: ImageModel, data_name: str
) -> ModelScores:
    """Return the cross-fitted predictions as scores for the report."""
    report = _report_predictions(checked, train, source, network, data_name)

    def name_class(label: int) -> str:
        return source.classes[label] if source.classes else str(label)

    doubtful = tuple(
        DoubtfulImage(int(train.indices[row]), name_class(int(train.labels[row])), name_class(thinks), probability)
        for row, thinks, probability in checked.suspects
    )
    remark = f"Each of {checked.images:,} images was predicted by a head that was fitted and tuned without it."
    return ModelScores(report, source, remark, doubtful)


def _report_predictions(
    checked: CrossValidation, train: Features, source: Source, network: ImageModel, data_name: str
) -> EvaluationReport:
    predictions = checked.predictions
    assert predictions is not None
    known = predictions.known
    table = PredictionTable(
        indices=train.indices[known].numpy(),
        labels=train.labels[known].numpy(),
        guesses=predictions.guesses[known].numpy(),
        confidences=predictions.confidence[known].numpy(),
        losses=-np.log(np.maximum(predictions.label_probability[known].numpy(), 1e-300)),
        right_ranks=predictions.label_rank[known].numpy(),
    )
    labels = match_classes(network.labels, network.num_classes, source.classes, source.num_classes)
    names = {"model": data_name, "data": data_name, "part": None, "left_out": 0}
    return make_report(table, source, labels, network.labels, network.num_classes, **names)


def _write_report(network: ImageModel, folder: Path, scored: ModelScores, listener: OnEvent) -> Path | None:
    """Write the report and tell it as an event."""
    name = scored.report.model
    return write_report(
        folder, lambda on_event: write_scored_report(network, name, folder, scored, on_event=on_event), listener
    )


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
    engine: Engine,
    classifier: LinearClassifier,
    options: InferenceOptions,
    progress: Progress,
) -> SplitScore:
    """Measure on another split of the data. A split that cannot be used is no reason to lose the model."""
    try:
        other = open_data(data, split)
        if other.classes != source.classes or other.num_classes > source.num_classes:
            raise DataError("its classes are not those of train; `vitrail data check` tells how they differ")
        features = extract_features(engine, other, options, progress=progress)
    except DataError as error:
        return SplitScore(split, None, 0, str(error))
    hits = int((classifier.predict(features.values) == features.labels).sum())
    return SplitScore(split, estimate_share(hits, len(features)), len(features))


def set_head(network: ImageModel, classifier: LinearClassifier, classes: Sequence[str]) -> None:
    """Copy the fitted classifier into the model's head."""
    network.replace_head(len(classifier.bias), classes or None)
    fill_head(network, classifier)


def fill_head(network: ImageModel, classifier: LinearClassifier) -> None:
    """Copy fitted weights and biases into a new head with as many outputs."""
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
    logits, features = compute_outputs(network, train, source, options)
    if not _is_near(logits, classifier.scores(features).to(logits), FITTED_TOLERANCE):
        raise ConfigError("this model's head changes its representation before the last layer: leave --quick out")


def save_and_verify(
    network: ImageModel, folder: Path, train: Features, source: Source, options: InferenceOptions, notes: str
) -> Path:
    """Save the model, check that the loaded model computes the same, and return the folder of the weights.

    `notes` are for the model card, and `source` and its features `train` for the check.
    """
    before, _ = compute_outputs(network, train, source, options)
    saved = save(network, folder / MODEL_FOLDER, notes=notes)
    after, _ = compute_outputs(load(saved), train, source, options)
    if not _is_near(after, before, SAVED_TOLERANCE):
        raise WeightsError(f"{saved} computes something else after loading than before saving: please report this")
    return saved


def compute_outputs(
    network: ImageModel, train: Features, source: Source, options: InferenceOptions
) -> tuple[Tensor, Tensor]:
    """Return the model's logits and features of the first readable images, in fp32 and from two passes."""
    subset = Subset(source, train.indices[:CHECKED_IMAGES].numpy())
    options = InferenceOptions(len(subset), 0, options.device, "fp32")
    engine = open_model(network, options)
    logits = [output.logits for _, output in run_batches(engine, subset, options)]
    features = extract_features(engine, subset, options, cache=None).values
    return torch.cat([part.cpu() for part in logits if part is not None]), features


def _is_near(one: Tensor, other: Tensor, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= share * (1 + other.abs().max()))
