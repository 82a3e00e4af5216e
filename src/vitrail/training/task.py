"""What a run learns: the task that its data has, written into its configuration and its model."""

from __future__ import annotations

from vitrail.data.open import Data, add_task
from vitrail.data.sources.source import Source
from vitrail.data.task_data import TaskData
from vitrail.errors import ConfigError, DataError
from vitrail.model.base import ImageModel
from vitrail.tasks.labels import Labels
from vitrail.tasks.task import Task, shorten_names
from vitrail.training.config import DataConfig, RunConfig


def add_run_task(config: DataConfig, data: Data) -> Data:
    """Return the data with the task and the columns of the configuration; data that has a task already keeps it."""
    if isinstance(data, Source | TaskData):
        return data
    return add_task(data, config.task, config.labels)


def set_task(config: RunConfig, task: Task) -> RunConfig:
    """Return the configuration of a run that learns the task of its data, if it learns from targets at all.

    Raises:
        ConfigError: The configuration asks for another task, or has a key that means nothing to this one.
    """
    kind, wanted = config.objective.kind, config.data.task
    if kind not in ("classification", "task"):
        return config
    if wanted is not None and wanted != task.kind:
        raise ConfigError(
            f"data.task = {wanted!r}, but the task of {config.data.source} is {task.kind!r}: leave data.task out"
        )
    if isinstance(task, Labels) and kind == "classification":
        return config
    tree = config.model_dump()
    tree["data"]["task"], tree["objective"]["kind"] = task.kind, "task"
    return RunConfig(**tree)


def check_task(config: RunConfig, training: Source, evaluation: Source | None) -> None:
    """Check that a task can be learned and evaluated.

    Raises:
        ConfigError: The configuration asks for what only labels have.
        DataError: There is nothing to learn, or the parts of the data have different targets.
    """
    task = training.task
    if not task.output_names:
        raise DataError(f"{config.data.source} has no {task.kind} to learn: `vitrail data check` tells what it has")
    if evaluation is not None and evaluation.task != task:
        raise DataError(
            f"{config.data.source}: the {task.kind} of {config.data.validate_on} are not those of train; "
            "`vitrail data check` lists the differences"
        )
    if config.data.divide_validation == "cross-fit":
        raise ConfigError(
            f'data.divide_validation = "cross-fit" is for labels, and the task is {task.kind}: give "halves" or "no"'
        )
    if config.run.fewshot_every is not None and config.run.fewshot_data is None:
        raise ConfigError(
            f"few-shot accuracy needs one class an image, and the task is {task.kind}: leave run.fewshot_every out, or "
            "give run.fewshot_data=DATA that has classes"
        )


def name_outputs(model: ImageModel, task: Task, has_kept_head: bool) -> None:
    """Tell a model, whose head has an output for each of the task's, what they mean.

    A head that is kept was fitted to the model's own task, such as to its mean of numbers, so that stays.

    Raises:
        ConfigError: The head that is kept has outputs of another meaning.
    """
    if has_kept_head:
        own = model.task
        if (own.kind, own.output_names) != (task.kind, task.output_names):
            raise ConfigError(
                f"model.keep_head: the head is for {own.kind} ({shorten_names(own.output_names)}), and the data has "
                f"{task.kind} ({shorten_names(task.output_names)}): leave keep_head out"
            )
        return
    model.labels = task.output_names
    model.stored_task = None if isinstance(task, Labels) else task
