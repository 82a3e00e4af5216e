"""Small random models of every family of transformers that vitrail reads, and how each is called in float64."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from peer_models import scramble
from peers import transformers as t

NATIVE, LARGER, SMALLER, WIDE = (48, 48), (64, 64), (32, 32), (40, 64)
ALL_SIZES = (NATIVE, LARGER, SMALLER, WIDE)
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 48,
    "patch_size": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
    "max_position_embeddings": 8,
}
LABELS = {"id2label": {i: f"class {i}" for i in range(10)}, "label2id": {f"class {i}": i for i in range(10)}}


class _TorchInFloat64:
    """torch, except that its float32 is float64: where a peer rounds to float32, it then does not."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


ROUNDING = ("dinov2", "dinov2_with_registers", "dinov3_vit", "aimv2", "siglip2", "beit")
"""Peers that compute rotary angles, norms, resized tables or softmax in float32 whatever the model's type is."""


@contextlib.contextmanager
def peers_in_float64() -> Iterator[None]:
    """Let peers compute in float64 what they always compute in float32, so that only their formulas are compared."""
    with contextlib.ExitStack() as stack:
        for kind in ROUNDING:
            module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
            stack.enter_context(mock.patch.object(module, "torch", _TorchInFloat64()))
        yield


@dataclass(frozen=True)
class Case:
    """A model of a family, and how it is called."""

    build: Callable[[], Any]
    sizes: tuple[tuple[int, int], ...] = ALL_SIZES
    kind: str = "interpolate"
    """`interpolate`: the peer must be told to resize positions. `plain`: it does or needs not. `patches`: NaFlex."""
    tower: str = ""
    """The attribute that holds the encoder, if the model is a larger one."""
    architecture: dict[str, Any] | None = None
    """Options that the loaded architecture must have."""
    written_as: str | None = None
    """The class of transformers that reads what vitrail writes, if it is not the model's own."""
    embed: str = "pooler_output"
    """What `embed` gives: pooler_output, or the mean of the last hidden state."""


def _naflex(**more: Any) -> Any:
    return t.Siglip2VisionConfig(**{k: v for k, v in SMALL.items() if k != "image_size"}, num_patches=36, **more)


ENCODERS = {
    "ViT": Case(lambda: t.ViTModel(t.ViTConfig(**SMALL))),
    "ViTMSN": Case(lambda: t.ViTMSNModel(t.ViTMSNConfig(**SMALL)), embed="class", written_as="ViTModel"),
    "DeiT": Case(lambda: t.DeiTModel(t.DeiTConfig(**SMALL))),
    "I-JEPA": Case(lambda: t.IJepaModel(t.IJepaConfig(**SMALL)), embed="average"),
    "DINOv2": Case(lambda: t.Dinov2Model(t.Dinov2Config(**SMALL, mlp_ratio=2)), kind="plain"),
    "DINOv2 giant": Case(
        lambda: t.Dinov2Model(t.Dinov2Config(**SMALL, use_swiglu_ffn=True)),
        kind="plain",
        architecture={"mlp": "swiglu", "mlp_dim": 176},
    ),
    "DINOv2 with registers": Case(
        lambda: t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**SMALL, mlp_ratio=2)),
        kind="plain",
        architecture={"registers": 4, "position_resize": "bicubic-antialias"},
    ),
    "DINOv2 giant with registers": Case(
        lambda: t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**SMALL, use_swiglu_ffn=True)), kind="plain"
    ),
    "DINOv3": Case(
        lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, num_register_tokens=4)),
        kind="plain",
        architecture={"registers": 4, "key_bias": False, "position": "none"},
    ),
    "DINOv3 7B": Case(
        lambda: t.DINOv3ViTModel(
            t.DINOv3ViTConfig(
                **SMALL,
                num_register_tokens=4,
                use_gated_mlp=True,
                hidden_act="silu",
                query_bias=False,
                value_bias=False,
                mlp_bias=False,
                rope_theta=50.0,
            )
        ),
        kind="plain",
        architecture={"mlp": "swiglu", "mlp_bias": False, "qkv_bias": False},
    ),
    "DINOv3 with all biases": Case(
        lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**SMALL, key_bias=True)),
        kind="plain",
        architecture={"registers": 0, "key_bias": True},
    ),
    "SigLIP": Case(lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**SMALL)), architecture={"gelu": "tanh"}),
    "SigLIP out of two towers": Case(
        lambda: t.SiglipModel(t.SiglipConfig(vision_config=SMALL, text_config=TEXT)),
        tower="vision_model",
        written_as="SiglipVisionModel",
    ),
    "SigLIP 2 NaFlex": Case(
        lambda: t.Siglip2VisionModel(_naflex()),
        kind="patches",
        architecture={"position_resize": "bilinear-antialias", "image_size": (48, 48)},
    ),
    "CLIP": Case(lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**SMALL)), architecture={"gelu": "quick"}),
    "OpenCLIP": Case(
        lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**SMALL, hidden_act="gelu")), architecture={"gelu": "exact"}
    ),
    "CLIP with projection": Case(
        lambda: t.CLIPVisionModelWithProjection(t.CLIPVisionConfig(**SMALL, projection_dim=24)), tower="vision_model"
    ),
    "CLIP out of two towers": Case(
        lambda: t.CLIPModel(t.CLIPConfig(vision_config=SMALL, text_config=TEXT, projection_dim=24)),
        tower="vision_model",
        written_as="CLIPVisionModelWithProjection",
    ),
    "MetaCLIP 2": Case(lambda: t.MetaClip2VisionModel(t.MetaClip2VisionConfig(**SMALL)), written_as="CLIPVisionModel"),
    "Chinese CLIP": Case(
        lambda: t.ChineseCLIPVisionModel(t.ChineseCLIPVisionConfig(**SMALL)), written_as="CLIPVisionModel"
    ),
    "Chinese CLIP out of two towers": Case(
        lambda: t.ChineseCLIPModel(t.ChineseCLIPConfig(vision_config=SMALL, text_config=TEXT, projection_dim=24)),
        tower="vision_model",
        written_as="CLIPVisionModelWithProjection",
    ),
    "AIMv2": Case(
        lambda: t.Aimv2VisionModel(t.Aimv2VisionConfig(**SMALL, use_head=False)),
        sizes=(NATIVE,),  # the peer has no way to resize its positions
        kind="plain",
        architecture={"norm": "rms", "mlp": "swiglu", "mlp_bias": False, "out_bias": False, "patch_norm": True},
        embed="average",
    ),
    "AIMv2 out of two towers": Case(
        lambda: t.Aimv2Model(t.Aimv2Config(vision_config=SMALL, text_config=TEXT, projection_dim=24)),
        sizes=(NATIVE,),
        kind="plain",
        tower="vision_model",
        written_as="Aimv2VisionModel",
        embed="average",
    ),
    "BEiT": Case(
        lambda: t.BeitModel(t.BeitConfig(**SMALL, use_relative_position_bias=True)),
        kind="plain",
        architecture={"position": "relative-bias", "position_at": "every-layer", "key_bias": False},
    ),
    "BEiT with a shared table": Case(
        lambda: t.BeitModel(t.BeitConfig(**SMALL, use_shared_relative_position_bias=True)),
        kind="plain",
        architecture={"position_at": "shared"},
    ),
    "BEiT with a class token": Case(
        lambda: t.BeitModel(
            t.BeitConfig(**SMALL, use_relative_position_bias=True, use_mean_pooling=False, layer_scale_init_value=0.0)
        ),
        kind="plain",
        architecture={"pool": "class", "layer_scale": None},
    ),
    "BEiT with absolute positions": Case(
        lambda: t.BeitModel(t.BeitConfig(**SMALL, use_absolute_position_embeddings=True)),
        kind="plain",
        architecture={"position": "learned-1d"},
    ),
    "data2vec": Case(
        lambda: t.Data2VecVisionModel(t.Data2VecVisionConfig(**SMALL, use_relative_position_bias=True)),
        kind="plain",
        architecture={"final_norm": False},
        embed="average of patches",
    ),
}
CLASSIFIERS = {
    "ViT": Case(lambda: t.ViTForImageClassification(t.ViTConfig(**SMALL, **LABELS))),
    "DeiT": Case(lambda: t.DeiTForImageClassification(t.DeiTConfig(**SMALL, **LABELS))),
    "DeiT with teacher": Case(lambda: t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(**SMALL, **LABELS))),
    "I-JEPA": Case(lambda: t.IJepaForImageClassification(t.IJepaConfig(**SMALL, **LABELS))),
    "DINOv2 giant": Case(
        lambda: t.Dinov2ForImageClassification(t.Dinov2Config(**SMALL, **LABELS, use_swiglu_ffn=True)), kind="plain"
    ),
    "SigLIP": Case(lambda: t.SiglipForImageClassification(t.SiglipConfig(vision_config=SMALL, **LABELS))),
    "CLIP": Case(lambda: t.CLIPForImageClassification(t.CLIPConfig(vision_config=SMALL, **LABELS))),
    "BEiT": Case(
        lambda: t.BeitForImageClassification(t.BeitConfig(**SMALL, **LABELS, use_relative_position_bias=True)),
        kind="plain",
    ),
    "data2vec": Case(
        lambda: t.Data2VecVisionForImageClassification(
            t.Data2VecVisionConfig(**SMALL, **LABELS, use_relative_position_bias=True)
        ),
        kind="plain",
    ),
}


def build(case: Case) -> Any:
    """Return the peer with every parameter random, in float64."""
    with peers_in_float64():
        model = case.build()
    kept = {n: b.clone() for n, b in model.named_buffers() if n not in model.state_dict()}
    scramble(model, 0.2)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])
    return model.double()


@torch.no_grad()
def run(model: nn.Module, case: Case, images: Tensor) -> Any:
    """Return what the peer computes; of a model with two towers, what its vision tower computes."""
    encoder = getattr(model, case.tower) if case.tower else model
    with peers_in_float64():
        if case.kind == "patches":
            return encoder(**cut_into_patches(images, 8))
        return encoder(images, **({"interpolate_pos_encoding": True} if case.kind == "interpolate" else {}))


def cut_into_patches(images: Tensor, side: int) -> dict[str, Tensor]:
    """Return the inputs of a NaFlex model: patches of (row, column, channel), all of them real."""
    rows, columns = images.shape[2] // side, images.shape[3] // side
    patches = images.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
    patches = patches.flatten(3).flatten(1, 2)
    return {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.int32),
        "spatial_shapes": torch.tensor([[rows, columns]] * len(images)),
    }


def pooled(case: Case, output: Any) -> Tensor:
    """Return what `embed` must give."""
    if case.embed == "average":
        return output.last_hidden_state.mean(dim=1)
    if case.embed == "average of patches":
        return output.last_hidden_state[:, 1:].mean(dim=1)
    return output.last_hidden_state[:, 0] if case.embed == "class" else output.pooler_output
