"""Fine-tuning by BiT's own rule (arXiv 1912.11370), for ResNet baselines: the size of the data decides everything.

The paper ran its ResNets by this rule, too, and reported the better of the two results. SGD with momentum 0.9 at a rate
of 0.003 that falls to a tenth three times, batches of 512, no weight decay, no clipping; from 20,000 images on, Mixup.
The released code squashes images to 512 pixels and takes random squares of 480 (160 and 128 below 96×96 pixels, as in
CIFAR). Ours are random crops with the same share of the area, nearly in the image's own shape.
"""

from __future__ import annotations

from typing import NamedTuple

from vitrail.recipes.finetuning import BATCH_SIZE, CIFAR10, PETS
from vitrail.recipes.pretraining import IMAGENET
from vitrail.recipes.recipe import DataSet, Recipe, Settings, make_data_settings

NO_NUMBER = "no number of its own: the paper reports the better of this and finetune-{}"


class BitRow(NamedTuple):
    """The rule for a size of the data, and an example of such data."""

    suffix: str
    images: str
    data: DataSet
    warmup_steps: int
    decay_at: tuple[int, ...]
    steps: int
    mixup: float
    image_size: int
    precrop: int
    """Side of the square that the released code cuts `image_size` from."""
    holdout: float
    expected: str


RULE = (
    BitRow(
        *("small", "fewer than 20,000 images", PETS, 100, (200, 300, 400), 500, 0.0, 480, 512, 0.1),
        expected=NO_NUMBER.format("pets"),
    ),
    BitRow(
        *("medium", "20,000 to 500,000 images", CIFAR10, 500, (3_000, 6_000, 9_000), 10_000, 0.1, 128, 160, 0.02),
        expected=NO_NUMBER.format("cifar10"),
    ),
    BitRow(
        *("large", "500,000 images and more", IMAGENET, 500, (6_000, 12_000, 18_000), 20_000, 0.1, 480, 512, 0.01),
        expected="80.68 from BiT-M-R50x1 on ImageNet (BiT's released code)",
    ),
)


def _settings(row: BitRow) -> Settings:
    share = (row.image_size / row.precrop) ** 2
    data = make_data_settings(row.holdout, BATCH_SIZE)
    data["augmentation"] = {"crop_area": (share, share), "crop_ratio": (1 / 2, 2.0), "flip": 0.5}
    often = max(row.steps // 10, 100)
    return {
        "model": {"image_size": row.image_size},
        "data": {**data, "mixing": {"mixup": row.mixup}},
        "objective": {"kind": "classification", "loss": "softmax"},
        "optimizer": {
            "kind": "sgd",
            "learning_rate": 0.003,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "clip_norm": None,
        },
        "schedule": {
            "steps": row.steps,
            "warmup_steps": row.warmup_steps,
            "decay": "staircase",
            "decay_at": row.decay_at,
        },
        "run": {"evaluate_every": often, "checkpoint_every": often},
    }


BIT_FINETUNING = tuple(
    Recipe(
        name=f"finetune-bit-{row.suffix}",
        summary=f"fine-tuning a ResNet by BiT's rule for {row.images}, at {row.image_size} px",
        settings=_settings(row),
        data_set=row.data,
        expected=row.expected,
        source="BiT's released rule; the crop is ours",
        typical_model="BiT-R50x1",
        holdout=row.holdout,
    )
    for row in RULE
)
