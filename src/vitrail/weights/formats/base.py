"""The base class of all weight formats, and what the formats share.

To add a format: subclass `WeightFormat` in a file of its own here, and list it in `FORMATS` of weights/load.py.
"""

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
from vitrail.model.relative_bias import CLASS_TOKEN_ROWS
from vitrail.model.variants import SIZES
from vitrail.reliability.record import Reliability
from vitrail.system.files import describe_reason, read_regular_file
from vitrail.tasks.task import Task
from vitrail.weights.files import TensorInfo, check_link
from vitrail.weights.known import KnownFacts
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
    """The small text files that lie beside the weights. Without a folder, all of them are empty."""

    folder: Path | None = None
    wrapper_key: str | None = None
    """The key of the checkpoint that held the weights, such as "model"; None when they were at the top level."""
    contents: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """JSON objects by file name, used instead of the files of that name."""
    config_not_used: str = ""
    """Why the folder's config.json was not used; empty if it was, or if there is none."""
    known: KnownFacts = field(default_factory=KnownFacts)
    """What the caller knows and no file says."""

    def text(self, name: str) -> str | None:
        """Return the content of a small text file, or None when there is no such file."""
        if self.folder is None:
            return None
        path = self.folder / name
        try:
            check_link(path)
            return read_regular_file(path, MAX_TEXT_BYTES).decode()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {describe_reason(error)}") from None
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from None

    @property
    def has_config(self) -> bool:
        """Whether there is a config.json."""
        return bool(self.json("config.json"))

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, or an empty one when there is no such file."""
        if name in self.contents:
            return self.contents[name]
        text = self.text(name)
        if text is None:
            return {}
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightsError(f"{self.folder}/{name} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise WeightsError(f"{self.folder}/{name} is not a JSON object")
        return content

    def read_licence(self) -> str | None:
        """Return the licence in the heading of the model card, or None when the card names none."""
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
    """What a format finds out about a checkpoint before any tensor is read."""

    architecture: Architecture
    preprocessing: Preprocessing
    dialect: str = ""
    labels: tuple[str, ...] | None = None
    task: Task | None = None
    """The task, if it is not labels."""
    licence: str | None = None
    training_cost: TrainingCost | None = None
    learned_from: str | None = None
    chosen_by: str | None = None
    reliability: Reliability | None = None
    unused_tensors: list[str] = field(default_factory=list)
    """Names of tensors that the model does not need; they are kept, so that a conversion back is complete."""
    ignored_tensors: list[str] = field(default_factory=list)
    """Names of tensors that belong to something else, such as a decoder; they are not read."""
    notes: list[str] = field(default_factory=list)
    """Facts that were concluded, because the files do not say them."""


class WeightFormat(ABC):
    """How one library stores these models: names and shapes of tensors, and the config files beside them."""

    name: ClassVar[str]
    weights_file: ClassVar[str] = "model.safetensors"

    @abstractmethod
    def recognises(self, tensors: Tensors) -> bool:
        """Return whether a checkpoint is in this format, judged by the names and shapes of its tensors."""

    @abstractmethod
    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Find the architecture, preprocessing and labels from the shapes of the tensors and the config files."""

    @abstractmethod
    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        """Return the rules that rename and reshape every tensor, between this format and vitrail's own names."""

    @abstractmethod
    def explain_refusal(self, architecture: Architecture) -> str | None:
        """Return why an architecture cannot be written in this format, or None if it can."""

    @abstractmethod
    def choose_dialect(self, model: ImageModel) -> str:
        """Return the dialect to write a model in. A dialect is a variant of the names, such as a prefix."""

    @abstractmethod
    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        """Return the JSON files to write beside the weights, by file name."""

    def finish_model(self, model: ImageModel, notes: list[str]) -> ImageModel:
        """Return a loaded model, changed if values in its file ask for it; add a note for a change."""
        return model

    def describe_lost_task(self, model: ImageModel) -> str:
        """Return a sentence about what this format does not keep of the model's task; empty if it keeps all."""
        if model.stored_task is None:
            return ""
        return (
            f"this format has no place for the task, {model.stored_task.summarise()}: its library takes the outputs "
            "for scores of classes, and --to native keeps the task"
        )

    def adapt_model(self, model: ImageModel) -> ImageModel:
        """Return a model that the format does not refuse, or one that computes the same under names that it has."""
        return model

    def name_unused_tensor(self, name: str) -> str:
        """Return the name in the file of a tensor that the model does not need."""
        return name

    def check_integrity(self, folder_files: FolderFiles) -> None:
        """Raise a WeightsError if the folder has checksums and a file does not match them."""

    def finish_folder(self, folder: Path) -> None:
        """Write what must come after all other files, such as checksums."""

    def read_origin(self, folder_files: FolderFiles) -> Origin | None:
        """Return the origin that the folder itself records, or None."""
        return None


class ForeignConfig(BaseModel):
    """A config file of another library. Needed keys are checked; other keys and nulls are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Any:
        """Return the checked config; raise a WeightsError that names the file `where` if a value is wrong."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise WeightsError(f"{where}: {explain(error, cls)}") from None


class CompanionFile(ForeignConfig):
    """vitrail.json: holds preprocessing and labels beside weights whose own format has no place for them."""

    image_size: tuple[int, int] | None = None
    num_heads: int | None = None
    preprocessing: dict[str, Any] | None = None
    labels: tuple[str, ...] | None = None
    licence: str | None = None

    @classmethod
    def read(cls, folder_files: FolderFiles) -> CompanionFile:
        """Read the file; without one, every field is None."""
        companion: CompanionFile = cls.parse(folder_files.json(COMPANION_FILE), COMPANION_FILE)
        return companion

    @classmethod
    def describe_model(cls, model: ImageModel) -> dict[str, Any]:
        """Return the content of the file for a model, by file name."""
        content = {
            "image_size": model.image_size,
            "num_heads": getattr(model.architecture, "num_heads", None),
            "preprocessing": model.preprocessing.model_dump(mode="json"),
            "labels": model.labels,
            "licence": None if model.origin is None else model.origin.licence,
        }
        return {COMPANION_FILE: content}

    def complete(self, checkpoint: CheckpointInfo) -> CheckpointInfo:
        """Replace what was concluded about a checkpoint by what the file says."""
        if self.preprocessing is not None:
            checkpoint.preprocessing = Preprocessing(**self.preprocessing)
            checkpoint.notes = [note for note in checkpoint.notes if not note.startswith("images are")]
        checkpoint.labels = self.labels
        checkpoint.licence = self.licence or checkpoint.licence
        return checkpoint


def count_blocks(tensors: Iterable[str], prefix: str) -> int:
    """Count the different numbers that follow `prefix` in the names: blocks.0., blocks.1., …"""
    words = {name[len(prefix) :].split(".")[0].split("/")[0] for name in tensors if name.startswith(prefix)}
    return len({number for number in words if number.isdigit()})


def read_shape(tensors: Tensors, name: str, dimensions: int) -> tuple[int, ...]:
    """Return the shape of a tensor; raise a WeightsError if it is missing or has other than `dimensions` axes."""
    if name not in tensors:
        raise WeightsError(f"the tensor {name} is missing")
    shape = tensors[name].shape
    if len(shape) != dimensions or 0 in shape:
        raise WeightsError(f"the tensor {name} has shape {shape}, expected {dimensions} dimensions")
    return shape


def read_size(tensors: Tensors, name: str, dimensions: int, axis: int = 0) -> int | None:
    """Return the length of one axis of a tensor, or None when there is no such tensor."""
    return read_shape(tensors, name, dimensions)[axis] if name in tensors else None


def read_patch_size(kernel: tuple[int, ...], axes: tuple[int, int]) -> int:
    """Return the patch size from the shape of the projection's kernel, whose sides must be equal."""
    first, second = (kernel[axis] for axis in axes)
    if first != second:
        raise WeightsError(f"its patches are {first}×{second} pixels, and vitrail's are square")
    return first


def check_agreement(where: str, config: Mapping[str, Any], actual: Mapping[str, int]) -> None:
    """Raise a WeightsError if the config names a value other than the actual one of the weights."""
    for name, value in actual.items():
        if config.get(name) is not None and config[name] != value:
            raise WeightsError(f"{where} says {name} = {config[name]}, but the weights have {value}")


def list_residual_units(backbone: Backbone) -> list[tuple[str, int, int]]:
    """Return vitrail's name, the stage and the index in that stage (both from 0) of every residual unit."""
    places = [(stage, block) for stage, blocks in enumerate(backbone.blocks) for block in range(blocks)]
    return [(f"backbone.units.{index}", stage, block) for index, (stage, block) in enumerate(places)]


def explain_backbone_refusal(backbone: Backbone) -> str | None:
    """Return why the authors' ResNets, and so the formats that hold them, lack this backbone; None if they do not."""
    if backbone.root != "large":
        return f"its ResNets have a large root, 7×7 and a pooling, and this model has a {backbone.root} one"
    plain = Backbone.model_fields["stage_channels"].default
    if backbone.stage_channels != plain:
        return (
            f"the first stage of its ResNets has {plain} channels, times a whole width factor, and this model's "
            f"has {backbone.stage_channels}"
        )
    return None


def infer_grid(rows: int, owners: Mapping[str, int], hint: tuple[int, int] | None) -> tuple[tuple[int, int], str]:
    """Infer the patch grid of a position table, and which of the tokens before the patches have a row in it.

    Args:
        rows: the number of rows of the table.
        owners: for each value of `position_prefix`, the rows before the patches; the most likely value first.
        hint: the grid that the caller knows, else the one that follows from the config's image size, if it names one.
    """
    for owner, prefix in owners.items():
        if hint is not None and hint[0] * hint[1] == rows - prefix:
            return hint, owner
    for owner, prefix in owners.items():
        side = math.isqrt(max(rows - prefix, 0))
        if side and side * side == rows - prefix:
            return (side, side), owner
    said = f"a grid of {hint[0]}×{hint[1]} does not fit, nor does a square one" if hint else "that is no square grid"
    raise WeightsError(
        f"the position table has {rows} rows for patches and other tokens, and {said}: if you know its grid "
        'of patches, give known={"grid": (rows, columns)}, or --known grid=ROWSxCOLUMNS to convert'
    )


def infer_relative_grid(rows: int, class_token: bool, hint: tuple[int, int] | None) -> tuple[int, int]:
    """Infer the patch grid, R×C, of a table of relative positions: (2R − 1)·(2C − 1) rows, and those of a class token.

    Args:
        rows: the number of rows of the table.
        class_token: whether the table has rows for a class token.
        hint: as for `infer_grid`.
    """
    offsets = rows - (CLASS_TOKEN_ROWS if class_token else 0)
    if hint is not None and (2 * hint[0] - 1) * (2 * hint[1] - 1) == offsets:
        return hint
    side = math.isqrt(max(offsets, 0))
    if side * side != offsets or side % 2 == 0:
        raise WeightsError(
            f"the table of relative positions has {rows} rows, which belong to no square grid of patches"
        )
    return (side + 1) // 2, (side + 1) // 2


def guess_num_heads(width: int, notes: list[str]) -> int:
    """Guess the number of heads, which no tensor shows, from the known sizes, else as width / 64; add a note."""
    for letter, size in SIZES.items():
        if size.width == width and letter != "b":  # nobody has released a b, and an S is as wide
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
    """List the options that differ from the paper's, except sizes and the `allowed` ones.

    The norm's eps is not listed: no file stores it, and a conversion measures the effect of a difference. Neither is
    `position_resize`: it changes nothing at the model's own size, and a conversion notes a difference.
    """
    sizes = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
    for_training = ("dropout", "attention_dropout", "stochastic_depth")
    free = (*sizes, *for_training, "representation_size", "gelu", "norm_eps", "position_resize", *allowed)
    plain = VitArchitecture(**{name: getattr(architecture, name) for name in free})
    return ", ".join(n for n in VitArchitecture.model_fields if getattr(plain, n) != getattr(architecture, n))


def describe_left_out_labels(labels: int, classes: int) -> str:
    """Return the note for labels in a config that cannot be those of the model's classes."""
    return f"the {labels} labels of its config are left out: they are not those of {classes} classes"


def compute_mlp_ratio(mlp_dim: int, width: int) -> int | float:
    """Return the factor that other libraries multiply the width by, and round down, to get `mlp_dim`."""
    return mlp_dim // width if mlp_dim % width == 0 else (mlp_dim + 0.5) / width


def build_preprocessing(
    image_size: tuple[int, int],
    channels: int,
    default: Mapping[str, Any],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **more: Any,
) -> Preprocessing:
    """Build the preprocessing from the config's mean and std, else from `default` (three channels), else 0.5.

    Configs of models with other channels often still hold three values; then every channel gets their average.
    """
    if channels != 3:
        default = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    mean, std = (
        values if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (mean or default["mean"], std or default["std"])
    )
    return Preprocessing(image_size=image_size, mean=mean, std=std, **more)
