"""Read timm's config.json: the name of the model, its arguments, preprocessing and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from vitrail.config import Preprocessing
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Rotary
from vitrail.weights.formats.base import (
    FolderFiles,
    ForeignConfig,
    build_preprocessing,
    describe_left_out_labels,
    guess_num_heads,
)
from vitrail.weights.formats.timm_names import Facts

POOLS = {"token": "class", "avg": "average", "map": "attention"}
GELUS = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}


class PretrainedConfig(ForeignConfig):
    """The preprocessing, licence and labels in timm's config."""

    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    license: str | None = None
    label_names: list[str] | dict[str, Any] | None = None


class ModelArguments(ForeignConfig):
    """Arguments of timm's model constructors that the tensors do not show. The defaults are timm's."""

    num_heads: int | None = None
    depth: int | None = None
    embed_dim: int | None = None
    act_layer: str | None = None
    global_pool: str | None = None
    pool_include_prefix: bool = False
    attn_pool_num_heads: int | None = None
    pos_embed: str | None = None
    use_abs_pos_emb: bool = True
    init_values: float | None = None
    img_size: int | tuple[int, int] | None = None
    final_norm: bool = True
    use_post_transformer_norm: bool | None = None
    use_fc_norm: bool | None = None
    use_post_norm: bool = False
    use_rot_pos_emb: bool = False
    rope_type: str = "cat"
    rope_temperature: float = 10000.0
    rope_grid_offset: float = 0.0
    rope_grid_indexing: Literal["ij", "xy"] = "ij"
    rope_rotate_half: bool = False
    rope_shift_coords: float | None = None
    rope_jitter_coords: float | None = None
    rope_rescale_coords: float | None = None
    ref_feat_shape: int | tuple[int, int] | None = None
    norm_eps: float | None = None
    """This and the next two are no arguments of timm's: see timm_names.py."""
    head_dim: int | None = None
    is_eva: bool = False

    @property
    def has_table(self) -> bool:
        """Whether there should be a position table."""
        return self.pos_embed != "none" and self.use_abs_pos_emb

    @property
    def has_final_norm(self) -> bool:
        """Whether a norm follows the last block, before or behind the pooling."""
        return self.final_norm and not (self.use_post_transformer_norm is False and self.use_fc_norm is False)


class TimmConfig(ForeignConfig):
    """config.json as timm writes it to the hub; older ones have no `pretrained_cfg` and everything at the top."""

    architecture: str = ""
    num_classes: int | None = None
    global_pool: str | None = None
    label_names: list[str] | dict[str, Any] | None = None
    pretrained: PretrainedConfig = Field(default_factory=PretrainedConfig)
    arguments: ModelArguments = Field(default_factory=ModelArguments)
    """Only what the file says; `complete_arguments` adds what the model's name says."""


def read_config(folder_files: FolderFiles) -> TimmConfig:
    """From what lies beside the weights; empty where nothing does."""
    values = folder_files.json("config.json")
    inner = {"pretrained": values.get("pretrained_cfg") or values, "arguments": values.get("model_args") or {}}
    config: TimmConfig = TimmConfig.parse({**values, **inner}, "config.json")
    return config


def complete_arguments(config: TimmConfig, facts: Facts) -> ModelArguments:
    """Return the arguments of the config file; those that it does not name come from `facts`."""
    said = {name: getattr(config.arguments, name) for name in config.arguments.model_fields_set}
    pool = {"global_pool": config.global_pool} if config.global_pool else {}
    arguments: ModelArguments = ModelArguments.parse({**facts, **pool, **said}, "config.json")
    return arguments


def read_pool(arguments: ModelArguments) -> str | None:
    """Return the pooling that a config names, or None."""
    pool = arguments.global_pool
    if pool and pool not in POOLS:
        raise WeightsError(f"timm's pooling {pool!r} is none of {', '.join(POOLS)}, which vitrail has")
    if arguments.pool_include_prefix and pool != "map":
        raise WeightsError("its pooling includes the class token or registers, which vitrail's does not")
    return POOLS[pool] if pool else None


def read_gelu(config: TimmConfig, arguments: ModelArguments, notes: list[str]) -> str:
    """Return the form of GELU: from the arguments, else the exact form."""
    if not config.architecture:
        notes.append("the exact form of GELU, as almost always in timm: no config beside the weights says which")
    if arguments.act_layer is not None and arguments.act_layer not in GELUS:
        raise WeightsError(
            f"timm's activation {arguments.act_layer!r} is none of {', '.join(GELUS)}, which vitrail has"
        )
    return GELUS[arguments.act_layer or "gelu"]


def read_num_heads(arguments: ModelArguments, width: int, seen: int | None, notes: list[str]) -> int:
    """Return the number of heads: from the arguments, from tensors that show it (`seen`), else guessed."""
    if arguments.num_heads or seen:
        return arguments.num_heads or seen or 0
    if arguments.head_dim and width % arguments.head_dim == 0:
        return width // arguments.head_dim
    return guess_num_heads(width, notes)


def read_rotary(arguments: ModelArguments) -> Rotary | None:
    """Return the rotary positions that the arguments describe."""
    if not arguments.use_rot_pos_emb:
        return None
    kind, base = arguments.rope_type, arguments.rope_temperature
    first = "column" if arguments.rope_grid_indexing == "xy" else "row"
    sides = arguments.ref_feat_shape
    changes = {name: getattr(arguments, f"rope_{name}_coords") for name in ("shift", "jitter", "rescale")}
    if kind not in ("cat", "mixed", "dinov3"):
        raise WeightsError(f"timm's rotary positions {kind!r} are none of cat, mixed and dinov3, which vitrail has")
    if (kind == "dinov3") != arguments.rope_rotate_half or (kind == "dinov3" and arguments.rope_grid_offset):
        raise WeightsError(f"timm's rotary positions {kind!r} turn dimensions in another order than vitrail's")
    if kind == "dinov3":
        return Rotary(base=base, **changes)
    if kind == "mixed":
        return Rotary(coordinates="index", layout="pairs", base=base, first=first, learned=True)
    offset, reference = arguments.rope_grid_offset, (sides, sides) if isinstance(sides, int) else sides
    return Rotary(coordinates="index", layout="pairs", base=base, first=first, offset=offset, reference_grid=reference)


def read_image_size(config: TimmConfig) -> tuple[int, int] | None:
    """Return the height and width that the config names, or None."""
    sides = config.arguments.img_size or (config.pretrained.input_size or (0, 0, 0))[1:]
    size = (sides, sides) if isinstance(sides, int) else (sides[0], sides[1])
    return size if all(size) else None


def read_labels(config: TimmConfig, classes: int, notes: list[str]) -> tuple[str, ...] | None:
    """Return the labels, or None if there are not as many as classes; add a note if they are left out."""
    names = config.label_names or config.pretrained.label_names or ()
    if len(names) == classes and classes:
        return tuple(str(name) for name in names)
    if names and classes:
        notes.append(describe_left_out_labels(len(names), classes))
    return None


def read_preprocessing(
    config: TimmConfig, architecture: Architecture, default: Mapping[str, Any], notes: list[str]
) -> Preprocessing:
    """Read the preprocessing, else use `default`; add a note for every option that vitrail does not have."""
    pretrained = config.pretrained
    if pretrained.mean is None:
        notes.append(f"pixels are scaled as {default['origin']}'s are: no config beside the weights says how")
    if pretrained.crop_mode not in ("center", "squash"):
        notes.append(f"the crop {pretrained.crop_mode!r} is replaced by the centre")
    if pretrained.interpolation not in ("bilinear", "bicubic"):
        notes.append(f"the filter {pretrained.interpolation!r} of the resize is replaced by bicubic")
    if not 0 < pretrained.crop_pct <= 1:
        notes.append(f"the crop fraction {pretrained.crop_pct} is replaced by 1")
    return build_preprocessing(
        architecture.image_size,
        architecture.in_channels,
        default,
        pretrained.mean,
        pretrained.std,
        resize="squash" if pretrained.crop_mode == "squash" else "cover",
        crop_fraction=pretrained.crop_pct if 0 < pretrained.crop_pct <= 1 else 1.0,
        crop_rounding="even",  # timm crops with torchvision
        interpolation="bilinear" if pretrained.interpolation == "bilinear" else "bicubic",
    )
