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
from vitrail.weights.formats.naming import Beside, Naming, Reading, StrangersConfig, Tensors
from vitrail.weights.tensor_rules import Line

FORMAT, VERSION = "vitrail", 1
SUMS = "SHA256SUMS"
HASHED = ("model.safetensors", "config.json")
SET_ASIDE = "set_aside/"
"""Before the names of tensors that the model itself does not need."""
FAMILIES: dict[str, Any] = {"vit": VitArchitecture, "resnet": ResNetArchitecture, "timm": TimmArchitecture}


class NativeConfig(StrangersConfig):
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


class NativeNaming(Naming):
    """`encoder.blocks.0.attention.qkv.weight`; a network of timm's keeps the names it has there."""

    name = "native"

    def recognises(self, tensors: Tensors) -> bool:
        """By the patch embedding, or the root of a ResNet. What is timm's no name tells: see `of_timm`."""
        return bool({"patch_embed.projection.weight", "backbone.root.weight"} & tensors.keys())

    def of_timm(self, beside: Beside) -> bool:
        """Whether config.json tells of a network of timm's in a folder of ours."""
        found = beside.json("config.json")
        return (found.get("format"), found.get("family")) == (FORMAT, "timm")

    def understand(self, tensors: Tensors, beside: Beside) -> Reading:
        """Nothing is inferred: config.json says it all."""
        found = beside.json("config.json")
        if found.get("format") != FORMAT:
            raise WeightsError(
                "these are vitrail's own weights, and the config.json that belongs beside them is missing"
            )
        config: NativeConfig = NativeConfig.of(found, "config.json")
        if config.version > VERSION or config.family not in FAMILIES:
            raise WeightsError("config.json was written by a newer vitrail: pip install --upgrade vitrail")
        try:
            return Reading(
                FAMILIES[config.family](**config.architecture),
                Preprocessing(**config.preprocessing),
                labels=config.labels,
                training_cost=None if config.training_cost is None else TrainingCost(**config.training_cost),
                learned_from=config.learned_from,
                set_aside=[name for name in tensors if name.startswith(SET_ASIDE)],
            )
        except ConfigError as error:
            raise WeightsError(f"config.json: {error}") from None

    def lines(self, architecture: Architecture, dialect: str) -> list[Line]:
        """Every name stands for itself."""
        return [Line("peer.**", "**") if isinstance(architecture, TimmArchitecture) else Line("**", "**")]

    def refusal(self, architecture: Architecture) -> str | None:
        """Holds every architecture."""
        return None

    def dialect_to_write(self, model: ImageModel) -> str:
        """There is one."""
        return ""

    def name_set_aside(self, name: str) -> str:
        """Apart from our own."""
        return SET_ASIDE + name

    def earlier_origin(self, beside: Beside) -> Origin | None:
        """Where the weights came from before they were ours."""
        found = beside.json("config.json").get("origin")
        return None if found is None else Origin(**found)

    def check(self, beside: Beside) -> None:
        """Against the hashes."""
        if beside.folder is not None:
            check_sums(beside.folder)

    def finish(self, folder: Path) -> None:
        """The hashes."""
        (folder / SUMS).write_text(sums(folder))

    def companions(self, model: ImageModel) -> dict[str, Any]:
        """config.json."""
        return {
            "config.json": {
                **description(model.architecture, model.preprocessing, model.labels, model.origin),
                "training_cost": None if (cost := model.training_cost) is None else cost.model_dump(mode="json"),
                "learned_from": model.learned_from,
            }
        }


def description(
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


def sha256(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums(folder: Path) -> str:
    """The hashes of what is read back, in the format of `sha256sum`."""
    return "".join(f"{sha256(folder / name)}  {name}\n" for name in HASHED)


def check_sums(folder: Path) -> None:
    """Raise a WeightsError where a file is not the one that was written."""
    written = Beside(folder).text(SUMS)
    if written is None:
        raise WeightsError(f"{folder} has no {SUMS}: without it nothing tells whether the files are whole")
    for name in HASHED:
        if not (folder / name).is_file():
            raise WeightsError(f"{folder} has no {name}: a native folder keeps the names it was written with")
    lines = written.splitlines()  # in any order, as sha256sum may have written it again
    wrong = [name for name, line in zip(HASHED, sums(folder).splitlines(), strict=True) if line not in lines]
    if wrong:
        raise WeightsError(f"{folder}: {' and '.join(wrong)} is not as it was written, by the hashes in {SUMS}")
