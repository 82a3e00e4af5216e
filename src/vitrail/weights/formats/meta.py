"""Meta's own files of DINOv3, and of DINOv2 giant; their other releases have timm's names (timm.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import WeightsError
from vitrail.model.architecture import Architecture, ResNetArchitecture, Rotary, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.weights.formats.base import (
    IMAGENET,
    CheckpointInfo,
    CompanionFile,
    FolderFiles,
    Tensors,
    WeightFormat,
    build_preprocessing,
    count_blocks,
    guess_num_heads,
    infer_grid,
    read_patch_size,
    read_shape,
    read_size,
)
from vitrail.weights.formats.huggingface_family import ALWAYS_FREE
from vitrail.weights.formats.huggingface_vits import DINOV3_SIZE
from vitrail.weights.tensor_rules import (
    ADD_BATCH_AXIS,
    UNCHANGED,
    TensorRule,
    add_prefix,
    split_into,
    to_patch_kernel,
)

PREFIXES = ("", "module.", "backbone.", "teacher.backbone.")
COMPUTED = ("mask_token", "rope_embed.periods", "bias_mask")
"""Ends of the names of tensors that are kept and not used."""
DISTILLATION = ("local_cls_norm.", "projectors.")
PERIODS = "rope_embed.periods"
"""The periods of rotary positions: base^(i/n) for i from 0 to n − 1, where n is a quarter of a head's width."""
ROUNDING = 0.01
"""Relative difference of two periods that counts as rounding: Meta computes them in bfloat16 too."""


class MetaFormat(WeightFormat):
    """Names such as `storage_tokens` and `blocks.0.mlp.w1.weight`."""

    name = "meta"
    weights_file = "model.pth"

    def recognises(self, tensors: Tensors) -> bool:
        return _find_prefix(tensors) is not None

    def describe_checkpoint(self, tensors: Tensors, folder_files: FolderFiles) -> CheckpointInfo:
        """Read sizes from the shapes; what they do not show is the same in all releases."""
        prefix = _find_prefix(tensors) or ""
        own = {name.removeprefix(prefix): info for name, info in tensors.items() if name.startswith(prefix)}
        companion, known = CompanionFile.read(folder_files), folder_files.known
        notes: list[str] = []
        kernel = read_shape(own, "patch_embed.proj.weight", 4)
        width, side = kernel[0], read_patch_size(kernel, (2, 3))
        rotary = PERIODS in own
        hint = known.grid or _divide(companion.image_size, side)
        if rotary:
            if hint is None:
                notes.append(f"image size {DINOV3_SIZE // side * side}, as DINOv3's code has it: the file does not say")
            grid = hint or (DINOV3_SIZE // side, DINOV3_SIZE // side)
        else:
            grid, _ = infer_grid(read_shape(own, "pos_embed", 3)[1], {"class": 1}, hint)
        swiglu = any(f"blocks.0.mlp.{name}.weight" in own for name in ("w1", "w12"))
        heads = _count_heads(own, width, known.num_heads) if rotary else known.num_heads or companion.num_heads
        architecture = VitArchitecture(
            image_size=(grid[0] * side, grid[1] * side),
            in_channels=kernel[1],
            patch_size=side,
            width=width,
            depth=count_blocks(own, "blocks."),
            mlp_dim=read_shape(own, f"blocks.0.mlp.{'w3' if swiglu else 'fc2'}.weight", 2)[1],
            mlp="swiglu" if swiglu else "gelu",
            num_heads=heads or guess_num_heads(width, notes),
            num_classes=0,
            registers=read_size(own, _name_registers(rotary), 3, axis=1) or 0,
            position="none" if rotary else "learned-1d",
            position_resize="bicubic-offset" if not rotary and "register_tokens" not in own else "bicubic-antialias",
            rotary=Rotary(rescale=2.0) if rotary else None,
            layer_scale=1e-5 if "blocks.0.ls1.gamma" in own else None,
            gelu="exact",
            norm_eps=1e-5 if rotary else 1e-6,
            qkv_bias="blocks.0.attn.qkv.bias" in own,
            key_bias="blocks.0.attn.qkv.bias_mask" not in own,
        )
        preprocessing = build_preprocessing(
            architecture.image_size,
            kernel[1],
            IMAGENET,
            resize="squash" if rotary else "cover",
            interpolation="bicubic",
        )
        checkpoint = CheckpointInfo(
            architecture,
            preprocessing,
            dialect=prefix,
            licence=folder_files.read_licence(),
            unused_tensors=[name for name in tensors if name.startswith(prefix) and name.endswith(COMPUTED)],
            ignored_tensors=[
                name for name in tensors if not name.startswith(prefix) or name[len(prefix) :].startswith(DISTILLATION)
            ],
            notes=notes,
        )
        return companion.complete(checkpoint)

    def finish_model(self, model: ImageModel, notes: list[str]) -> ImageModel:
        """Return the model with the base of rotary positions that the file's periods have."""
        a, periods = model.architecture, [t for name, t in model.unused_tensors.items() if name.endswith(PERIODS)]
        if not isinstance(a, VitArchitecture) or a.rotary is None or not periods:
            return model
        base = _read_base(periods[0].double(), a.rotary.base)
        if base == a.rotary.base:
            return model
        notes.append(f"rotary positions of base {base:.6g}, from the periods in the file; DINOv3's is {a.rotary.base}")
        return copy_model(model, rotary=a.rotary.model_copy(update={"base": base}))

    def list_tensor_rules(self, architecture: Architecture, dialect: str) -> list[TensorRule]:
        assert isinstance(architecture, VitArchitecture)
        a, block, theirs = architecture, "encoder.blocks.{i}.", "blocks.{i}."
        swiglu, width = a.mlp == "swiglu", a.width
        gated = ["w1", "w2"] if a.rotary else ["w12"]
        fc1 = [f"{theirs}mlp.{name}.*" for name in (gated if swiglu else ["fc1"])]
        kernel = to_patch_kernel(a.in_channels, a.patch_size)
        rules = [
            TensorRule("patch_embed.projection.weight", "patch_embed.proj.weight", kernel),
            TensorRule("patch_embed.projection.bias", "patch_embed.proj.bias"),
            TensorRule("class_token", "cls_token", ADD_BATCH_AXIS),
            TensorRule("registers", _name_registers(a.rotary is not None), ADD_BATCH_AXIS),
            TensorRule("position_embedding.0.table", "pos_embed", ADD_BATCH_AXIS),
            TensorRule(f"{block}norm1.*", f"{theirs}norm1.*"),
            TensorRule(f"{block}attention.qkv.*", f"{theirs}attn.qkv.*"),
            # Keys have a bias in the file, which a mask multiplies by 0.
            TensorRule(f"{block}attention.q_bias", f"{theirs}attn.qkv.bias", UNCHANGED, (0, width)),
            TensorRule(f"{block}attention.v_bias", f"{theirs}attn.qkv.bias", UNCHANGED, (2 * width, 3 * width)),
            TensorRule(f"{block}attention.out.*", f"{theirs}attn.proj.*"),
            TensorRule(f"{block}scale1.factor", f"{theirs}ls1.gamma"),
            TensorRule(f"{block}norm2.*", f"{theirs}norm2.*"),
            TensorRule(f"{block}mlp.fc1.*", fc1, split_into(len(fc1))),
            TensorRule(f"{block}mlp.fc2.*", f"{theirs}mlp.{'w3' if swiglu else 'fc2'}.*"),
            TensorRule(f"{block}scale2.factor", f"{theirs}ls2.gamma"),
            TensorRule("encoder.norm.*", "norm.*"),
        ]
        return add_prefix(rules, dialect)

    def explain_refusal(self, architecture: Architecture) -> str | None:
        if isinstance(architecture, ResNetArchitecture):
            return "Meta's files hold DINOv2 and DINOv3, no ResNets"
        a = architecture
        expected: dict[str, Any] = {"position": "none"} if a.rotary else {"mlp": "swiglu"}
        free = (*ALWAYS_FREE, "registers", "rotary", "mlp", "layer_scale", "qkv_bias", "key_bias")
        fields = {
            name: info.default for name, info in VitArchitecture.model_fields.items() if name not in free
        } | expected
        if beyond := [name for name, value in fields.items() if getattr(a, name) != value]:
            return f"Meta's DINOv2 giant and DINOv3 have no option for this model's {', '.join(beyond)}"
        return "Meta's DINOv2 and DINOv3 have no classes" if a.num_classes else None

    def choose_dialect(self, model: ImageModel) -> str:
        origin = model.origin
        return origin.dialect if origin is not None and origin.format == self.name else ""

    def make_config_files(self, model: ImageModel) -> dict[str, Any]:
        if getattr(model.architecture, "rotary", None) and not any(n.endswith("periods") for n in model.unused_tensors):
            raise WeightsError(
                "Meta's files of DINOv3 hold tables that its code needs (rope_embed.periods, bias_mask), and only a "
                "model that was loaded from such a file has them: write it as huggingface or timm"
            )
        return CompanionFile.describe_model(model)


def _find_prefix(tensors: Tensors) -> str | None:
    for prefix in PREFIXES:
        marks = [f"{prefix}patch_embed.proj.weight", f"{prefix}blocks.0.attn.qkv.weight"]
        if all(mark in tensors for mark in marks) and (
            f"{prefix}rope_embed.periods" in tensors or f"{prefix}blocks.0.mlp.w12.weight" in tensors
        ):
            return prefix
    return None


def _count_heads(own: Tensors, width: int, known: int | None) -> int:
    """Return the number of heads, which the number of periods shows."""
    head_width = 4 * read_shape(own, PERIODS, 1)[0]
    heads = width // head_width
    if heads * head_width != width:
        raise WeightsError(
            f"{PERIODS} belongs to heads of {head_width} channels, which a width of {width} does not have"
        )
    if known not in (None, heads):
        raise WeightsError(f"its tensors have {heads} attention heads, so there cannot be {known}")
    return heads


def _read_base(periods: Tensor, usual: float) -> float:
    """Return the base of stored periods: the usual one if they fit it, else their own.

    Raises:
        WeightsError: they are no powers of one base, from the power 0 on.
    """
    count = len(periods)
    powers = torch.arange(count, dtype=periods.dtype) / count
    own = float(periods[-1] ** (count / (count - 1))) if count > 1 else usual
    for base in (usual, own):
        if math.isfinite(base) and torch.allclose(periods, base**powers, rtol=ROUNDING, atol=0):
            return base
    raise WeightsError(f"{PERIODS} are no powers of one base, as vitrail's rotary positions are")


def _name_registers(rotary: bool) -> str:
    return "storage_tokens" if rotary else "register_tokens"


def _divide(size: tuple[int, int] | None, side: int) -> tuple[int, int] | None:
    return None if size is None else (size[0] // side, size[1] // side)
