"""The vision towers of OpenAI's CLIP and of OpenCLIP under their own names; text towers are left out.

The projection into the space of texts (`visual.proj`) is kept among the unused tensors and not applied.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vitrail.config import Preprocessing
from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, Epsilon, Positive, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import (
    CLIP,
    CheckpointInfo,
    CompanionFile,
    FolderFiles,
    ForeignConfig,
    Tensors,
    WeightFormat,
    build_preprocessing,
    check_agreement,
    compute_mlp_ratio,
    count_blocks,
    find_unsupported_options,
    guess_num_heads,
    infer_grid,
    read_patch_size,
    read_shape,
)
from vitrail.weights.formats.huggingface_towers import ADD_TOKEN_AXIS
from vitrail.weights.tensor_rules import TensorRule, add_prefix, to_patch_kernel

PREFIXES = ("visual.", "module.visual.", "model.visual.", "")
LAYER = "transformer.resblocks.{i}."
MARKS = ("conv1.weight", f"{LAYER.format(i=0)}attn.in_proj_weight")
OPENAI_MARKS = ("input_resolution", "context_length", "vocab_size")
"""Numbers that OpenAI's files hold beside the weights."""
CONFIG_FILE = "open_clip_config.json"
OPTIONS = {"class_token": True, "input_norm": True, "patch_bias": False}
POOLINGS = {"tok": "class", "avg": "average"}
DEFAULT_EPS = 1e-5
FIXED: dict[str, Any] = {
    "attentional_pool": False,
    "global_average_pool": False,  # of older versions: the average includes the class token
    "no_ln_pre": False,
    "pos_embed_type": "learnable",
    "input_patchnorm": False,
    "block_type": "default",
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
    "timm_model_name": "",
}
"""Keys of `vision_cfg` that change what a tower computes, and their only values that vitrail has: the defaults."""


class _ActivationConfig(ForeignConfig):
    approximate: Literal["none", "tanh"] = "none"


class _NormConfig(ForeignConfig):
    eps: Epsilon = DEFAULT_EPS


class _VisionConfig(ForeignConfig):
    image_size: Positive | tuple[Positive, Positive] | None = None
    patch_size: int | None = None
    width: int | None = None
    layers: int | None = None
    head_width: Positive = 64
    pool_type: str = "tok"
    final_ln_after_pool: bool = False
    act_kwargs: _ActivationConfig = Field(default_factory=_ActivationConfig)
    norm_kwargs: _NormConfig = Field(default_factory=_NormConfig)


class _ModelConfig(ForeignConfig):
    quick_gelu: bool = False
    vision_cfg: _VisionConfig = Field(default_factory=_VisionConfig)


class _PreprocessConfig(ForeignConfig):
    mean: float | tuple[float, ...] | None = None
    std: float | tuple[float, ...] | None = None
    resize_mode: Literal["shortest", "squash", "longest"] = "shortest"
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    """`random` is for training: OpenCLIP evaluates it with bicubic."""


class OpenClipConfig(ForeignConfig):
    """open_clip_config.json, which lies beside the weights on the hub."""

    model_cfg: _ModelConfig | None = None
    preprocess_cfg: _PreprocessConfig = Field(default_factory=_PreprocessConfig)

    @classmethod
    def read(cls, folder_files: FolderFiles) -> OpenClipConfig:
        """Read the file; raise a WeightsError that names a key whose value vitrail's model does not have."""
        values = folder_files.json(CONFIG_FILE)
        config: OpenClipConfig = cls.parse(values, CONFIG_FILE)
        model = values.get("model_cfg") or {}
        vision = model.get("vision_cfg") or {}
        for key, default in FIXED.items():
            if vision.get(key) not in (None, default):
                raise WeightsError(f"{CONFIG_FILE} says {key} = {vision[key]!r}, which vitrail's model does not have")
        if config.vision.pool_type not in POOLINGS:
            pool = config.vision.pool_type
            raise WeightsError(f"{CONFIG_FILE} says pool_type = {pool!r}; vitrail has {', '.join(POOLINGS)}")
        for key, allowed in (("act_kwargs", "approximate"), ("norm_kwargs", "eps")):
            if unknown := set(vision.get(key) or ()) - {allowed}:
                raise WeightsError(f"{CONFIG_FILE}: vitrail knows {allowed} in {key}, not {', '.join(sorted(unknown))}")
        return config

    @property
    def vision(self) -> _VisionConfig:
        """What it says about the vision tower; OpenCLIP's defaults if it says nothing."""
        return self.model_cfg.vision_cfg if self.model_cfg is not None else _VisionConfig()

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width, in pixels."""
        size = self.vision.image_size
        return (size, size) if isinstance(size, int) else size


class OpenClipFormat(WeightFormat):
    """Names such as `visual.transformer.resblocks.0.attn.in_proj_weight`."""

    name = "openclip"
    weights_file = "model.pth"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_prefix(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read sizes from the shapes; heads, GELU, pooling and preprocessing from the config, else guess them."""
        prefix = _find_prefix(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        companion, known = CompanionFile.read(folder_files), folder_files.known
        notes: list[str] = []
        config = OpenClipConfig.read(folder_files)
        vision = config.vision
        _check_supported(own)
        kernel = read_shape(own, "conv1.weight", 4)
        width, side = kernel[0], read_patch_size(kernel, (2, 3))
        depth = count_blocks(own, LAYER.split("{i}")[0])
        check_agreement(CONFIG_FILE, vision.model_dump(), {"width": width, "layers": depth, "patch_size": side})
        size = companion.image_size or config.image_size
        hint = known.grid or ((size[0] // side, size[1] // side) if size else None)
        grid, _ = infer_grid(read_shape(own, "positional_embedding", 2)[0], {"class": 1}, hint)
        head_width = vision.head_width if config.model_cfg else None
        pool = POOLINGS[vision.pool_type]
        architecture = VitArchitecture(
            image_size=(grid[0] * side, grid[1] * side),
            in_channels=kernel[1],
            patch_size=side,
            width=width,
            depth=depth,
            mlp_dim=read_shape(own, f"{LAYER.format(i=0)}mlp.c_fc.weight", 2)[0],
            num_heads=known.num_heads
            or companion.num_heads
            or (width // head_width if head_width else guess_num_heads(width, notes)),
            num_classes=0,
            layer_scale=1.0 if f"{LAYER.format(i=0)}ls_1.gamma" in own else None,
            gelu=_read_gelu(tensors, config, notes),
            norm_eps=vision.norm_kwargs.eps,
            pool=pool,
            norm_after_pool=pool == "class" or vision.final_ln_after_pool,  # one token is normed either way
            **OPTIONS,
        )
        if "proj" in own:
            notes.append("its projection into the space of texts is kept and not applied: features are those before it")
        preprocessing = _read_preprocessing(config.preprocess_cfg, architecture, notes)
        checkpoint = CheckpointInfo(
            architecture,
            preprocessing,
            dialect=prefix,
            licence=folder_files.read_licence(),
            unused_tensors=[prefix + "proj"] if "proj" in own else [],
            ignored_tensors=[name for name in tensors if not name.startswith(prefix)] if prefix else [],
            notes=notes,
        )
        return companion.complete(checkpoint)

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        assert isinstance(architecture, VitArchitecture)
        a, block = architecture, "encoder.blocks.{i}."
        rules = [
            TensorRule("patch_embed.projection.weight", "conv1.weight", to_patch_kernel(a.in_channels, a.patch_size)),
            TensorRule("class_token", "class_embedding", ADD_TOKEN_AXIS),
            TensorRule("position_embedding.0.table", "positional_embedding"),
            TensorRule("input_norm.*", "ln_pre.*"),
            TensorRule(f"{block}norm1.*", f"{LAYER}ln_1.*"),
            TensorRule(f"{block}attention.qkv.*", f"{LAYER}attn.in_proj_*"),
            TensorRule(f"{block}attention.out.*", f"{LAYER}attn.out_proj.*"),
            TensorRule(f"{block}scale1.factor", f"{LAYER}ls_1.gamma"),
            TensorRule(f"{block}norm2.*", f"{LAYER}ln_2.*"),
            TensorRule(f"{block}mlp.fc1.*", f"{LAYER}mlp.c_fc.*"),
            TensorRule(f"{block}mlp.fc2.*", f"{LAYER}mlp.c_proj.*"),
            TensorRule(f"{block}scale2.factor", f"{LAYER}ls_2.gamma"),
            TensorRule("encoder.norm.*", "ln_post.*"),
            TensorRule("pool_norm.*", "ln_post.*"),
        ]
        return add_prefix(rules, dialect)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture) or architecture.backbone is not None:
            return "vitrail writes no ResNets and no hybrids for OpenCLIP"
        if architecture.num_classes or architecture.representation_size:
            return "a vision tower of CLIP has no classes"
        if beyond := find_unsupported_options(architecture, *OPTIONS, "layer_scale", "pool", "norm_after_pool"):
            return f"OpenCLIP's vision tower has no option for this model's {beyond}"
        if wrong := [name for name, value in OPTIONS.items() if getattr(architecture, name) != value]:
            return f"OpenCLIP's vision tower has another {', '.join(wrong)} than this model"
        poolings = (("class", True), ("average", True), ("average", False))
        if (architecture.pool, architecture.norm_after_pool) not in poolings:
            return "OpenCLIP's vision tower has a norm after its class token, or before or after its average"
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        origin = model.origin
        return origin.dialect if origin is not None and origin.format == self.name else PREFIXES[0]

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        a, p = model.architecture, model.preprocessing
        assert isinstance(a, VitArchitecture)
        vision: dict[str, Any] = {
            "image_size": list(a.image_size),
            "patch_size": a.patch_size,
            "width": a.width,
            "layers": a.depth,
            "mlp_ratio": compute_mlp_ratio(a.mlp_dim, a.width),
            "head_width": a.head_width,
            "pool_type": next(theirs for theirs, ours in POOLINGS.items() if ours == a.pool),
        }
        if a.pool == "average":
            vision["final_ln_after_pool"] = a.norm_after_pool
        if a.gelu == "tanh":
            vision["act_kwargs"] = {"approximate": "tanh"}
        if a.norm_eps != DEFAULT_EPS:
            vision["norm_kwargs"] = {"eps": a.norm_eps}
        preprocessing = {
            "mean": list(p.mean),
            "std": list(p.std),
            "resize_mode": "squash" if p.resize == "squash" else "shortest",
            "interpolation": p.interpolation,
        }
        content = {
            "model_cfg": {"quick_gelu": a.gelu == "quick", "vision_cfg": vision},
            "preprocess_cfg": preprocessing,
        }
        return {**CompanionFile.describe_model(model), CONFIG_FILE: content}


def _find_prefix(tensors: Tensors) -> str | None:
    return next((prefix for prefix in PREFIXES if all(prefix + mark in tensors for mark in MARKS)), None)


def _check_supported(own: Tensors) -> None:
    """Raise a WeightsError for towers with the same names and other computations."""
    if any(name.startswith("attn_pool.") for name in own):
        raise WeightsError("its tower pools by attention (CoCa, Perception Encoder): load timm's file of it")
    missing = [name for name in ("class_embedding", "ln_pre.weight", "ln_post.weight") if name not in own]
    if missing:
        raise WeightsError(f"its tower is not CLIP's, which has {', '.join(missing)}: load timm's file of it")


def _read_gelu(tensors: Tensors, config: OpenClipConfig, notes: list[str]) -> str:
    """Return the form of GELU: the config's, else the quick one for OpenAI's files and the exact one for others."""
    if config.model_cfg is not None:
        tanh = config.vision.act_kwargs.approximate == "tanh"
        if tanh and config.model_cfg.quick_gelu:
            raise WeightsError(f"{CONFIG_FILE} says quick_gelu and act_kwargs: they are two forms of GELU")
        return "quick" if config.model_cfg.quick_gelu else "tanh" if tanh else "exact"
    quick = any(mark in tensors for mark in OPENAI_MARKS)
    whose = "OpenAI's quick one" if quick else "OpenCLIP's exact one; OpenAI's weights need the quick one"
    notes.append(f"the form of GELU is {whose}: the file does not say")
    return "quick" if quick else "exact"


def _read_preprocessing(config: _PreprocessConfig, a: VitArchitecture, notes: list[str]) -> Preprocessing:
    """Return the preprocessing, with OpenCLIP's defaults where the config names no value."""
    if config.resize_mode == "longest":
        notes.append("images are resized by their shorter side: vitrail cannot fit the longer one and fill the rest")
    mean, std = ((v,) * a.in_channels if isinstance(v, float) else v for v in (config.mean, config.std))
    return build_preprocessing(
        a.image_size,
        a.in_channels,
        CLIP,
        mean,
        std,
        resize="squash" if config.resize_mode == "squash" else "cover",
        crop_rounding="even",  # it crops with torchvision
        interpolation="bilinear" if config.interpolation == "bilinear" else "bicubic",
    )
