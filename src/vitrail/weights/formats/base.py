"""What every naming of checkpoints can do: be recognised, be understood, and be written."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from vitrail.config import Origin, Preprocessing, TrainingCost, explain
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Backbone, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.variants import SIZES
from vitrail.weights.files import TensorInfo
from vitrail.weights.tensor_rules import TensorRule

Tensors = Mapping[str, TensorInfo]

IMAGENET = {"origin": "ImageNet", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP = {"origin": "CLIP", "mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
HALF = {"origin": "Google", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

SO400M_WIDTH = 1152
"""The width of the "shape-optimised" ViT of SigLIP."""
COMPANION_FILE = "vitrail.json"
MAX_TEXT_BYTES = 20_000_000
"""Bytes; a config beside weights is never larger."""


@dataclass(frozen=True)
class FolderFiles:
    """The other files in the folder of the weights; there may be no folder."""

    folder: Path | None = None
    wrapper: str | None = None
    """The key under which a training program had put the weights, where it did."""
    given: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """What would lie in JSON files, where there are none."""
    ignored: bool = False
    """There is a config.json that may speak of other weights, and was not looked at."""

    def text(self, name: str) -> str | None:
        """A small text file, or None where there is none."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            if path.stat().st_size > MAX_TEXT_BYTES:
                raise WeightsError(f"{path} is far too large for what it should be")
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from None

    @property
    def described(self) -> bool:
        """Whether there is a config.json at all."""
        return bool(self.json("config.json"))

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
        """From the heading of a model card, if there is one that can be read."""
        try:
            text = self.text("README.md") or ""
        except WeightsError:
            return None
        if text.startswith("---"):
            for line in text.split("---")[1].splitlines():
                key, _, value = line.partition(":")
                if key.strip() == "license" and value.strip():
                    return value.strip()
        return None


@dataclass
class CheckpointInfo:
    """A checkpoint understood."""

    architecture: Architecture
    preprocessing: Preprocessing
    dialect: str = ""
    labels: tuple[str, ...] | None = None
    licence: str | None = None
    training_cost: TrainingCost | None = None
    learned_from: str | None = None
    unused_tensors: list[str] = field(default_factory=list)
    """Tensors the model does not need, kept for the way back."""
    left_out: list[str] = field(default_factory=list)
    """Tensors of something else, such as a decoder; they are not read."""
    notes: list[str] = field(default_factory=list)
    """What was concluded rather than read."""


class WeightFormat(ABC):
    """One way in which the world names the tensors of these models."""

    name: ClassVar[str]
    weights_file: ClassVar[str] = "model.safetensors"

    @abstractmethod
    def recognises(self, tensors: Tensors) -> bool:
        """From names and shapes alone."""

    @abstractmethod
    def understand(self, tensors: Tensors, beside: FolderFiles) -> CheckpointInfo:
        """The architecture and all that travels, from the tensors and what lies beside them."""

    @abstractmethod
    def lines(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """How its names correspond to ours."""

    @abstractmethod
    def refusal(self, architecture: Architecture) -> str | None:
        """Why an architecture cannot be written in this naming, or None."""

    @abstractmethod
    def dialect_to_write(self, model: ImageModel) -> str:
        """Which dialect to write a model in: one that the library behind the naming reads."""

    @abstractmethod
    def companions(self, model: ImageModel) -> dict[str, Any]:
        """The JSON files that go beside the weights."""

    def equivalent(self, model: ImageModel) -> ImageModel:
        """The model, or one that computes the same and that the naming has words for."""
        return model

    def name_set_aside(self, name: str) -> str:
        """How a tensor that the model does not need is called in a file."""
        return name

    def check(self, beside: FolderFiles) -> None:
        """Raise a WeightsError where a folder carries the means to see that it is damaged, and is."""

    def finish(self, folder: Path) -> None:
        """What is to be written after everything else."""

    def earlier_origin(self, beside: FolderFiles) -> Origin | None:
        """Where a folder says that its weights came from before."""
        return None


class ForeignConfig(BaseModel):
    """A config from elsewhere: what we need is checked, the rest is ignored, and so is a null."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Any:
        """Checked, or a WeightsError."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise WeightsError(f"{where}: {explain(error, cls)}") from None


class CompanionFile(ForeignConfig):
    """A small file of ours beside weights whose own format has no place for what travels with them."""

    image_size: tuple[int, int] | None = None
    num_heads: int | None = None
    preprocessing: dict[str, Any] | None = None
    labels: tuple[str, ...] | None = None
    licence: str | None = None

    @classmethod
    def read(cls, beside: FolderFiles) -> CompanionFile:
        """From its file; empty where there is none."""
        companion: CompanionFile = cls.of(beside.json(COMPANION_FILE), COMPANION_FILE)
        return companion

    @classmethod
    def written(cls, model: ImageModel) -> dict[str, Any]:
        """As JSON, under its file's name."""
        found = {
            "image_size": model.image_size,
            "num_heads": getattr(model.architecture, "num_heads", None),
            "preprocessing": model.preprocessing.model_dump(mode="json"),
            "labels": model.labels,
            "licence": None if model.origin is None else model.origin.licence,
        }
        return {COMPANION_FILE: found}

    def completes(self, reading: CheckpointInfo) -> CheckpointInfo:
        """What it tells of replaces what was concluded."""
        if self.preprocessing is not None:
            reading.preprocessing = Preprocessing(**self.preprocessing)
            reading.notes = [note for note in reading.notes if not note.startswith("images are")]
        reading.labels = self.labels
        reading.licence = self.licence or reading.licence
        return reading


def count_blocks(tensors: Iterable[str], prefix: str) -> int:
    """How many numbers follow a prefix of names: blocks.0., blocks.1., …"""
    found = {name[len(prefix) :].split(".")[0].split("/")[0] for name in tensors if name.startswith(prefix)}
    return len({number for number in found if number.isdigit()})


def read_shape(tensors: Tensors, name: str, dimensions: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there and have so many dimensions."""
    if name not in tensors:
        raise WeightsError(f"the tensor {name} is missing")
    found = tensors[name].shape
    if len(found) != dimensions or 0 in found:
        raise WeightsError(f"the tensor {name} has shape {found}, expected {dimensions} dimensions")
    return found


def read_size(tensors: Tensors, name: str, dimensions: int, axis: int = 0) -> int | None:
    """One side of a tensor, or None where there is no such tensor."""
    return read_shape(tensors, name, dimensions)[axis] if name in tensors else None


def read_patch_size(kernel: tuple[int, ...], axes: tuple[int, int]) -> int:
    """The side of a patch projection's kernel."""
    first, second = (kernel[axis] for axis in axes)
    if first != second:
        raise WeightsError(f"its patches are {first}×{second} pixels, and vitrail's are square")
    return first


def check_agreement(where: str, told: Mapping[str, Any], found: Mapping[str, int]) -> None:
    """Raise a WeightsError where a config tells of another model than the one in the file."""
    for name, value in found.items():
        if told.get(name) is not None and told[name] != value:
            raise WeightsError(f"{where} tells of {name} {told[name]}, and the weights hold {value}")


def list_residual_units(backbone: Backbone) -> list[tuple[str, int, int]]:
    """Our name of every residual unit, with its stage and its place there, both counted from 0."""
    places = [(stage, block) for stage, blocks in enumerate(backbone.blocks) for block in range(blocks)]
    return [(f"backbone.units.{index}", stage, block) for index, (stage, block) in enumerate(places)]


def infer_grid(rows: int, owners: Mapping[str, int], hint: tuple[int, int] | None) -> tuple[tuple[int, int], str]:
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


def guess_num_heads(width: int, notes: list[str]) -> int:
    """The number of heads, which no tensor tells: by the known sizes, else 64 channels a head. Said in the notes."""
    for letter, size in SIZES.items():
        if size.width == width:
            notes.append(
                f"{size.num_heads} attention heads, as in every {letter} of width {width}: the file does not say"
            )
            return size.num_heads
    if width == SO400M_WIDTH:
        notes.append(f"16 attention heads, as in every SO400M of width {width}: the file does not say")
        return 16
    if width % 64:
        raise WeightsError(f"the number of attention heads is not in the file, and nothing is known of width {width}")
    notes.append(f"{width // 64} attention heads of 64 channels each: a guess, for the file does not say")
    return width // 64


def find_unsupported_options(architecture: VitArchitecture, *allowed: str) -> str:
    """The options of an architecture, other than sizes and `allowed` ones, that are not the paper's.

    The norm's eps is not counted: no file tells it, and a conversion measures what a difference costs.
    """
    sizes = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
    for_training = ("dropout", "attention_dropout", "stochastic_depth")
    free = (*sizes, *for_training, "representation_size", "gelu", "norm_eps", *allowed)
    plain = VitArchitecture(**{name: getattr(architecture, name) for name in free})
    return ", ".join(n for n in VitArchitecture.model_fields if getattr(plain, n) != getattr(architecture, n))


def compute_mlp_ratio(mlp_dim: int, width: int) -> int | float:
    """What others multiply a width with and round down to get the MLP's: half a unit more where it does not divide."""
    return mlp_dim // width if mlp_dim % width == 0 else (mlp_dim + 0.5) / width


def build_preprocessing(
    image_size: tuple[int, int],
    channels: int,
    default: Mapping[str, Any],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **more: Any,
) -> Preprocessing:
    """Preprocessing from what a config tells; else from an origin's default, which is for three channels, else 0.5.

    Configs of models with other channels often still hold three values: the average then stands for every channel.
    """
    if channels != 3:
        default = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    mean, std = (
        told if len(told) == channels else (sum(told) / len(told),) * channels
        for told in (mean or default["mean"], std or default["std"])
    )
    return Preprocessing(image_size=image_size, mean=mean, std=std, **more)
