"""vitrail's own folder: model.safetensors, config.json, a model card, and the hashes of the first two.

config.json says the whole architecture, the preprocessing, the labels and where the weights came from. SHA256SUMS is
in the format of `sha256sum`, so a person can check it too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from vitrail.config import Origin, Preprocessing
from vitrail.errors import ConfigError, WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.create import build
from vitrail.weights.naming import Beside, Naming, Reading, StrangersConfig, Tensors
from vitrail.weights.pairs import Line

FORMAT, VERSION = "vitrail", 1
SUMS = "SHA256SUMS"
HASHED = ("model.safetensors", "config.json")
SET_ASIDE = "set_aside/"
"""Before the names of tensors that the model itself does not need."""
FAMILIES: dict[str, type[Architecture]] = {"vit": VitArchitecture, "resnet": ResNetArchitecture}


class NativeConfig(StrangersConfig):
    """What config.json must hold."""

    format: str
    version: int
    family: str
    architecture: dict[str, Any]
    preprocessing: dict[str, Any]
    labels: tuple[str, ...] | None = None
    origin: dict[str, Any] | None = None


class NativeNaming(Naming):
    """`encoder.blocks.0.attention.qkv.weight`."""

    name = "native"

    def recognises(self, tensors: Tensors) -> bool:
        """By the patch embedding, or the root of a ResNet."""
        return bool({"patch_embed.projection.weight", "backbone.root.weight"} & tensors.keys())

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
                set_aside=[name for name in tensors if name.startswith(SET_ASIDE)],
            )
        except ConfigError as error:
            raise WeightsError(f"config.json: {error}") from None

    def origin(self, beside: Beside) -> Origin | None:
        """Where the weights came from before they were ours."""
        found = beside.json("config.json").get("origin")
        return None if found is None else Origin(**found)

    def lines(self, architecture: Architecture, dialect: str) -> list[Line]:
        """Every name stands for itself."""
        return [Line(name, name) for name in build(architecture).state_dict()]

    def refusal(self, architecture: Architecture, dialect: str) -> str | None:
        """Holds every architecture."""
        return None

    def written_dialect(self, model: ImageModel) -> str:
        """There is one."""
        return ""

    def companions(self, model: ImageModel) -> dict[str, Any]:
        """config.json."""
        return {
            "config.json": {
                "format": FORMAT,
                "version": VERSION,
                "family": "resnet" if isinstance(model.architecture, ResNetArchitecture) else "vit",
                "architecture": model.architecture.model_dump(mode="json"),
                "preprocessing": model.preprocessing.model_dump(mode="json"),
                "labels": None if model.labels is None else list(model.labels),
                "origin": None if model.origin is None else model.origin.model_dump(mode="json"),
            }
        }


def sha256(path: Path) -> str:
    """Of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sums(folder: Path) -> None:
    """The hashes of what is read back, in the format of `sha256sum`."""
    (folder / SUMS).write_text("".join(f"{sha256(folder / name)}  {name}\n" for name in HASHED))


def check_sums(folder: Path) -> None:
    """Raise a WeightsError where a file is not the one that was written."""
    text = Beside(folder).text(SUMS)
    if text is None:
        raise WeightsError(f"{folder} has no {SUMS}: without it nothing tells whether the files are whole")
    sums = dict(line.split("  ", 1)[::-1] for line in text.splitlines() if "  " in line)
    for name in HASHED:
        if sums.get(name) != sha256(folder / name):
            raise WeightsError(
                f"{folder / name} is not the file that was written: its SHA-256 is not the one in {SUMS}"
            )
