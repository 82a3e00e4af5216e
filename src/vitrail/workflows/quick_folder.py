"""The folder of a quick head: a new one takes the place of the last one, and of nothing else."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import ConfigError, VitrailError
from vitrail.tasks.task import Task, shorten_names
from vitrail.weights.load import load
from vitrail.workflows.finetune_result import MISLABELLED_FILE, REPORT_FILE
from vitrail.workflows.task_measures import MEASURES_FILE

MODEL_FOLDER = "model"
WRITTEN = (MODEL_FOLDER, MISLABELLED_FILE, MEASURES_FILE, REPORT_FILE, "report_files")


def check_folder(folder: Path) -> None:
    """Raise a ConfigError if the folder holds other files, or a model that was trained."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give another folder=…")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name not in WRITTEN and not name.startswith(".")]
    if MODEL_FOLDER in names and not {MISLABELLED_FILE, MEASURES_FILE} & set(names):
        others = [MODEL_FOLDER]
    if others:
        raise ConfigError(f"{folder} holds {others[0]}, which quick (--quick) did not write: give a new folder=…")


def check_same_task(folder: Path, task: Task) -> None:
    """Raise a ConfigError if the folder holds a model of another task, which a new one would replace."""
    if not (folder / MODEL_FOLDER / "config.json").is_file():
        return
    try:
        before = load(folder / MODEL_FOLDER).task
    except VitrailError:  # damaged, or of a task that is not imported here
        return
    if before.kind != task.kind or not set(before.value_names) & set(task.value_names):
        raise ConfigError(
            f"{folder} holds a model for other {before.kind}, {shorten_names(before.value_names)}: give a new folder=…"
        )
