"""The vision towers of OpenAI's CLIP and of OpenCLIP under their own names; text towers are left out.

The projection into the space of texts (`visual.proj`) is kept among the unused tensors and not applied.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, VitArchitecture
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
OPTIONS = {"input_norm": True, "patch_bias": False, "norm_after_pool": True}


class _VisionConfig(ForeignConfig):
    head_width: int | None = None


class _ModelConfig(ForeignConfig):
    quick_gelu: bool = False
    vision_cfg: _VisionConfig = Field(default_factory=_VisionConfig)


class _PreprocessConfig(ForeignConfig):
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


class OpenClipConfig(ForeignConfig):
    """open_clip_config.json, which lies beside the weights on the hub."""

    model_cfg: _ModelConfig | None = None
    preprocess_cfg: _PreprocessConfig = Field(default_factory=_PreprocessConfig)


class OpenClipFormat(WeightFormat):
    """Names such as `visual.transformer.resblocks.0.attn.in_proj_weight`."""

    name = "openclip"
    weights_file = "model.pth"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_prefix(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read sizes from the shapes; heads and the form of GELU from the config, else guess them."""
        prefix = _find_prefix(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        companion, known = CompanionFile.read(folder_files), folder_files.known
        notes: list[str] = []
        config: OpenClipConfig = OpenClipConfig.parse(folder_files.json(CONFIG_FILE), CONFIG_FILE)
        _check_supported(own)
        kernel = read_shape(own, "conv1.weight", 4)
        width, side = kernel[0], read_patch_size(kernel, (2, 3))
        size = companion.image_size
        hint = known.grid or ((size[0] // side, size[1] // side) if size else None)
        grid, _ = infer_grid(read_shape(own, "positional_embedding", 2)[0], {"class": 1}, hint)
        head_width = config.model_cfg.vision_cfg.head_width or 64 if config.model_cfg else None
        architecture = VitArchitecture(
            image_size=(grid[0] * side, grid[1] * side),
            in_channels=kernel[1],
            patch_size=side,
            width=width,
            depth=count_blocks(own, LAYER.split("{i}")[0]),
            mlp_dim=read_shape(own, f"{LAYER.format(i=0)}mlp.c_fc.weight", 2)[0],
            num_heads=known.num_heads
            or companion.num_heads
            or (width // head_width if head_width else guess_num_heads(width, notes)),
            num_classes=0,
            layer_scale=1.0 if f"{LAYER.format(i=0)}ls_1.gamma" in own else None,
            gelu=_read_gelu(tensors, config, notes),
            norm_eps=1e-5,
            **OPTIONS,
        )
        if "proj" in own:
            notes.append("its projection into the space of texts is kept and not applied: features are those before it")
        statistics = config.preprocess_cfg
        preprocessing = build_preprocessing(
            architecture.image_size,
            kernel[1],
            CLIP,
            statistics.mean,
            statistics.std,
            resize="cover",
            crop_rounding="even",  # it crops with torchvision
            interpolation="bicubic",
        )
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
            TensorRule("pool_norm.*", "ln_post.*"),
        ]
        return add_prefix(rules, dialect)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture) or architecture.backbone is not None:
            return "vitrail writes no ResNets and no hybrids for OpenCLIP"
        if architecture.num_classes or architecture.representation_size:
            return "a vision tower of CLIP has no classes"
        if beyond := find_unsupported_options(architecture, *OPTIONS, "layer_scale"):
            return f"OpenCLIP's vision tower has no option for this model's {beyond}"
        if wrong := [name for name, value in OPTIONS.items() if getattr(architecture, name) != value]:
            return f"OpenCLIP's vision tower has another {', '.join(wrong)} than this model"
        if architecture.gelu == "tanh":
            return "OpenCLIP's vision tower has the quick or the exact form of GELU"
        return None

    def choose_dialect(self, model: ImageModel) -> str:
        origin = model.origin
        return origin.dialect if origin is not None and origin.format == self.name else PREFIXES[0]

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        files = CompanionFile.describe_model(model)
        content = {"model_cfg": {"quick_gelu": getattr(model.architecture, "gelu", "") == "quick"}}
        head_width = getattr(model.architecture, "head_width", None)
        content["model_cfg"]["vision_cfg"] = {"head_width": head_width}
        return {**files, CONFIG_FILE: content}


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
        return "quick" if config.model_cfg.quick_gelu else "exact"
    quick = any(mark in tensors for mark in OPENAI_MARKS)
    whose = "OpenAI's quick one" if quick else "OpenCLIP's exact one; OpenAI's weights need the quick one"
    notes.append(f"the form of GELU is {whose}: the file does not say")
    return "quick" if quick else "exact"
