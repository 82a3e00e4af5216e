"""Make a model for some images, whatever is to be learned from them, from a model that has seen others.

Three ways: as the paper does for transfer, in a given time from a fitted head, or only a head in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.data.open import Data, add_labels_from, add_task, open_data, open_training_images
from vitrail.data.task_data import TaskData, recognise_data
from vitrail.errors import ConfigError
from vitrail.inference.engine import Model
from vitrail.system.events import OnEvent, open_listener
from vitrail.tasks.task import Task
from vitrail.training.resolve import Settings
from vitrail.weights.source import PANE
from vitrail.workflows.finetune_request import FinetuneRequest
from vitrail.workflows.finetune_result import FinetuneResult
from vitrail.workflows.linear_head import fit_linear_head
from vitrail.workflows.start_model import choose_start
from vitrail.workflows.task_linear_head import fit_linear_task_head
from vitrail.workflows.task_summary import summarise_task
from vitrail.workflows.train_classifier import train_classifier
from vitrail.workflows.train_task import train_task

MOST_MINUTES = 60 * 24 * 365


def finetune(
    data: Data,
    model: Model | None = PANE,
    *,
    quick: bool = False,
    minutes: float | None = None,
    sweep: bool = False,
    task: Task | str | None = None,
    labels: str | Sequence[str] | None = None,
    labels_from: str | None = None,
    folder: str | Path | None = None,
    settings: Settings | None = None,
    on_event: OnEvent | None = None,
) -> FinetuneResult:
    """Train a model for your own images, from one that has seen others.

        result = vitrail.finetune("photos/")
        result.model, result.accuracy, result.folder

    What it learns is the task that the data tells, or that `task` names: one label an image, several tags, numbers,
    levels in an order, or several attributes. For all but labels the head is fitted to the frozen features first.

    Resolution, steps, batch size and learning rate are chosen for the data and the time. The weights with the best
    evaluation on held-out images are kept, and the accuracy is of images that chose nothing: the test split, one half
    of the held-out images, or, if these are fewer than 200 and have labels, all of them by cross-fitting. The same call
    goes on with a run that was stopped, and returns the result of one that is finished.

    Args:
        data: DATA, a Source or a list of (image, label) pairs, with at least two classes or targets of another task.
        model: MODEL or a loaded model, which stays as it is; "scratch" or None for fresh weights, as does pane with
            settings of an architecture, such as model.depth.
        quick: only fit a head to the frozen features, which takes seconds on a CPU, and list doubtful labels.
        minutes: the time for everything; image size and number of steps are chosen to fit, and if even that is too
            long, a head is fitted as with `quick`. By default 3, and no limit on an NVIDIA GPU.
        sweep: choose the learning rate on a held-out part first, as the paper does.
        task: labels, tags, numbers, levels or attributes, or a task itself, such as
            `Levels(names=("poor", "fair", "good"), column="state")`; by default what the data tells.
        labels: the columns of a table to learn, such as "colour,shape"; by default they are found.
        labels_from: where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular
            expression with one group.
        folder: where the run goes; by default runs/DATA, runs/DATA-quick, or with another model runs/DATA-from-MODEL.
        settings: what replaces the chosen settings: a dictionary such as {"schedule.steps": 300}, or `key=value` texts.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        data: data, start (None for fresh weights), images, classes, short_side, pixels, has_validation, has_test.
        balance: ratio, choice, share, why: where the largest class has ten times the images of the smallest or more,
            what is set as `objective.balance` and `data.balance` so that rare classes are found too, and a sentence.
        choices: folder, image_size, steps, epochs, batch_size, learning_rate, crop_area, flip, minutes; step_seconds
            and seconds, of a step and of all that is left, where two steps were measured.
        task: kind, columns, outputs, values (names of what the model gives and answers), images, counts (images with
            each tag), remark (what else the values tell, may be empty): for any task but labels, and for labels in a
            column that was found or named.
        measures: task, images, remark, flatters, measures (each with name, value, low, high, is_share): for any task
            but labels.
        trial: rate, folder, accuracy, loss, failure, for each learning rate of a sweep.
        chosen: rate, accuracy: the learning rate of a sweep; for other tasks than labels loss, and no accuracy.
        training, step, train, evaluation, fewshot, checkpoint, trained: see vitrail/system/events.py.
        report: folder, path, problem: the report's file, or None and why none could be made.
        progress: passes over images.
        features, cross_validation, score: of a quick head, see `fit_linear_head`.

    Returns:
        The model, its accuracy, where its files are, and the configuration; for any task but labels a `TaskResult`,
        which has measures in place of an accuracy.

    Raises:
        ConfigError: A setting is wrong, or does not fit the data, the machine or the run in the folder.
        DataError: The data has fewer than two classes, or cannot be read.
        WeightsError: The model cannot be loaded.
        TrainingError: The machine failed. `Stopped` is a special case: a KeyboardInterrupt, a stop signal, or a
            KeyboardInterrupt from `on_event`. A checkpoint is saved then, and the same call goes on from there.
    """
    settings = settings if settings is not None else ()
    if minutes is not None and not 0 < minutes < MOST_MINUTES:
        raise ConfigError(f"minutes = {minutes:g}: give a number above 0 and up to a year, such as 5")
    start = choose_start(model, settings)
    if not quick:
        FinetuneRequest(data, start, sweep, minutes, folder, settings).check()  # before the data is opened
    data = recognise_data(add_task(add_labels_from(data, labels_from), task, labels))
    if isinstance(data, list):
        data = open_data(data)  # once: it remembers what it has computed about the images
    with open_listener(on_event) as listener:
        is_labels = open_training_images(data).task.kind == "labels"
        if not is_labels or isinstance(data, TaskData):  # not of folders, whose classes are told anyway
            listener("task", summarise_task(data))
        if not quick:
            request = FinetuneRequest(data, start, sweep, minutes, folder, settings)
            return train_classifier(request, listener) if is_labels else train_task(request, listener)
        if minutes is not None:
            raise ConfigError("quick takes seconds: give --quick or --minutes")
        if sweep:
            raise ConfigError("quick trains nothing, so there is no learning rate to sweep: give --quick or --sweep")
        if start is None:
            raise ConfigError("quick needs a trained model: name one (--from MODEL), or none at all, which takes pane")
        if not is_labels:
            return fit_linear_task_head(data, start, folder=folder, settings=settings, listener=listener)
        return fit_linear_head(data, start, folder=folder, settings=settings, on_event=listener)
