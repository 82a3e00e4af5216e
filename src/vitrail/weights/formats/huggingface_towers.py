"""The vision towers in transformers: CLIP, SigLIP, SigLIP 2 and AIMv2, alone or out of files with a text tower.

A projection into the space of texts is kept among the unused tensors and not applied: `embed` gives what transformers
calls pooler_output, and a tower has no classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from vitrail.errors import WeightsError
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.weights.formats.base import CLIP, HALF, Tensors, read_shape
from vitrail.weights.formats.huggingface_family import Family, TensorNames, TransformersConfig
from vitrail.weights.tensor_rules import UNCHANGED, TensorRule, Transform

TOWER_NAMES = TensorNames(
    patch="embeddings.patch_embedding",
    class_token="embeddings.class_embedding",
    position="embeddings.position_embedding.weight",
    input_norm="pre_layrnorm",  # sic
    norm="post_layernorm",
    pool_norm="post_layernorm",
    layer="encoder.layers.{i}.",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    norm1="layer_norm1",
    norm2="layer_norm2",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
)
ADD_TOKEN_AXIS = Transform(lambda parts: parts[0].unsqueeze(0), lambda ours: [ours.squeeze(0)])
"""(1, D) in vitrail, (D,) in the file."""
PROJECTION = "visual_projection.weight"


class Tower(Family):
    """What the towers share: a config of their own inside the one of two towers."""

    prefixes = ("", "vision_model.")
    square_only = True

    def choose_prefix(self, model: ImageModel) -> str:
        origin, prefixed = model.origin, f"{self.kind}|{self.prefixes[1]}"
        had_prefix = origin is not None and (origin.format, origin.dialect) == ("huggingface", prefixed)
        return self.prefixes[1] if model.num_classes or had_prefix else ""

    def name_class(self, a: VitArchitecture) -> str:
        return f"{self.title}ForImageClassification" if a.num_classes else f"{self.title}VisionModel"

    def make_config(self, model: ImageModel, a: VitArchitecture) -> dict[str, Any]:
        vision = {**self.make_vision_config(a), "attention_dropout": a.attention_dropout}
        if a.num_classes:
            kind = self.kind.removesuffix("_vision_model")
            vision = {**vision, **self.describe_unused(model), "model_type": self.kind}
            return {"architectures": [self.name_class(a)], "model_type": kind, "vision_config": vision}
        config = {"architectures": [self.name_class(a)], "model_type": self.kind, **vision}
        if PROJECTION in model.unused_tensors and self.choose_prefix(model):
            config["architectures"] = [f"{self.title}VisionModelWithProjection"]
            config["projection_dim"] = len(model.unused_tensors[PROJECTION])
        return config

    def describe_unused(self, model: ImageModel) -> dict[str, Any]:
        """Return what a classifier's config says about tensors that are kept and not used."""
        return {}


class ClipTower(Tower):
    """CLIP, OpenCLIP and MetaCLIP. `embed` gives the class token after post_layernorm; no norm acts on the others."""

    kind, title, names = "clip_vision_model", "CLIP", TOWER_NAMES
    statistics, default_act, default_eps = CLIP, "quick_gelu", 1e-5

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        return self.names.class_token in own

    def list_options(self, classifies: bool) -> dict[str, Any]:
        options: dict[str, Any] = {"input_norm": True, "patch_bias": False, "class_token": True}
        # transformers' classifier reads the average of the patches, which no norm has seen.
        last = {"pool": "average", "final_norm": False} if classifies else {"norm_after_pool": True}
        return options | last

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        if config.hidden_act is None and not config.model_type:
            notes.append("the form of GELU is OpenAI's quick one, not LAION's exact one: the file does not say")
        return {}

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), *(["post_layernorm."] if a.num_classes else [])]

    def make_class_transform(self) -> Transform:
        return ADD_TOKEN_AXIS


class SiglipTower(Tower):
    """SigLIP, and SigLIP 2 for one resolution. `embed` gives the attention pooling of its head."""

    kind, title, names = "siglip_vision_model", "Siglip", TOWER_NAMES
    statistics, default_act, default_eps = HALF, "gelu_pytorch_tanh", 1e-6
    free: ClassVar[tuple[str, ...]] = ("pool",)

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        return self.names.class_token not in own and len(own[f"{self.names.patch}.weight"].shape) == 4

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"class_token": False, "pool": "average" if classifies else "attention"}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        if "head.probe" not in own:
            notes.append("the tower comes without its pooling head: features are averaged over the patches")
            return {"pool": "average"}
        return {}

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), *(["head."] if a.num_classes else [])]

    def list_inner_rules(self, a: VitArchitecture) -> list[TensorRule]:
        rows = {"q": (0, a.width), "kv": (a.width, 3 * a.width)}
        packed = [
            TensorRule(f"pool.{part}.{kind}", f"head.attention.in_proj_{kind}", UNCHANGED, rows[part])
            for part in rows
            for kind in ("weight", "bias")
        ]
        return [
            *packed,
            TensorRule("pool.query", "head.probe", Transform(lambda p: p[0].squeeze(0), lambda o: [o.unsqueeze(0)])),
            TensorRule("pool.out.*", "head.attention.out_proj.*"),
            TensorRule("pool.norm.*", "head.layernorm.*"),
            TensorRule("pool.mlp.fc1.*", "head.mlp.fc1.*"),
            TensorRule("pool.mlp.fc2.*", "head.mlp.fc2.*"),
            *super().list_inner_rules(a),
        ]

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.pool not in (("average",) if a.num_classes else ("attention", "average")):
            return f"transformers' {self.title} classifies from the average, not from {a.pool}"
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        return {**super().make_vision_config(a), "vision_use_head": a.pool == "attention"}

    def describe_unused(self, model: ImageModel) -> dict[str, Any]:
        return {"vision_use_head": "vision_model.head.probe" in model.unused_tensors}


class Siglip2Tower(SiglipTower):
    """SigLIP 2 for any shape (NaFlex), at one grid: its patches are a linear layer of (row, column, channel)."""

    kind, title = "siglip2_vision_model", "Siglip2"
    position_resize = "bilinear-antialias"

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        return self.names.class_token not in own and len(own[f"{self.names.patch}.weight"].shape) == 2

    def read_patches(self, own: Tensors, config: TransformersConfig) -> tuple[int, int, int]:
        width, values = read_shape(own, f"{self.names.patch}.weight", 2)
        side = math.isqrt(values // config.num_channels)
        if side * side * config.num_channels != values:
            raise WeightsError(
                f"its patches have {values} values, which is no square of {config.num_channels} channels"
            )
        return width, config.num_channels, side

    def make_kernel_transform(self, a: VitArchitecture) -> Transform:
        channels, side = a.in_channels, a.patch_size

        def to_ours(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            kernel: torch.Tensor = parts[0].unflatten(1, (side, side, channels))
            return kernel.permute(0, 3, 1, 2).flatten(1)

        def to_theirs(ours: torch.Tensor) -> list[torch.Tensor]:
            return [ours.unflatten(1, (channels, side, side)).permute(0, 2, 3, 1).flatten(1)]

        return Transform(to_ours, to_theirs)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        rows, columns = a.grid(a.image_size)
        config = {**super().make_vision_config(a), "num_patches": rows * columns}
        del config["image_size"]
        return config

    def list_processor_keys(self, a: VitArchitecture) -> dict[str, Any]:
        rows, columns = a.grid(a.image_size)
        kind = "Siglip2ImageProcessor"
        return {"image_processor_type": kind, "patch_size": a.patch_size, "max_num_patches": rows * columns}


class Aimv2Tower(Tower):
    """AIMv2: RMSNorm, SwiGLU, no biases in blocks. `embed` gives the average of the patches."""

    kind, title = "aimv2_vision_model", "Aimv2"
    statistics, default_heads, default_eps, eps_key = CLIP, 8, 1e-5, "rms_norm_eps"
    names = replace(
        TOWER_NAMES,
        patch="embeddings.patch_embed",
        patch_norm="embeddings.rms_norm",
        norm="rms_norm",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.out_proj",
        norm1="rms_norm1",
        norm2="rms_norm2",
        gated=("ffn.gate_proj", "ffn.up_proj"),
        gated_fc2="ffn.down_proj",
    )
    free: ClassVar[tuple[str, ...]] = ("qkv_bias", "out_bias", "mlp_bias")

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"class_token": False, "pool": "average", "norm": "rms", "patch_norm": True, "mlp": "swiglu"}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        if "head.cls_token" in own:
            notes.append("its pooling head is kept and not applied: features are averaged over the patches")
        return {}

    def read_positions(
        self, own: Tensors, config: TransformersConfig, side: int, hint: tuple[int, int] | None, notes: list[str]
    ) -> dict[str, Any]:
        if self.names.position not in own:
            raise WeightsError("its positions are sines with frequencies that vitrail does not have (AIMv2 native)")
        return super().read_positions(own, config, side, hint, notes)

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), "head."]

    def choose_prefix(self, model: ImageModel) -> str:
        return ""  # transformers reads a tower alone under no other names, nor with a projection

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.num_classes:
            return "transformers has no classifier for AIMv2: load it with num_classes=0"
        if a.qkv_bias != a.out_bias:
            return "transformers' AIMv2 has biases in all four projections of attention or in none"
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        return {
            **super().make_vision_config(a),
            "qkv_bias": a.qkv_bias,
            "mlp_bias": a.mlp_bias,
            "use_head": False,
            "is_native": False,
        }

    def make_config(self, model: ImageModel, a: VitArchitecture) -> dict[str, Any]:
        config = super().make_config(model, a)
        return {**config, "use_head": "head.cls_token" in model.unused_tensors}
