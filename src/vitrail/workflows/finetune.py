"""Make a classifier for some images from a model that has seen others, as the paper does for transfer.

The head is new and starts at zero, the resolution is higher than in pre-training, and SGD follows a cosine schedule. A
sweep chooses the learning rate on a held-out part and then trains again on all the training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitrail.data.open import Data, add_labels_from, name_data, open_data
from vitrail.data.sources.flat_folder import FlatFolder
from vitrail.errors import ConfigError
from vitrail.inference.engine import Model
from vitrail.model.base import ImageModel
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.results import to_plain
from vitrail.training.build import open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import Settings, name_settings, resolve
from vitrail.training.run_training import run_training
from vitrail.training.sweep import Trial, change_config, choose_best, run_trials
from vitrail.weights.source import PANE
from vitrail.workflows.finetune_result import FinetuneResult
from vitrail.workflows.finetune_settings import (
    LEARNING_RATES,
    SCRATCH_LEARNING_RATES,
    make_finetune_config,
    make_scratch_config,
    name_run_folder,
    scale_learning_rate,
    set_intervals,
    summarise_data,
)
from vitrail.workflows.linear_head import fit_linear_head
from vitrail.workflows.run_report import write_run_report
from vitrail.workflows.start_model import choose_start, name_model, open_start, save_start


def finetune(
    data: Data,
    model: Model | None = PANE,
    *,
    quick: bool = False,
    sweep: bool = False,
    labels_from: str | None = None,
    folder: str | Path | None = None,
    settings: Settings | None = None,
    on_event: OnEvent | None = None,
) -> FinetuneResult:
    """Train a classifier for your own images, from a model that has seen others.

        result = vitrail.finetune("photos/")
        result.model, result.accuracy, result.folder

    Resolution, steps, batch size and learning rate are chosen for the data. The same call goes on with a run that was
    stopped, and returns the result of one that is finished.

    Args:
        data: DATA, a Source or a list of (image, label) pairs, with at least two classes.
        model: MODEL or a loaded model, which stays as it is; "scratch" or None for fresh weights, as does pane with
            settings of an architecture, such as model.depth.
        quick: only fit a head to the frozen features, which takes seconds on a CPU, and list doubtful labels.
        sweep: choose the learning rate on a held-out part first, as the paper does.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        folder: where the run goes; by default runs/finetune-DATA-from-MODEL, or runs/quick-….
        settings: what replaces the chosen settings: a dictionary such as {"schedule.steps": 300}, or `key=value` texts.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        data: data, start (None for fresh weights), images, classes, short_side, has_validation.
        choices: folder, image_size, steps, epochs, batch_size, learning_rate, crop_area, flip.
        trial: rate, folder, accuracy, loss, failure, for each learning rate of a sweep.
        chosen: rate, accuracy, trains_on_all: the learning rate of a sweep.
        training, step, train, evaluation, checkpoint, trained: see vitrail/system/events.py.
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: passes over images.
        features, cross_validation, score: of a quick head, see `fit_linear_head`.

    Returns:
        The classifier, its accuracy, where its files are, and the configuration.

    Raises:
        ConfigError: A setting is wrong, or does not fit the data, the machine or the run in the folder.
        DataError: The data has fewer than two classes, or cannot be read.
        WeightsError: The model cannot be loaded.
        TrainingError: The machine failed. `Stopped` is a special case: a KeyboardInterrupt, a stop signal, or a
            KeyboardInterrupt from `on_event`. A checkpoint is saved then, and the same call goes on from there.
    """
    settings = settings if settings is not None else ()
    start = choose_start(model, settings)
    data = add_labels_from(data, labels_from)
    if isinstance(data, list):
        data = open_data(data)  # once: it remembers what it has computed about the images
    with open_listener(on_event) as listener:
        if not quick:
            return _train_classifier(data, start, sweep, folder, settings, listener)
        if sweep:
            raise ConfigError("quick trains nothing, so there is no learning rate to sweep: give --quick or --sweep")
        if start is None:
            raise ConfigError("quick needs a trained model: name one (--from MODEL), or none at all, which takes pane")
        return fit_linear_head(data, start, folder=folder, settings=settings, on_event=listener)


def _train_classifier(
    data: Data,
    start: str | ImageModel | None,
    sweep: bool,
    folder: str | Path | None,
    settings: Settings,
    listener: OnEvent,
) -> FinetuneResult:
    given_keys = {name.rpartition(".")[2] for name in name_settings(settings)}
    if sweep and "learning_rate" in given_keys:
        raise ConfigError("a sweep chooses the learning rate: leave optimizer.learning_rate out, or --sweep")
    if folder is not None and "folder" in given_keys:
        raise ConfigError("the folder was given twice: leave out run.folder, or the argument folder")
    if "source" in given_keys:
        raise ConfigError("the data was given twice: leave out data.source")
    if "labels_from" in given_keys:
        raise ConfigError("labels_from goes with the data: give it as --labels-from (labels_from=…)")
    summary, data_name = summarise_data(data), name_data(data)
    name = None if start is None else name_model(start)
    listener("data", {"data": data_name, "start": name, **asdict(summary)})
    network = None if start is None else open_start(start)
    if network is None or name is None:
        tree, rates = make_scratch_config(summary), list(SCRATCH_LEARNING_RATES)
    else:
        tree = make_finetune_config(summary, network, name)
        rates = [scale_learning_rate(rate, tree["data"]["batch_size"]) for rate in LEARNING_RATES]
    tree["data"]["source"] = data_name
    if isinstance(data, FlatFolder):
        tree["data"]["labels_from"] = data.labels_from
    tree["run"]["folder"] = str(folder) if folder is not None else f"runs/{name_run_folder(data_name, name)}"
    config = set_intervals(resolve(tree, settings), given_keys, summary)
    if isinstance(start, ImageModel) and network is not None:
        config = change_config(config, {"model": {"weights": str(save_start(network, config.run.folder))}})
    listener("choices", _list_choices(config))
    trials: tuple[Trial, ...] = ()
    if sweep:
        trials = _try_rates(config, rates, data, network, listener)
        config = _take_best(config, trials, summary.has_validation, listener)
    result = run_training(config, source=data, start=network, on_event=listener)
    result = write_run_report(result, source=data, on_event=listener)
    return FinetuneResult(
        model=result.model,
        folder=result.folder,
        weights=result.weights,
        config=config,
        accuracy=result.accuracy,
        evaluated=result.evaluated,
        evaluation=result.evaluation,
        report=result.report,
        trials=trials,
    )


def _list_choices(config: RunConfig) -> dict[str, Any]:
    """Return the values of a `choices` event."""
    chosen = {
        "folder": config.run.folder,
        "image_size": config.model.image_size,
        "steps": config.schedule.steps,
        "epochs": config.schedule.epochs,
        "batch_size": config.data.batch_size,
        "learning_rate": config.optimizer.learning_rate,
        "crop_area": config.data.augmentation.crop_area,
        "flip": config.data.augmentation.flip,
    }
    return {name: to_plain(value) for name, value in chosen.items()}


def _try_rates(
    config: RunConfig, rates: Sequence[float], data: Data, start: ImageModel | None, listener: OnEvent
) -> tuple[Trial, ...]:
    """Train with each learning rate, and return the trials."""
    if open_training_data(config.data, data).evaluation is None:
        raise ConfigError("a sweep chooses by a part that is held out: leave data.holdout and data.validate_on alone")
    trials = []
    for trial in run_trials(config, rates, source=data, start=start, on_event=listener):
        trials.append(trial)
        listener("trial", to_plain(trial))
    return tuple(trials)


def _take_best(config: RunConfig, trials: Sequence[Trial], has_validation: bool, listener: OnEvent) -> RunConfig:
    """Return the configuration with the best learning rate. What was held out to find it is trained on too."""
    best = choose_best(trials)
    listener("chosen", {"rate": best.rate, "accuracy": best.accuracy, "trains_on_all": not has_validation})
    everything: dict[str, Any] = {} if has_validation else {"data": {"holdout": 0.0}}
    return change_config(config, {"optimizer": {"learning_rate": best.rate}, **everything})
