"""The model that a training starts from: a name, a loaded model, or none."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from vitrail.errors import ConfigError, did_you_mean
from vitrail.inference.engine import Model, check_model
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.system.files import write_whole
from vitrail.training.resolve import Settings, list_keys, name_settings
from vitrail.training.run_folder import CONFIG_FILE, START_FOLDER, check_other_files
from vitrail.weights.digest import compute_weights_digest
from vitrail.weights.known import TRAINING_ONLY
from vitrail.weights.load import load
from vitrail.weights.save import save
from vitrail.weights.source import PANE

SCRATCH = "scratch"
"""The name that stands for no model. A folder of that name is ./scratch."""
ASKED_FILE = "asked-for.txt"
"""In the folder of a start: the digest of the model that the user asked for."""
ANY_MODEL_KEYS = ("image_size", "weights")
"""Keys of the model section that fit every model."""


def choose_start(model: Model | None, settings: Settings) -> str | ImageModel | None:
    """Return the model to start from, or None for fresh weights: if the name says so, or in place of pane if the
    settings describe an architecture.

    Raises:
        ConfigError: The settings name weights too, or the name is nearly "scratch".
    """
    keys = {name.removeprefix("model.") for name in name_settings(settings)}
    if "weights" in keys:
        raise ConfigError("give --from MODEL (in Python: model) in place of model.weights")
    if model is None or isinstance(model, ImageModel):
        return model
    check_model(model)
    name = str(model)
    if name == SCRATCH or (name == PANE and keys & (set(list_keys("model")) - {*ANY_MODEL_KEYS, *TRAINING_ONLY})):
        return None
    if not Path(name).exists() and (hint := did_you_mean(name, [SCRATCH])):
        raise ConfigError(f"there is no model {name!r}{hint}")
    return name


def open_start(model: str | ImageModel, image_size: tuple[int, int] | None = None) -> ImageModel:
    """Load a model, or copy one that is loaded, in full precision and on the CPU: it may be changed."""
    if isinstance(model, ImageModel):
        copied = copy_model(model).to(device="cpu", dtype=torch.float32)
        return copied if image_size is None else copied.resize(image_size)
    return load(model, image_size=image_size, dtype=torch.float32)


def name_model(model: str | ImageModel) -> str:
    """Return what a model is called in names of folders and in sentences."""
    return "model" if isinstance(model, ImageModel) else model


def save_start(model: ImageModel, folder: Path, *, begun_from: ImageModel) -> Path:
    """Write the weights that a run starts from into its folder, so that the run can go on, and return their folder.

    Args:
        model: The weights to start from.
        folder: The run's folder.
        begun_from: The model that the user asked for, perhaps with another head; `was_begun_from` compares with it.

    Raises:
        ConfigError: The folder holds other files.
    """
    check_other_files(folder)
    if os.environ.get("RANK", "0") == "0" and not (folder / CONFIG_FILE).exists():
        save(model, folder / START_FOLDER, notes="The weights that the run in the folder above starts from.")
        write_whole(folder / START_FOLDER / ASKED_FILE, compute_weights_digest(begun_from).encode())
    return folder / START_FOLDER


def was_begun_from(folder: Path, model: ImageModel | None) -> bool:
    """Return whether the run in a folder was begun from this model, as far as `save_start` has noted it there."""
    noted = folder / START_FOLDER / ASKED_FILE
    return model is None or not noted.is_file() or noted.read_text(encoding="utf-8") == compute_weights_digest(model)
