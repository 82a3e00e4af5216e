"""What every naming of checkpoints can do: be recognised, be understood, and be written."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from vitrail.config import Preprocessing, explain
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.variants import SIZES
from vitrail.weights.files import TensorInfo
from vitrail.weights.pairs import Line

Tensors = Mapping[str, TensorInfo]

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

MOST_JSON = 20_000_000
"""Bytes; a config beside weights is never larger."""


@dataclass(frozen=True)
class Beside:
    """The other files in the folder of the weights; there may be no folder."""

    folder: Path | None = None
    wrapper: str | None = None
    """The key under which a training program had put the weights, where it did."""
    given: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What would lie in JSON files, where there are none."""

    def text(self, name: str) -> str | None:
        """A small text file, or None where there is none."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            if path.stat().st_size > MOST_JSON:
                raise WeightsError(f"{path} is far too large for what it should be")
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from None

    def json(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where there is no such file."""
        if name in self.given:
            return self.given[name]
        text = self.text(name)
        if text is None:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self.folder}/{name} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise WeightsError(f"{self.folder}/{name} is not a JSON object")
        return found

    def licence(self) -> str | None:
        """From the heading of a model card."""
        text = self.text("README.md") or ""
        if text.startswith("---"):
            for line in text.split("---")[1].splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "license" and value.strip():
                    return value.strip()
        return None


@dataclass
class Reading:
    """A checkpoint understood."""

    architecture: Architecture
    preprocessing: Preprocessing
    dialect: str = ""
    labels: tuple[str, ...] | None = None
    licence: str | None = None
    set_aside: list[str] = field(default_factory=list)
    """Tensors the model does not need, kept for the way back."""
    left_out: list[str] = field(default_factory=list)
    """Tensors of something else, such as a decoder; they are not read."""
    notes: list[str] = field(default_factory=list)
    """What was concluded rather than read."""


class Naming(ABC):
    """One way in which the world names the tensors of these models."""

    name: ClassVar[str]
    weights_file: ClassVar[str] = "model.safetensors"

    @abstractmethod
    def recognises(self, tensors: Tensors) -> bool:
        """From names and shapes alone."""

    @abstractmethod
    def understand(self, tensors: Tensors, beside: Beside) -> Reading:
        """The architecture and all that travels, from the tensors and what lies beside them."""

    @abstractmethod
    def lines(self, architecture: Architecture, dialect: str) -> list[Line]:
        """How its names correspond to ours."""

    @abstractmethod
    def refusal(self, architecture: Architecture, dialect: str) -> str | None:
        """Why an architecture cannot be written in this naming and dialect, or None."""

    @abstractmethod
    def written_dialect(self, model: ImageModel) -> str:
        """Which dialect to write a model in."""

    @abstractmethod
    def companions(self, model: ImageModel) -> dict[str, Any]:
        """The JSON files that go beside the weights."""


class StrangersConfig(BaseModel):
    """A config from elsewhere: what we need is checked, the rest is ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Any:
        """Checked, or a WeightsError."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise WeightsError(f"{where}: {explain(error, cls)}") from None


def count_blocks(tensors: Iterable[str], prefix: str) -> int:
    """How many numbers follow a prefix of names: blocks.0., blocks.1., …"""
    found = {name[len(prefix) :].split(".")[0].split("/")[0] for name in tensors if name.startswith(prefix)}
    return len({number for number in found if number.isdigit()})


def shape(tensors: Tensors, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there and have so many dimensions."""
    if name not in tensors:
        raise WeightsError(f"the tensor {name} is missing")
    found = tensors[name].shape
    if len(found) != dimensions or 0 in found:
        raise WeightsError(f"the tensor {name} has shape {found}, expected {dimensions} dimensions")
    return found


def grid_of_table(rows: int, owners: Mapping[str, int], hint: tuple[int, int] | None) -> tuple[tuple[int, int], str]:
    """The grid behind a position table, and which prefix tokens own a row of it.

    `owners`: rows before the patches for each possibility, the likeliest first. `hint`: the grid a config tells of.
    """
    for owner, prefix in owners.items():
        if hint is not None and hint[0] * hint[1] == rows - prefix:
            return hint, owner
    for owner, prefix in owners.items():
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return (side, side), owner
    raise WeightsError(
        f"the position table has {rows} rows, which make no square grid of patches, and no config beside the weights "
        "tells the image size"
    )


def heads_of_width(width: int, notes: list[str]) -> int:
    """The number of heads, which no tensor tells: by the known sizes, else 64 channels a head. Said in the notes."""
    for letter, size in SIZES.items():
        if size.width == width:
            notes.append(
                f"{size.num_heads} attention heads, as in every {letter} of width {width}: the file does not say"
            )
            return size.num_heads
    if width % 64:
        raise WeightsError(f"the number of attention heads is not in the file, and nothing is known of width {width}")
    notes.append(f"{width // 64} attention heads of 64 channels each: a guess, for the file does not say")
    return width // 64


def options_beyond(architecture: VitArchitecture, *allowed: str) -> str:
    """The options of an architecture, other than sizes and `allowed` ones, that are not the paper's.

    The norm's eps is not counted: no file tells it, and a conversion measures what a difference costs.
    """
    sizes = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
    for_training = ("dropout", "attention_dropout", "stochastic_depth")
    free = (*sizes, *for_training, "representation_size", "gelu", "norm_eps", *allowed)
    plain = VitArchitecture(**{name: getattr(architecture, name) for name in free})
    return ", ".join(n for n in VitArchitecture.model_fields if getattr(plain, n) != getattr(architecture, n))


def ratio(mlp_dim: int, width: int) -> int | float:
    """What others multiply a width with and round down to get the MLP's: half a unit more where it does not divide."""
    return mlp_dim // width if mlp_dim % width == 0 else (mlp_dim + 0.5) / width


def pixels(image_size: tuple[int, int], statistics: Mapping[str, Any], channels: int, **more: Any) -> Preprocessing:
    """Preprocessing from three-channel statistics; other numbers of channels get 0.5."""
    if channels != 3:
        statistics = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    return Preprocessing(image_size=image_size, **{**statistics, **more})
