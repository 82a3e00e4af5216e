"""Train a classifier on a user's images: plan it, fit a head to start from, train, and measure what came out.

What chooses (the step, the learning rate) is never what reports: see vitrail/training/validation.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from vitrail.data.open import Data, name_data, open_data
from vitrail.data.sources.flat_folder import FlatFolder
from vitrail.data.sources.source import Source
from vitrail.data.task_data import TaskData
from vitrail.errors import ConfigError, VitrailError
from vitrail.evaluation.discriminant import cross_fit, fit_discriminant
from vitrail.evaluation.evaluate import score_model
from vitrail.evaluation.features import extract_features
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.inference.batches import InferenceOptions, open_model
from vitrail.inspection.scores import ModelScores
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, send_messages, send_progress
from vitrail.system.files import short_name
from vitrail.system.ranks import require_one_process
from vitrail.system.results import format_count, to_plain
from vitrail.training.build import TrainingData, divide_validation, open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.copy_thread import copy_results, find_begun_run
from vitrail.training.resolve import change_config, read_toml, resolve
from vitrail.training.result import TrainingResult
from vitrail.training.run_folder import CONFIG_FILE
from vitrail.training.run_training import run_training
from vitrail.training.sweep import Trial, choose_best, run_trials
from vitrail.weights.source import LAST_FOLDER
from vitrail.workflows.calibrate_trained import calibrate_trained
from vitrail.workflows.finetune_request import LENGTH_KEYS, FinetuneRequest
from vitrail.workflows.finetune_result import FinetuneResult
from vitrail.workflows.finetune_settings import (
    LEARNING_RATES,
    OPTIMIZER_KEYS,
    SCRATCH_LEARNING_RATES,
    DataSummary,
    choose_division,
    choose_optimizer_for_fitted_head,
    make_finetune_config,
    make_scratch_config,
    name_run_folder,
    scale_learning_rate,
    set_intervals,
    summarise_data,
)
from vitrail.workflows.imbalance import apply_balance, get_head_balance
from vitrail.workflows.linear_head import check_head, fit_linear_head, select_allowed, set_head
from vitrail.workflows.run_report import write_run_report
from vitrail.workflows.start_model import name_model, open_start, save_start, was_begun_from
from vitrail.workflows.time_budget import CPU_MINUTES, REPORT_SECONDS, ImageCounts, Plan, plan_training

COMPILER_KEYS = {"compile", "fused", "fp8", "graphs"}
"""Settings that say what computes on a GPU."""


def train_classifier(request: FinetuneRequest, listener: OnEvent) -> FinetuneResult:
    """Train a classifier as a user asks for it. The arguments and events are those of `finetune`."""
    began = time.monotonic()
    request.check()
    data, start = request.data, request.start
    summary, data_name = summarise_data(data), name_data(data)
    name = None if start is None else name_model(start)
    listener("data", {"data": data_name, "start": name, **asdict(summary)})
    network = None if start is None else open_start(start)
    config, rates = choose_settings(request, summary, network, name)
    config = _set_division(config, data, summary, request)
    minutes = choose_minutes(request, config)
    takes_length = not request.sweep and not request.given_keys & LENGTH_KEYS
    if takes_length and find_begun_run(config):
        config, network = read_begun_run(config, request, network, listener)
        listener("choices", list_choices(config, minutes, None))
    else:
        config = apply_balance(config, data, request.given_keys, listener)
        plan, unplanned = None, config
        if minutes is not None:
            left = 60 * minutes - (time.monotonic() - began)
            config, plan = fit_into_time(config, request, summary, network, left)
            if plan is None and start is not None:
                message = f"training on {summary.images:,} images would take longer than {minutes:g} min here"
                send_messages(listener)(f"{message}: a linear head is fitted to the frozen features instead")
                settings = select_allowed(request.settings)
                return fit_linear_head(data, start, folder=request.folder, settings=settings, on_event=listener)
        config = set_intervals(config, request.given_keys, summary)
        listener("choices", list_choices(config, minutes, plan))
        if network is not None:
            config, network = _prepare_start(config, unplanned, request, network, plan is not None, listener)
    trials: tuple[Trial, ...] = ()
    if request.sweep:
        trials = try_rates(config, rates, data, network, listener)
        best = choose_best(trials)
        listener("chosen", {"rate": best.rate, "accuracy": best.accuracy})
        config = change_config(config, {"optimizer": {"learning_rate": best.rate}})
    result = run_training(config, source=data, start=network, fewshot=open_training_fewshot, on_event=listener)
    scores = score_classifier(result, data, summary, listener)
    if os.environ.get("RANK", "0") == "0":
        options = InferenceOptions(batch_size=config.data.batch_size, device=config.run.device)
        images = open_untouched_images(result, data, summary)
        calibrate_trained(result.model, images, options, listener, data_name, result.weights)
    written = write_run_report(result, source=data, scores=scores, is_brief=minutes is not None, on_event=listener)
    copy_results(config)
    judged = None if scores is None else scores.report
    is_tested = judged is not None and reports_on_test(config, summary)
    return FinetuneResult(
        model=result.model,
        folder=result.folder,
        weights=result.weights,
        config=config,
        accuracy=judged.top1 if judged is not None and is_tested else result.accuracy,
        evaluated=judged.images if judged is not None and is_tested else result.evaluated,
        evaluation=result.evaluation,
        fewshot=result.fewshot,
        judged=judged,
        flatters=not is_tested and config.data.divide_validation == "no",
        report=written.report,
        trials=trials,
    )


def read_begun_run(
    config: RunConfig, request: FinetuneRequest, network: ImageModel | None, listener: OnEvent
) -> tuple[RunConfig, ImageModel | None]:
    """Return the configuration of the run in the folder, with the settings that the user gives now, and its start.

    What was planned then holds when the same command resumes the run, however fast the machine is now.

    Raises:
        ConfigError: The run was begun from another model.
    """
    folder = config.run.folder
    tree = read_toml(folder / CONFIG_FILE)
    begun = resolve({**tree, "run": {**tree["run"], "folder": str(folder)}}, request.settings)
    if (begun.model.weights is None) != (network is None) or not was_begun_from(folder, network):
        raise ConfigError(f"the run in {folder} was begun from another model: give another folder=…")
    if request.minutes is not None and (folder / LAST_FOLDER / "config.json").is_file():
        send_messages(listener)(f"the run in {folder} is finished: give folder=… to train another with more time")
    if begun.model.keep_head:
        network = open_start(str(begun.model.weights))
    return begun, network


def _prepare_start(
    config: RunConfig,
    unplanned: RunConfig,
    request: FinetuneRequest,
    network: ImageModel,
    is_planned: bool,
    listener: OnEvent,
) -> tuple[RunConfig, ImageModel]:
    """Fit a head to start from, if the training is planned, and save a start that no name can load again."""
    start = network
    if is_planned and config.objective.kind == "classification":
        fitted = fit_start_head(network, config, request.data, listener)
        if fitted is not None:
            start = fitted
            config = change_config(config, {"model": {"keep_head": True}, "run": {"evaluate_start": True}})
        else:  # a head of zeros needs the paper's optimizer
            config = change_config(config, {"optimizer": unplanned.optimizer.model_dump()})
    return save_changed_start(config, request, start, network), start


def save_changed_start(
    config: RunConfig, request: FinetuneRequest, start: ImageModel, network: ImageModel
) -> RunConfig:
    """Save the model to start from if no name can load it again, and return the configuration that names it."""
    if not config.model.keep_head and not isinstance(request.start, ImageModel):
        return config
    saved = save_start(start, config.run.folder, begun_from=network)
    return change_config(config, {"model": {"weights": str(saved)}})


def reports_on_test(config: RunConfig, summary: DataSummary) -> bool:
    """Return whether the test split reports: there is one, and it does not choose."""
    other = config.run.fewshot_data if config.schedule.choose_by == "fewshot" else None
    chooses = config.data.validate_on == "test" if other is None else other == config.data.source
    return summary.has_test and not chooses


def choose_settings(
    request: FinetuneRequest, summary: DataSummary, network: ImageModel | None, name: str | None
) -> tuple[RunConfig, list[float]]:
    """Return the configuration, chosen for the data or as a setting says, and the learning rates of a sweep."""
    data, data_name = request.data, name_data(request.data)

    def choose(share: float | None) -> tuple[RunConfig, list[float]]:
        tree, rates = _make_tree(summary, network, name, share)
        tree["data"]["source"] = data_name
        if isinstance(data, FlatFolder):
            tree["data"]["labels_from"] = data.labels_from
        tree["data"] |= list_task_keys(data)
        tree["run"]["folder"] = str(request.folder or f"runs/{name_run_folder(data_name, name)}")
        return resolve(tree, request.settings), rates

    config, rates = choose(None)
    return (config, rates) if config.data.share is None else choose(config.data.share)


def list_task_keys(data: Data) -> dict[str, str]:
    """Return `data.task` and `data.labels` for data that says them; nothing for other data."""
    if not isinstance(data, TaskData):
        return {}
    keys = {"task": data.kind, "labels": ",".join(data.columns)}
    return {key: value for key, value in keys.items() if value}


def _make_tree(
    summary: DataSummary, network: ImageModel | None, name: str | None, share: float | None
) -> tuple[dict[str, Any], list[float]]:
    """Return the chosen settings by section, and the learning rates of a sweep."""
    if network is None or name is None:
        return make_scratch_config(summary, share), list(SCRATCH_LEARNING_RATES)
    tree = make_finetune_config(summary, network, name, share)
    return tree, [scale_learning_rate(rate, tree["data"]["batch_size"]) for rate in LEARNING_RATES]


def _set_division(config: RunConfig, data: Data, summary: DataSummary, request: FinetuneRequest) -> RunConfig:
    """Return the configuration with its validation images divided as their number requires, or as a setting says."""
    if "divide_validation" in request.given_keys or config.objective.kind != "classification":
        return config
    if config.schedule.choose_by == "fewshot" and not request.sweep:
        return config  # validation images choose nothing that halves could be kept out of
    evaluation = open_undecoded(config, data).evaluation
    count = 0 if evaluation is None else len(evaluation)
    division = choose_division(reports_on_test(config, summary), count, request.sweep)
    return change_config(config, {"data": {"divide_validation": division}})


def open_undecoded(config: RunConfig, data: Data) -> TrainingData:
    """Open the images of a training without decoding them into memory."""
    return open_training_data(change_config(config, {"data": {"in_memory": False}}).data, data)


def choose_minutes(request: FinetuneRequest, config: RunConfig) -> float | None:
    """Return the time that the training must fit into: what was asked for, or some minutes without an NVIDIA GPU."""
    if request.minutes is not None:
        require_one_process("--minutes")
        return request.minutes
    has_own_length = request.sweep or request.given_keys & LENGTH_KEYS or os.environ.get("WORLD_SIZE", "1") != "1"
    return None if has_own_length or choose_device(config.run.device).type == "cuda" else CPU_MINUTES


def fit_into_time(
    config: RunConfig, request: FinetuneRequest, summary: DataSummary, network: ImageModel | None, seconds: float
) -> tuple[RunConfig, Plan | None]:
    """Fit the training into the time that is left, and return its configuration.

    The plan is None if even the smallest training takes longer; from scratch, where there is no other way, it then
    trains as long as there is time.
    """
    device = choose_device(config.run.device)
    if network is not None and not request.given_keys & OPTIMIZER_KEYS:
        config = change_config(config, {"optimizer": choose_optimizer_for_fitted_head(network)})
    if device.type == "cuda" and not request.given_keys & COMPILER_KEYS:
        # Compiling takes a minute that a short training does not earn back.
        config = change_config(config, {"run": {"compile": False, "fused": False}})
    opened = open_undecoded(config, request.data)
    sizes: list[tuple[int, int] | None] = [None]
    if network is not None and "image_size" not in request.given_keys and config.model.image_size != network.image_size:
        sizes.append(network.image_size)
    began = time.monotonic()
    plan = plan_training(
        config,
        sizes,
        request.data,
        network,
        seconds=seconds,
        images=ImageCounts(
            training=len(opened.training),
            validation=0 if opened.evaluation is None else len(opened.evaluation),
            test=len(open_data(request.data, "test")) if reports_on_test(config, summary) else 0,
        ),
        pixel_bytes=3 * summary.pixels * summary.images,
        device=device,
        fits_head=network is not None,
        given_keys=request.given_keys,
    )
    if plan is None:
        left = max(seconds - (time.monotonic() - began) - REPORT_SECONDS, 1.0)
        return change_config(config, {"run": {"most_seconds": left}}), None
    return plan.config, plan


def list_choices(config: RunConfig, minutes: float | None, plan: Plan | None) -> dict[str, Any]:
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
        "minutes": minutes,
        "step_seconds": None if plan is None else plan.step_seconds,
        "seconds": None if plan is None else plan.seconds,
    }
    return {name: to_plain(value) for name, value in chosen.items()}


def fit_start_head(network: ImageModel, config: RunConfig, data: Data, listener: OnEvent) -> ImageModel | None:
    """Return a copy of a model with a head that is fitted to the training images, at the size of the training.

    Training then improves a good classifier instead of a head of zeros. Nothing that is held out is used.

    Returns:
        None if the model's head is not a linear layer on its representation.
    """
    training = open_undecoded(config, data).training
    fitted = copy_model(network)
    if config.model.image_size is not None:
        fitted.resize(config.model.image_size)
    options = InferenceOptions(batch_size=config.data.batch_size, device=config.run.device)
    engine = open_model(fitted, options)
    train = extract_features(engine, training, options, cache=None, progress=send_progress(listener, "features"))
    try:
        balance = get_head_balance(config)
        shrinkage = cross_fit(train.values, train.labels, training.num_classes, balance=balance).shrinkage
        classifier = fit_discriminant(train.values, train.labels, training.num_classes, shrinkage, balance)
        set_head(fitted, classifier, training.classes)
        check_head(fitted, classifier, train, training, options)
    except VitrailError:
        return None
    return fitted.cpu()


def try_rates(
    config: RunConfig, rates: Sequence[float], data: Data, start: ImageModel | None, listener: OnEvent
) -> tuple[Trial, ...]:
    """Train with each learning rate, and return the trials."""
    if open_undecoded(config, data).evaluation is None:
        raise ConfigError("a sweep chooses by a part that is held out: leave data.holdout and data.validate_on alone")
    trials = []
    trained = run_trials(config, rates, source=data, start=start, fewshot=open_training_fewshot, on_event=listener)
    for trial in trained:
        trials.append(trial)
        listener("trial", to_plain(trial))
    return tuple(trials)


def score_classifier(result: TrainingResult, data: Data, summary: DataSummary, listener: OnEvent) -> ModelScores | None:
    """Measure the trained classifier on images that chose nothing, for the report; None if there are none.

    They are the test split if the data has one, else the half of the validation images that did not choose the weights.
    Of few images both halves are shown, and the accuracy is the cross-fitted one.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    options = InferenceOptions(batch_size=result.config.data.batch_size, device=result.config.run.device)
    names = (str(result.folder), short_name(name_data(data)), None)
    try:
        images, remark = _open_judging_images(result, data, summary)
        if images is None:
            return None
        report, scored = score_model(
            result.model, images, options=options, names=names, progress=send_progress(listener, "measuring")
        )
    except VitrailError as error:
        send_messages(listener)(f"the accuracy could not be measured: {error}")
        return None
    if result.accuracy is not None and not reports_on_test(result.config, summary):
        report = replace(report, top1=result.accuracy)
    return ModelScores(report, scored, remark)


def open_untouched_images(result: TrainingResult, data: Data, summary: DataSummary) -> Source | None:
    """Return the images that neither trained nor chose anything; None if there are none."""
    if reports_on_test(result.config, summary):
        return open_data(data, "test")
    if result.config.data.divide_validation != "halves":
        return None
    parts = divide_validation(result.config, open_undecoded(result.config, data).evaluation)
    return parts[1] if len(parts) > 1 else None


def _open_judging_images(result: TrainingResult, data: Data, summary: DataSummary) -> tuple[Source | None, str]:
    """Return the images that judge a classifier, and a sentence about them."""
    if reports_on_test(result.config, summary):
        test = open_data(data, "test")
        return test, f"The {format_count(len(test), 'image')} of the test split, which chose nothing."
    whole = open_undecoded(result.config, data).evaluation
    parts = divide_validation(result.config, whole)
    if len(parts) < 2:
        remark = "Images that were not trained on, but chose the weights: the accuracy may flatter."
        return whole, remark
    if result.config.data.divide_validation == "halves":
        return parts[1], f"{format_count(len(parts[1]), 'image')} that were not trained on and chose nothing."
    return whole, (
        f"{format_count(sum(map(len, parts)), 'image')} that were not trained on. The accuracy is cross-fitted: each "
        "half of them is measured at the step that the other half chose. Mistakes are those of the final model."
    )
