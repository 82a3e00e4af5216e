"""Peers' models with every parameter and buffer random, and their checkpoints on disk as those libraries write them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from peers import timm, torchvision, transformers


@torch.no_grad()
def scramble(model: nn.Module, scale: float = 0.05) -> Any:
    """Random values everywhere: heads, class tokens, layer scale, norm statistics; nothing left at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator) * scale
            is_scale = "running_var" in name or (tensor.ndim == 1 and not name.endswith(("bias", "running_mean")))
            tensor.copy_(1 + noise if is_scale else noise)
    return model.eval()


def images_for(size: tuple[int, int], batch: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(7))


TIMM = {
    "Ti/16": ("vit_tiny_patch16_224", {}),
    "S/16": ("vit_small_patch16_224", {}),
    "B/16": ("vit_base_patch16_224", {"num_classes": 10}),
    "Ti/32": ("vit_tiny_patch16_224", {"patch_size": 32}),
    "S/32": ("vit_small_patch32_224", {}),
    "B/32": ("vit_base_patch32_224", {"num_classes": 10, "depth": 3}),
    "S/14 with layer scale and registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 224, "num_classes": 10}),
    "DeiT-Ti": ("deit_tiny_patch16_224", {}),
    "DeiT-Ti distilled": ("deit_tiny_distilled_patch16_224", {}),
    "DeiT III S": ("deit3_small_patch16_224", {}),
    "CLIP": ("vit_base_patch32_clip_224", {"depth": 3, "num_classes": 10}),
    "CLIP with quick GELU": ("vit_base_patch32_clip_quickgelu_224", {"depth": 3, "num_classes": 10}),
    "average pooling, norm after it": ("vit_tiny_patch16_224", {"global_pool": "avg", "depth": 3}),
    "average pooling, norm before it": ("vit_tiny_patch16_224", {"global_pool": "avg", "fc_norm": False, "depth": 3}),
    "attention pooling": ("vit_tiny_patch16_224", {"global_pool": "map", "depth": 3}),
    "no class token": ("vit_base_patch16_gap_224", {"depth": 3, "num_classes": 10}),
    "not square": ("vit_tiny_patch16_224", {"img_size": (96, 160), "depth": 3}),
    "no head": ("vit_tiny_patch16_224", {"num_classes": 0, "depth": 3}),
    "one channel, tanh GELU": ("vit_tiny_patch16_224", {"in_chans": 1, "act_layer": "gelu_tanh", "depth": 3}),
    "R50+B/16": ("vit_base_r50_s16_224", {"num_classes": 10, "depth": 3}),
    "R26+S/32": ("vit_small_r26_s32_224", {}),
    "BiT-R50x1": ("resnetv2_50x1_bit", {"num_classes": 10}),
}


def mark_slow(cases: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Return the cases for `parametrize`; those in `slow` run only with `-m slow`."""
    return [pytest.param(case, marks=pytest.mark.slow) if case in slow else case for case in cases]


def timm_model(case: str) -> Any:
    name, options = TIMM[case]
    # Deep random ResNets amplify rounding; with smaller values they do it less, and float32 can be compared.
    return scramble(timm.create_model(name, **options), 0.02 if "R" in case[:1] or "BiT" in case else 0.05)


def timm_folder(case: str, model: Any, folder: Path) -> Path:
    """As timm writes to the hub."""
    timm.models.save_for_hf(model, folder, model_args=TIMM[case][1] or None, safe_serialization=True)
    return folder


def save_tensors(model: nn.Module, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    return path


def torchvision_model(stem: bool = False) -> Any:
    if not stem:
        return scramble(torchvision.models.vit_b_16(num_classes=10))
    layers = [torchvision.models.vision_transformer.ConvStemConfig(c, 3, 2) for c in (24, 48, 96, 192)]
    return scramble(
        torchvision.models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=3, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=10,
            conv_stem_configs=layers,
        )
    )  # fmt: skip


SMALL_HF: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 48,
    "patch_size": 8,
}


def huggingface_model(kind: str) -> Any:
    t = transformers
    small, labels = SMALL_HF, {"id2label": {i: f"class {i}" for i in range(10)}}
    dino = {**small, "mlp_ratio": 2}
    built = {
        "ViT": lambda: t.ViTForImageClassification(t.ViTConfig(**small, **labels)),
        "ViT with tanh GELU": lambda: t.ViTForImageClassification(
            t.ViTConfig(**small, **labels, hidden_act="gelu_pytorch_tanh", qkv_bias=False)
        ),
        "ViT without head": lambda: t.ViTModel(t.ViTConfig(**small)),
        "ViTMAE": lambda: t.ViTMAEForPreTraining(
            t.ViTMAEConfig(
                **small,
                decoder_hidden_size=32,
                decoder_num_hidden_layers=1,
                decoder_num_attention_heads=2,
                mask_ratio=0.0,
            )
        ),
        "DeiT": lambda: t.DeiTForImageClassification(t.DeiTConfig(**small, **labels)),
        "DeiT with teacher": lambda: t.DeiTForImageClassificationWithTeacher(t.DeiTConfig(**small, **labels)),
        "Dinov2": lambda: t.Dinov2ForImageClassification(t.Dinov2Config(**dino, **labels)),
        "Dinov2 without head": lambda: t.Dinov2Model(t.Dinov2Config(**dino)),
        "Dinov2 with registers": lambda: t.Dinov2WithRegistersForImageClassification(
            t.Dinov2WithRegistersConfig(**dino, **labels)
        ),
    }
    return scramble(built[kind]())
