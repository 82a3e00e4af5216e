"""A plain S/16 on ImageNet alone, from later work by the same group ("Better plain ViT baselines", arXiv 2205.01580).

Average pooling, fixed sine-cosine positions, RandAugment and Mixup, smaller batches. Their released configuration has a
weight decay of 1e-4 that is not multiplied by the learning rate of 1e-3; for AdamW that is 0.1.
"""

from __future__ import annotations

from vitrail.recipes.pretraining import IMAGENET
from vitrail.recipes.recipe import INCEPTION_CROP_AND_FLIP, Recipe, Settings, make_data_settings


def _settings(epochs: int) -> Settings:
    return {
        "model": {
            "name": "S/16",
            "image_size": 224,
            "pool": "average",
            "position": "sin-cos",
            # The published numbers were measured with this tanh layer, as in the released configuration.
            "representation_size": 384,
        },
        "data": {
            **make_data_settings(0.01, 1024),
            "augmentation": {**INCEPTION_CROP_AND_FLIP, "rand_augment": (2, 10.0)},
            "mixing": {"mixup": 0.2},
        },
        "objective": {"kind": "classification", "loss": "softmax"},
        "optimizer": {
            "kind": "adamw",
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "betas": (0.9, 0.999),
            "clip_norm": 1.0,
        },
        "schedule": {"epochs": epochs, "warmup_steps": 10_000, "decay": "cosine"},
        "run": {"evaluate_every": 5_000, "checkpoint_every": 2_500},
    }


def _recipe(name: str, epochs: int, top1: float) -> Recipe:
    return Recipe(
        name=name,
        summary=f"S/16 on ImageNet alone for {epochs} epochs, the better plain ViT",
        settings=_settings(epochs),
        data_set=IMAGENET,
        expected=f"{top1} on ImageNet at 224 px (arXiv 2205.01580, centre crop of 256)",
        source="Better plain ViT baselines, arXiv 2205.01580, and its released configuration",
    )


BETTER_PLAIN = (
    _recipe("better-plain-vit-s16", 90, 76.5),
    _recipe("better-plain-vit-s16-150", 150, 78.5),
    _recipe("better-plain-vit-s16-300", 300, 80.0),
)
