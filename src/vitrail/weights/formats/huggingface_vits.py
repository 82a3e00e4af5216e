"""transformers' plain encoders: ViT (and ViTMAE, ViTMSN), DeiT, I-JEPA, DINOv2 with and without registers, DINOv3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vitrail.model.architecture import Rotary, VitArchitecture
from vitrail.weights.formats.base import HALF, Tensors, compute_mlp_ratio, infer_grid, read_shape, read_size
from vitrail.weights.formats.huggingface_family import GELUS, Family, TensorNames, TransformersConfig
from vitrail.weights.tensor_rules import TensorRule

DINOV3_SIZE = 224
"""Pixels: the image size in the configs of all released DINOv3 models."""


class Vit(Family):
    """ViT, and the encoders of ViTMAE and ViTMSN. `embed` gives the class token, after a pooler if there is one."""

    kind, title, prefixes = "vit", "ViT", ("", "vit.")
    free: ClassVar[tuple[str, ...]] = ("qkv_bias", "representation_size")

    def choose_statistics(self, config: TransformersConfig) -> Mapping[str, Any]:
        """Return Google's for ViT itself, and ImageNet's for MAE and MSN, which share its names."""
        return HALF if config.model_type in ("", "vit") else self.statistics

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        classifies = any(f"{name}.weight" in own for name in self.names.classifiers)
        return {"representation_size": None if classifies else read_size(own, "pooler.dense.weight", 2)}

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), *(["pooler."] if a.num_classes else [])]

    def list_inner_rules(self, a: VitArchitecture) -> list[TensorRule]:
        return [TensorRule("head.hidden.*", "pooler.dense.*"), *super().list_inner_rules(a)]

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.representation_size is not None and a.num_classes:
            return "transformers has no classifier with a tanh layer before it"
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        config = super().make_vision_config(a)
        config |= {
            "hidden_dropout_prob": a.dropout,
            "attention_probs_dropout_prob": a.attention_dropout,
            "qkv_bias": a.qkv_bias,
        }
        return config if a.representation_size is None else {**config, "pooler_output_size": a.representation_size}


class Deit(Vit):
    """DeiT with its distillation token, with one or both of its classifiers."""

    kind, title, prefixes = "deit", "DeiT", ("", "deit.")
    names = TensorNames(registers="embeddings.distillation_token", classifiers=("classifier", "cls_classifier"))
    free: ClassVar[tuple[str, ...]] = (*Vit.free, "pool")

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        return "embeddings.distillation_token" in own

    def choose_statistics(self, config: TransformersConfig) -> Mapping[str, Any]:
        return self.statistics

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"registers": 1}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        pool = "distilled" if "cls_classifier.weight" in own else "class"
        return {**super().read_options(own, config, notes), "pool": pool}

    def read_positions(
        self, own: Tensors, config: TransformersConfig, side: int, hint: tuple[int, int] | None, notes: list[str]
    ) -> dict[str, Any]:
        grid, _ = infer_grid(read_shape(own, self.names.position, 3)[1], {"all": 2}, hint)
        return {"image_size": (grid[0] * side, grid[1] * side), "position_prefix": "all"}

    def list_outer_rules(self, a: VitArchitecture) -> list[TensorRule]:
        return [
            TensorRule("head.linear.*", "cls_classifier.*"),
            TensorRule("head.distilled.*", "distillation_classifier.*"),
            *super().list_outer_rules(a),
        ]

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.registers != 1:
            return "transformers has registers only in DINOv2 and DINOv3, which have layer scale, and one in DeiT"
        if a.pool not in (("class", "distilled") if a.num_classes else ("class",)):
            return f"transformers' DeiT classifies from class or distilled, not {a.pool}"
        return super().explain_refusal(a)

    def count_position_rows(self, a: VitArchitecture) -> int:
        return 2

    def name_class(self, a: VitArchitecture) -> str:
        return super().name_class(a) + ("WithTeacher" if a.pool == "distilled" else "")


class IJepa(Vit):
    """I-JEPA: no class token. `embed` gives the average of the patches, which its classifier reads."""

    kind, title, prefixes = "ijepa", "IJepa", ("", "ijepa.")
    free: ClassVar[tuple[str, ...]] = ("qkv_bias",)

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        return self.names.class_token not in own

    def choose_statistics(self, config: TransformersConfig) -> Mapping[str, Any]:
        return self.statistics

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"class_token": False, "pool": "average"}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        return {}

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), "pooler."]  # transformers adds one, untrained, for the first patch


class Dinov2(Family):
    """DINOv2; the giant has a SwiGLU. `embed` gives the class token, and with a classifier the average beside it."""

    kind, title, prefixes = "dinov2", "Dinov2", ("", "dinov2.")
    names = TensorNames(
        norm1="norm1",
        norm2="norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
        gated=("mlp.weights_in",),
        gated_fc2="mlp.weights_out",
    )
    default_eps = 1e-6
    free: ClassVar[tuple[str, ...]] = ("qkv_bias", "layer_scale", "mlp")

    def fits(self, own: Tensors, config: TransformersConfig) -> bool:
        scaled = self.names.first(self.names.scales[0]) in own
        return scaled and bool(self.names.registers) == ("embeddings.register_tokens" in own)

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"pool": "class+average" if classifies else "class"}

    def list_sizes(self, width: int, depth: int, mlp_dim: int) -> dict[str, int]:
        return {"hidden_size": width, "num_hidden_layers": depth}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        return {"layer_scale": config.layerscale_value}

    def read_gelu(self, config: TransformersConfig, swiglu: bool) -> str:
        # The giant's config says gelu, and its gate has a SiLU all the same.
        return GELUS.get(config.hidden_act or "", "exact") if swiglu else super().read_gelu(config, swiglu)

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.layer_scale is None:
            return f"transformers' {self.title} has layer scale, and this model has none"
        if _find_dinov2_ratio(a) is None:
            return (
                "transformers' DINOv2 has an MLP that is a whole multiple of its width, or two thirds of one for SwiGLU"
            )
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        config = super().make_vision_config(a)
        return config | {
            "hidden_act": next(theirs for theirs, ours in GELUS.items() if ours == a.gelu),
            "hidden_dropout_prob": a.dropout,
            "attention_probs_dropout_prob": a.attention_dropout,
            "qkv_bias": a.qkv_bias,
            "mlp_ratio": _find_dinov2_ratio(a),
            "layerscale_value": a.layer_scale,
            "use_swiglu_ffn": a.mlp == "swiglu",
        }


class Dinov2WithRegisters(Dinov2):
    """DINOv2 with registers, whose position table transformers resizes with antialias."""

    kind, title = "dinov2_with_registers", "Dinov2WithRegisters"
    prefixes = ("", "dinov2_with_registers.")
    names = replace(Dinov2.names, registers="embeddings.register_tokens")
    position_resize = "bicubic-antialias"
    free: ClassVar[tuple[str, ...]] = (*Dinov2.free, "registers")

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        registers = read_shape(own, self.names.registers, 3)[1]
        return {**super().read_options(own, config, notes), "registers": registers}

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        return {**super().make_vision_config(a), "num_register_tokens": a.registers}


def _find_dinov2_ratio(a: VitArchitecture) -> int | None:
    """Return the `mlp_ratio` of a config from which transformers computes this model's mlp_dim, if there is one."""
    if a.mlp == "gelu":
        ratio = compute_mlp_ratio(a.mlp_dim, a.width)
        return ratio if isinstance(ratio, int) else None
    ratios = range(1, 17)
    return next((ratio for ratio in ratios if -(-int(a.width * ratio * 2 / 3) // 8) * 8 == a.mlp_dim), None)


class Dinov3(Family):
    """DINOv3's ViTs, S to 7B: rotary positions, registers, keys without bias. `embed` gives the class token."""

    kind, title, prefixes = "dinov3_vit", "DINOv3ViT", ("",)
    names = TensorNames(
        patch="embeddings.patch_embeddings",
        registers="embeddings.register_tokens",
        norm="norm",
        layer="layer.{i}.",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        out="attention.o_proj",
        norm1="norm1",
        norm2="norm2",
        fc1="mlp.up_proj",
        fc2="mlp.down_proj",
        gated=("mlp.gate_proj", "mlp.up_proj"),
        gated_fc2="mlp.down_proj",
    )
    default_heads, default_eps = 6, 1e-5
    free: ClassVar[tuple[str, ...]] = (
        "qkv_bias",
        "key_bias",
        "out_bias",
        "mlp_bias",
        "mlp",
        "layer_scale",
        "registers",
        "rotary",
    )

    def list_options(self, classifies: bool) -> dict[str, Any]:
        return {"position": "none"}

    def read_options(self, own: Tensors, config: TransformersConfig, notes: list[str]) -> dict[str, Any]:
        rotary = Rotary(
            base=config.rope_theta,
            shift=config.pos_embed_shift,
            jitter=config.pos_embed_jitter,
            rescale=config.pos_embed_rescale,
        )
        return {"layer_scale": config.layerscale_value, "registers": self._count_registers(own), "rotary": rotary}

    def _count_registers(self, own: Tensors) -> int:
        tokens = own.get(self.names.registers)
        # Without registers, transformers stores an empty tensor of (1, 0, D).
        return 0 if tokens is None or tokens.shape[1:2] == (0,) else read_shape(own, self.names.registers, 3)[1]

    def read_positions(
        self, own: Tensors, config: TransformersConfig, side: int, hint: tuple[int, int] | None, notes: list[str]
    ) -> dict[str, Any]:
        if hint is None:
            notes.append(f"image size {DINOV3_SIZE // side * side}, as in DINOv3's configs: the file does not say")
            hint = (DINOV3_SIZE // side, DINOV3_SIZE // side)
        return {"image_size": (hint[0] * side, hint[1] * side)}

    def list_unused(self, own: Tensors, a: VitArchitecture) -> list[str]:
        return [*super().list_unused(own, a), *([] if a.registers else [self.names.registers])]

    def explain_refusal(self, a: VitArchitecture) -> str | None:
        if a.num_classes:
            return "transformers has no classifier for DINOv3: load it with num_classes=0"
        if a.layer_scale is None:
            return "transformers' DINOv3 has layer scale, and this model has none"
        rotary, plain = a.rotary, Rotary()
        training = ("base", "shift", "jitter", "rescale")
        if rotary is None or any(
            getattr(rotary, name) != getattr(plain, name) for name in Rotary.model_fields if name not in training
        ):
            return "transformers' DINOv3 has rotary positions with unit coordinates, and this model has others"
        return super().explain_refusal(a)

    def make_vision_config(self, a: VitArchitecture) -> dict[str, Any]:
        assert a.rotary is not None
        config = super().make_vision_config(a)
        return config | {
            "attention_dropout": a.attention_dropout,
            "drop_path_rate": a.stochastic_depth,
            "rope_theta": a.rotary.base,
            "pos_embed_shift": a.rotary.shift,
            "pos_embed_jitter": a.rotary.jitter,
            "pos_embed_rescale": a.rotary.rescale,
            "query_bias": a.qkv_bias,
            "key_bias": a.qkv_bias and a.key_bias,
            "value_bias": a.qkv_bias,
            "proj_bias": a.out_bias,
            "mlp_bias": a.mlp_bias,
            "use_gated_mlp": a.mlp == "swiglu",
            "layerscale_value": a.layer_scale,
            "num_register_tokens": a.registers,
        }
