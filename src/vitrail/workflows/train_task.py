"""Train a model for any task but labels on a user's images: the same steps as in train_classifier.py.

The head is fitted to the frozen features first, and the whole model is trained by AdamW from there. What chooses (the
step, the learning rate, the thresholds of tags) is never what reports: see task_measures.py.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict

from vitrail.data.open import name_data, open_training_images
from vitrail.errors import VitrailError
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.inference.batches import InferenceOptions
from vitrail.model.base import ImageModel
from vitrail.system.events import OnEvent, send_messages
from vitrail.system.files import short_name
from vitrail.training.config import RunConfig
from vitrail.training.copy_thread import copy_results, find_begun_run
from vitrail.training.resolve import build_config, change_config, read_toml
from vitrail.training.result import TrainingResult
from vitrail.training.run_folder import CONFIG_FILE, START_FOLDER
from vitrail.training.run_training import run_training
from vitrail.training.sweep import Trial, choose_best
from vitrail.training.task import set_task
from vitrail.weights.save import save
from vitrail.workflows.finetune_request import LENGTH_KEYS, FinetuneRequest
from vitrail.workflows.finetune_result import TaskResult
from vitrail.workflows.finetune_settings import (
    OPTIMIZER_KEYS,
    DataSummary,
    choose_optimizer_for_fitted_head,
    set_intervals,
    summarise_data,
)
from vitrail.workflows.linear_head import select_allowed
from vitrail.workflows.run_report import write_run_report
from vitrail.workflows.start_model import name_model, open_start, was_begun_from
from vitrail.workflows.task_linear_head import fit_linear_task_head, fit_start_task_head
from vitrail.workflows.task_measures import (
    TaskJudgement,
    choose_judging_images,
    describe_judgement,
    judge_model,
    open_test,
)
from vitrail.workflows.time_budget import Plan
from vitrail.workflows.train_classifier import (
    choose_minutes,
    choose_settings,
    fit_into_time,
    list_choices,
    open_undecoded,
    read_begun_run,
    reports_on_test,
    save_changed_start,
    try_rates,
)

RATE_FACTORS = (0.3, 1.0, 3.0, 10.0)
"""The learning rates that a sweep tries from a fitted head, as multiples of AdamW's usual one."""


def train_task(request: FinetuneRequest, listener: OnEvent) -> TaskResult:
    """Train a model for the task of its data. The arguments and events are those of `finetune`."""
    began = time.monotonic()
    request.check()
    data, start = request.data, request.start
    summary, name = summarise_data(data), None if start is None else name_model(start)
    listener("data", {"data": name_data(data), "start": name, **asdict(summary)})
    network = None if start is None else open_start(start)
    config, rates = choose_settings(request, summary, network, name)
    config = _adapt_to_task(config, request, summary, network)
    if network is not None:
        rates = [config.optimizer.learning_rate * factor for factor in RATE_FACTORS]
    minutes = choose_minutes(request, config)
    takes_length = not request.sweep and not request.given_keys & LENGTH_KEYS
    if takes_length and find_begun_run(config):
        config, network = read_begun_run(config, request, network, listener)
        listener("choices", list_choices(config, minutes, None))
    else:
        plan: Plan | None = None
        if minutes is not None:
            left = 60 * minutes - (time.monotonic() - began)
            config, plan = fit_into_time(config, request, summary, network, left)
            if plan is None and start is not None:
                message = f"training on {summary.images:,} images would take longer than {minutes:g} min here"
                send_messages(listener)(f"{message}: a linear head is fitted to the frozen features instead")
                settings = select_allowed(request.settings)
                return fit_linear_task_head(data, start, folder=request.folder, settings=settings, listener=listener)
        config = set_intervals(config, request.given_keys, summary)
        listener("choices", list_choices(config, minutes, plan))
        if network is not None:
            config, network = _prepare_start(config, request, network, listener)
    trials: tuple[Trial, ...] = ()
    if request.sweep:
        trials = try_rates(config, rates, data, network, listener)
        best = choose_best(trials)
        listener("chosen", {"rate": best.rate, "accuracy": None, "loss": best.loss})
        config = change_config(config, {"optimizer": {"learning_rate": best.rate}})
    result = run_training(config, source=data, start=network, fewshot=open_training_fewshot, on_event=listener)
    judgement = judge_run(result, request, summary, listener)
    scores = None if judgement is None else judgement.scores
    written = write_run_report(result, source=data, scores=scores, is_brief=minutes is not None, on_event=listener)
    copy_results(config)
    return TaskResult(
        model=result.model,
        folder=result.folder,
        weights=result.weights,
        config=config,
        accuracy=None,
        evaluated=0 if judgement is None else judgement.images,
        evaluation=result.evaluation,
        fewshot=result.fewshot,
        flatters=judgement is not None and judgement.flatters,
        report=written.report,
        trials=trials,
        judgement=judgement,
    )


def _adapt_to_task(
    config: RunConfig, request: FinetuneRequest, summary: DataSummary, network: ImageModel | None
) -> RunConfig:
    """Return the configuration for the task of the data: its division, and an optimizer for any scale of the loss.

    The paper's SGD is tuned to the cross entropy of classes, and the loss of many tags has much smaller gradients.
    """
    config = set_task(config, open_training_images(request.data).task)
    given = request.given_keys
    if network is not None and not given & OPTIMIZER_KEYS:
        config = change_config(config, {"optimizer": choose_optimizer_for_fitted_head(network)})
    if "divide_validation" not in given and config.schedule.choose_by != "fewshot":
        division = "no" if reports_on_test(config, summary) and not request.sweep else "halves"
        config = change_config(config, {"data": {"divide_validation": division}})
    return config


def _prepare_start(
    config: RunConfig, request: FinetuneRequest, network: ImageModel, listener: OnEvent
) -> tuple[RunConfig, ImageModel]:
    """Fit a head to start from, in one process, and save a start that no name can load again.

    A run that was begun goes on from the head that was fitted then, or without one if none was, on any number of ranks.
    """
    start, folder = network, config.run.folder
    if config.objective.kind == "task" and not config.model.keep_head:
        fitted = None
        if (folder / CONFIG_FILE).is_file() and was_begun_from(folder, network):
            has_head = build_config(read_toml(folder / CONFIG_FILE)).model.keep_head
            fitted = open_start(str(folder / START_FOLDER)) if has_head else None
        elif os.environ.get("WORLD_SIZE", "1") == "1":
            fitted = fit_start_task_head(network, config, request.data, listener)
        if fitted is not None:
            start = fitted
            config = change_config(config, {"model": {"keep_head": True}, "run": {"evaluate_start": True}})
    return save_changed_start(config, request, start, network), start


def judge_run(
    result: TrainingResult, request: FinetuneRequest, summary: DataSummary, listener: OnEvent
) -> TaskJudgement | None:
    """Tune the task of a trained model, measure it, and write it again with both; None if there is nothing to measure.

    What tunes is what chose the weights; what is measured chose nothing.
    """
    config = result.config
    if os.environ.get("RANK", "0") != "0" or config.objective.kind != "task":
        return None
    try:
        test = open_test(request.data, reports_on_test(config, summary))
        images = choose_judging_images(config, open_undecoded(config, request.data).evaluation, test)
        options = InferenceOptions(batch_size=config.data.batch_size, device=config.run.device)
        judgement = judge_model(result.model, images, options, short_name(name_data(request.data)), listener)
    except VitrailError as error:
        send_messages(listener)(f"the model could not be measured: {error}")
        return None
    if judgement is not None:
        result.model.cpu().stored_task = judgement.task
        save(result.model, result.weights, notes=f"{result.card}\n\n{judgement.describe()}")
        judgement.write(result.folder)
        listener("measures", describe_judgement(judgement))
    return judgement
