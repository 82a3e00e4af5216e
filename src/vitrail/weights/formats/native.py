"""vitrail's own folder: model.safetensors, config.json, README.md, and SHA256SUMS with the hashes of the first two.

config.json holds the architecture, the preprocessing, the labels and the origin. `sha256sum -c` can check SHA256SUMS.
A calibrated model has a fifth file, reliability.json, whose hash is in SHA256SUMS too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.config import Origin, Preprocessing, TrainingCost
from vitrail.errors import ConfigError, WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, TimmArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.reliability.record import Reliability, read_reliability
from vitrail.system.files import sha256
from vitrail.tasks.registry import read_task
from vitrail.tasks.task import Task
from vitrail.weights.formats.base import CheckpointInfo, FolderFiles, ForeignConfig, Tensors, WeightFormat
from vitrail.weights.tensor_rules import TensorRule

FORMAT, VERSION = "vitrail", 1
CHECKSUM_FILE = "SHA256SUMS"
CHECKSUMMED_FILES = ("model.safetensors", "config.json")
RELIABILITY_FILE = "reliability.json"
"""What `vitrail calibrate` has fitted, if it has."""
UNUSED_PREFIX = "set_aside/"
"""Prefix of the names of tensors that the model does not need."""
FAMILIES: dict[str, Any] = {"vit": VitArchitecture, "resnet": ResNetArchitecture, "timm": TimmArchitecture}


class NativeConfig(ForeignConfig):
    """The content of a native folder's config.json."""

    format: str
    version: int
    family: str
    architecture: dict[str, Any]
    preprocessing: dict[str, Any]
    labels: tuple[str, ...] | None = None
    task: dict[str, Any] | None = None
    origin: dict[str, Any] | None = None
    training_cost: dict[str, Any] | None = None
    learned_from: str | None = None
    chosen_by: str | None = None


class NativeFormat(WeightFormat):
    """Names such as `encoder.blocks.0.attention.qkv.weight`; networks of timm's keep timm's names."""

    name = "native"

    def recognises(self, tensors: Tensors) -> bool:
        """Recognise vitrail's own models; only `holds_timm_network` recognises networks of timm's."""
        return bool({"patch_embed.projection.weight", "backbone.root.weight"} & tensors.keys())

    def holds_timm_network(self, folder_files: FolderFiles) -> bool:
        """Return whether a native folder holds a network of timm's, judged by its config.json."""
        config = folder_files.json("config.json")
        return (config.get("format"), config.get("family")) == (FORMAT, "timm")

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        values = folder_files.json("config.json")
        if values.get("format") != FORMAT:
            raise WeightsError("these are vitrail's own weights, but the config.json that belongs to them is missing")
        config: NativeConfig = NativeConfig.parse(values, "config.json")
        if config.version > VERSION or config.family not in FAMILIES:
            raise WeightsError("config.json was written by a newer vitrail: pip install --upgrade vitrail")
        try:
            return CheckpointInfo(
                FAMILIES[config.family](**config.architecture),
                Preprocessing(**config.preprocessing),
                labels=config.labels,
                task=_read_task(config),
                training_cost=None if config.training_cost is None else TrainingCost(**config.training_cost),
                learned_from=config.learned_from,
                chosen_by=config.chosen_by,
                reliability=_read_reliability(folder_files, config),
                unused_tensors=[name for name in tensors if name.startswith(UNUSED_PREFIX)],
            )
        except ConfigError as error:
            raise WeightsError(f"config.json: {error}") from None

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        return [TensorRule("peer.**", "**") if isinstance(architecture, TimmArchitecture) else TensorRule("**", "**")]

    def explain_refusal(self, architecture: Architecture) -> str | None:
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        return ""

    def name_unused_tensor(self, name: str) -> str:
        return UNUSED_PREFIX + name

    def read_origin(self, folder_files: FolderFiles) -> Origin | None:
        origin = folder_files.json("config.json").get("origin")
        return None if origin is None else Origin(**origin)

    def check_integrity(self, folder_files: FolderFiles) -> None:
        if folder_files.folder is not None:
            check_checksums(folder_files.folder)

    def describe_lost_task(self, model: ImageModel) -> str:
        return ""

    def finish_folder(self, folder: Path) -> None:
        (folder / CHECKSUM_FILE).write_text(format_checksums(folder), encoding="utf-8", newline="\n")

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        reliability = model.reliability
        return {
            "config.json": {
                **describe_config(
                    model.architecture, model.preprocessing, model.labels, model.origin, model.stored_task
                ),
                "training_cost": None if (cost := model.training_cost) is None else cost.model_dump(mode="json"),
                "learned_from": model.learned_from,
                "chosen_by": model.chosen_by,
            },
            **({} if reliability is None else {RELIABILITY_FILE: reliability.model_dump(mode="json")}),
        }


def describe_config(
    architecture: Architecture | TimmArchitecture,
    preprocessing: Preprocessing,
    labels: Sequence[str] | None,
    origin: Origin | None,
    task: Task | None = None,
) -> dict[str, Any]:
    """Return the content of config.json, without the training cost. Only another task than labels is written."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "family": next(family for family, kind in FAMILIES.items() if isinstance(architecture, kind)),
        "architecture": architecture.model_dump(mode="json"),
        "preprocessing": preprocessing.model_dump(mode="json"),
        "labels": None if labels is None else list(labels),
        "origin": None if origin is None else origin.model_dump(mode="json"),
        **({} if task is None else {"task": task.model_dump(mode="json")}),
    }


def _read_task(config: NativeConfig) -> Task | None:
    """Return the task in config.json, if it fits the number of outputs; None if there is none."""
    if config.task is None:
        return None
    task, outputs = read_task(config.task), config.architecture.get("num_classes")
    if len(task.output_names) != outputs:
        raise WeightsError(f"config.json: the task has {len(task.output_names)} outputs and the model {outputs}")
    return task


def _read_reliability(folder_files: FolderFiles, config: NativeConfig) -> Reliability | None:
    """Return what was fitted for the model, if it fits the model; None if nothing was."""
    values = folder_files.json(RELIABILITY_FILE)
    if not values:
        return None
    try:
        return read_reliability(values, config.architecture.get("num_classes", 0), config.task is None)
    except ConfigError as error:
        raise WeightsError(f"{RELIABILITY_FILE}: {error}") from None


def format_checksums(folder: Path) -> str:
    """Return the content of SHA256SUMS for a folder, in the format of `sha256sum`."""
    return "".join(f"{sha256(folder / name)}  {name}\n" for name in _list_checksummed(folder))


def _list_checksummed(folder: Path) -> tuple[str, ...]:
    """Return the names of the files whose hashes are kept."""
    return (*CHECKSUMMED_FILES, *([RELIABILITY_FILE] if (folder / RELIABILITY_FILE).exists() else []))


def check_checksums(folder: Path) -> None:
    """Raise a WeightsError if a file does not match SHA256SUMS."""
    checksums = FolderFiles(folder).text(CHECKSUM_FILE)
    if checksums is None:
        raise WeightsError(f"{folder} has no {CHECKSUM_FILE}, which shows that its files are complete")
    for name in CHECKSUMMED_FILES:
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} has no {name}: a native folder keeps the names it was written with")
    lines = checksums.splitlines()  # in any order: a person may have run sha256sum again
    if any(line.endswith(f" {RELIABILITY_FILE}") for line in lines) and not (folder / RELIABILITY_FILE).is_file():
        raise WeightsError(f"{folder} has no {RELIABILITY_FILE}, which {CHECKSUM_FILE} names")
    actual = zip(_list_checksummed(folder), format_checksums(folder).splitlines(), strict=True)
    if wrong := [name for name, line in actual if line not in lines]:
        raise WeightsError(f"{folder}: {' and '.join(wrong)} is not as it was written: see {CHECKSUM_FILE}")
