"""Self-supervised pre-training by joint embedding: views of one image are represented alike. Newer than the paper."""

from __future__ import annotations

from typing import Any

from vitrail.recipes.recipe import Recipe
from vitrail.recipes.small import TINY_IMAGENET

VIT_8: dict[str, Any] = {
    "name": "S/8",
    "image_size": 64,
    "depth": 9,
    "pool": "average",
    "num_classes": 0,
    "stochastic_depth": 0.1,
}
VIEWS: dict[str, Any] = {
    "global_area": (0.3, 1.0),
    "local_area": (0.05, 0.3),
    "local_count": 6,
    "local_scale": 0.5,
    # Images are small: a wider blur would leave little of them.
    "blur_radius": (0.1, 1.0),
}

TINY_IMAGENET_JOINT = Recipe(
    name="tiny-imagenet-joint",
    summary="a small ViT by joint embedding on Tiny-ImageNet, no labels, on one GPU",
    settings={
        "model": VIT_8,
        "data": {"validate_on": "val", "batch_size": 512, "on_device": True},
        "objective": {"kind": "lejepa", "views": VIEWS},
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.05, "averaging": 0.999},
        "schedule": {"epochs": 100, "warmup_steps": 1_000, "decay": "cosine"},
        "run": {"evaluate_every": 4_000, "fewshot_every": 2_000, "checkpoint_every": 4_000, "log_every": 200},
    },
    data_set=TINY_IMAGENET,
    expected="not measured",
)

JOINT_EMBEDDING = (TINY_IMAGENET_JOINT,)
