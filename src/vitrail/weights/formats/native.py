"""vitrail's own folder: model.safetensors, config.json, a model card, and the hashes of the first two.

config.json says the whole architecture, the preprocessing, the labels and where the weights came from. SHA256SUMS is
in the format of `sha256sum`, so a person can check it too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitrail.config import Origin, Preprocessing, TrainingCost
from vitrail.errors import ConfigError, WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, TimmArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import CheckpointInfo, FolderFiles, ForeignConfig, Tensors, WeightFormat
from vitrail.weights.tensor_rules import TensorRule

FORMAT, VERSION = "vitrail", 1
CHECKSUM_FILE = "SHA256SUMS"
CHECKSUMMED_FILES = ("model.safetensors", "config.json")
UNUSED_PREFIX = "set_aside/"
"""Before the names of tensors that the model itself does not need."""
FAMILIES: dict[str, Any] = {"vit": VitArchitecture, "resnet": ResNetArchitecture, "timm": TimmArchitecture}


class NativeConfig(ForeignConfig):
    """What config.json must hold."""

    format: str
    version: int
    family: str
    architecture: dict[str, Any]
    preprocessing: dict[str, Any]
    labels: tuple[str, ...] | None = None
    origin: dict[str, Any] | None = None
    training_cost: dict[str, Any] | None = None
    learned_from: str | None = None


class NativeFormat(WeightFormat):
    """`encoder.blocks.0.attention.qkv.weight`; a network of timm's keeps the names it has there."""

    name = "native"

    def recognises(self, tensors: Tensors) -> bool:
        """By the patch embedding, or the root of a ResNet. What is timm's no name tells: see `holds_timm_network`."""
        return bool({"patch_embed.projection.weight", "backbone.root.weight"} & tensors.keys())

    def holds_timm_network(self, folder_files: FolderFiles) -> bool:
        """Whether config.json tells of a network of timm's in a folder of ours."""
        found = folder_files.json("config.json")
        return (found.get("format"), found.get("family")) == (FORMAT, "timm")

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Nothing is inferred: config.json says it all."""
        found = folder_files.json("config.json")
        if found.get("format") != FORMAT:
            raise WeightsError(
                "these are vitrail's own weights, and the config.json that belongs beside them is missing"
            )
        config: NativeConfig = NativeConfig.parse(found, "config.json")
        if config.version > VERSION or config.family not in FAMILIES:
            raise WeightsError("config.json was written by a newer vitrail: pip install --upgrade vitrail")
        try:
            return CheckpointInfo(
                FAMILIES[config.family](**config.architecture),
                Preprocessing(**config.preprocessing),
                labels=config.labels,
                training_cost=None if config.training_cost is None else TrainingCost(**config.training_cost),
                learned_from=config.learned_from,
                unused_tensors=[name for name in tensors if name.startswith(UNUSED_PREFIX)],
            )
        except ConfigError as error:
            raise WeightsError(f"config.json: {error}") from None

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """Every name stands for itself."""
        return [TensorRule("peer.**", "**") if isinstance(architecture, TimmArchitecture) else TensorRule("**", "**")]

    def explain_refusal(self, architecture: Architecture) -> str | None:
        """Holds every architecture."""
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        """There is one."""
        return ""

    def name_unused_tensor(self, name: str) -> str:
        """Apart from our own."""
        return UNUSED_PREFIX + name

    def read_origin(self, folder_files: FolderFiles) -> Origin | None:
        """Where the weights came from before they were ours."""
        found = folder_files.json("config.json").get("origin")
        return None if found is None else Origin(**found)

    def check_integrity(self, folder_files: FolderFiles) -> None:
        """Against the hashes."""
        if folder_files.folder is not None:
            check_checksums(folder_files.folder)

    def finish_folder(self, folder: Path) -> None:
        """The hashes."""
        (folder / CHECKSUM_FILE).write_text(format_checksums(folder))

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        """config.json."""
        return {
            "config.json": {
                **describe_config(model.architecture, model.preprocessing, model.labels, model.origin),
                "training_cost": None if (cost := model.training_cost) is None else cost.model_dump(mode="json"),
                "learned_from": model.learned_from,
            }
        }


def describe_config(
    architecture: Architecture | TimmArchitecture,
    preprocessing: Preprocessing,
    labels: Sequence[str] | None,
    origin: Origin | None,
) -> dict[str, Any]:
    """What config.json says."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "family": next(family for family, kind in FAMILIES.items() if isinstance(architecture, kind)),
        "architecture": architecture.model_dump(mode="json"),
        "preprocessing": preprocessing.model_dump(mode="json"),
        "labels": None if labels is None else list(labels),
        "origin": None if origin is None else origin.model_dump(mode="json"),
    }


def compute_sha256(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def format_checksums(folder: Path) -> str:
    """The hashes of what is read back, in the format of `sha256sum`."""
    return "".join(f"{compute_sha256(folder / name)}  {name}\n" for name in CHECKSUMMED_FILES)


def check_checksums(folder: Path) -> None:
    """Raise a WeightsError where a file is not the one that was written."""
    written = FolderFiles(folder).text(CHECKSUM_FILE)
    if written is None:
        raise WeightsError(f"{folder} has no {CHECKSUM_FILE}: without it nothing tells whether the files are whole")
    for name in CHECKSUMMED_FILES:
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} has no {name}: a native folder keeps the names it was written with")
    lines = written.splitlines()  # in any order, as sha256sum may have written it again
    wrong = [
        name
        for name, line in zip(CHECKSUMMED_FILES, format_checksums(folder).splitlines(), strict=True)
        if line not in lines
    ]
    if wrong:
        raise WeightsError(
            f"{folder}: {' and '.join(wrong)} is not as it was written, by the hashes in {CHECKSUM_FILE}"
        )
