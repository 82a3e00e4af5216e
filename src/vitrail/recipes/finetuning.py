"""Fine-tuning as in the paper: a row here is a row of its table 4.

All use SGD with momentum 0.9, cosine decay, batches of 512, no weight decay, and gradients clipped to a norm of 1. The
paper chooses the learning rate on a held-out part of the training set (`Recipe.learning_rates`, `Recipe.holdout`), then
trains on the whole set: data.holdout=0 data.validate_on=test. The warm-up of 500 steps, the crop and the flip come from
the released configuration; a warm-up of 100 steps for runs of 500 is our choice. Averages keep 0.9999 of themselves in
every step, without our ramp (`optimizer.averaging_ramp`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.recipes.pretraining import IMAGENET
from vitrail.recipes.recipe import DataSet, Recipe, Settings, make_data_settings

CIFAR10 = DataSet("CIFAR-10", images=50_000, classes=10)
CIFAR100 = DataSet("CIFAR-100", images=50_000, classes=100)
PETS = DataSet("Oxford-IIIT Pets", images=3_680, classes=37)
FLOWERS = DataSet("Flowers-102", images=1_020, classes=102)
VTAB = DataSet("a task of VTAB", images=1_000, classes=100)
"""Its 19 tasks have different numbers of classes, which hardly change the cost."""

BATCH_SIZE = 512


class FinetuningRow(NamedTuple):
    """A row of the paper's table 4, with the result from table 5 or 2."""

    suffix: str
    data: DataSet
    steps: int
    warmup_steps: int
    learning_rates: tuple[float, ...]
    learning_rate: float
    """The rate used without a sweep: the third of four."""
    holdout: float
    expected: str
    image_size: int = 384
    averaging: float | None = None
    typical_model: str = "B/16"


IMAGENET_RATES = (0.003, 0.01, 0.03, 0.06)
"""The paper added 0.06 for ResNets and hybrids."""
SMALL_DATA_RATES = (0.001, 0.003, 0.01, 0.03)


def _format_imagenet_21k_result(base: float, large: float) -> str:
    return f"{base:.2f} from B/16 and {large:.2f} from L/16, pre-trained on ImageNet-21k (table 5)"


TABLE_4 = (
    FinetuningRow(
        "imagenet", IMAGENET, 20_000, 500, IMAGENET_RATES, 0.03, 0.01, _format_imagenet_21k_result(83.97, 85.15)
    ),
    FinetuningRow(
        *("imagenet-512", IMAGENET, 20_000, 500, IMAGENET_RATES, 0.03, 0.01),
        expected="87.76 ± 0.03 from L/16 of JFT-300M, 85.30 ± 0.02 from L/16 of ImageNet-21k (table 2)",
        image_size=512,
        averaging=0.9999,
        typical_model="L/16",
    ),
    FinetuningRow(
        *("imagenet-518", IMAGENET, 20_000, 500, IMAGENET_RATES, 0.03, 0.01),
        expected="88.55 ± 0.04 from H/14 of JFT-300M (table 2)",
        image_size=518,
        averaging=0.9999,
        typical_model="H/14",
    ),
    FinetuningRow(
        "cifar10", CIFAR10, 10_000, 500, SMALL_DATA_RATES, 0.01, 0.02, _format_imagenet_21k_result(98.95, 99.16)
    ),
    FinetuningRow(
        "cifar100", CIFAR100, 10_000, 500, SMALL_DATA_RATES, 0.01, 0.02, _format_imagenet_21k_result(91.67, 93.44)
    ),
    FinetuningRow("pets", PETS, 500, 100, SMALL_DATA_RATES, 0.01, 0.1, _format_imagenet_21k_result(94.43, 94.73)),
    FinetuningRow("flowers", FLOWERS, 500, 100, SMALL_DATA_RATES, 0.01, 0.1, _format_imagenet_21k_result(99.38, 99.61)),
    FinetuningRow(
        *("vtab", VTAB, 2_500, 500, (0.01,), 0.01, 0.2),
        expected="72.72 in the mean over 19 tasks from L/16 of ImageNet-21k (table 2)",
    ),
)


def _settings(row: FinetuningRow) -> Settings:
    often = max(row.steps // 10, 100)
    optimizer: dict[str, Any] = {
        "kind": "sgd",
        "learning_rate": row.learning_rate,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
    }
    if row.averaging is not None:
        optimizer |= {"averaging": row.averaging, "averaging_ramp": False}
    return {
        "model": {"image_size": row.image_size},
        "data": make_data_settings(row.holdout, BATCH_SIZE),
        "objective": {"kind": "classification", "loss": "softmax"},
        "optimizer": optimizer,
        "schedule": {"steps": row.steps, "warmup_steps": row.warmup_steps, "decay": "cosine"},
        "run": {"evaluate_every": often, "checkpoint_every": often},
    }


def _recipe(row: FinetuningRow) -> Recipe:
    averaged = ", weights averaged" if row.averaging is not None else ""
    return Recipe(
        name=f"finetune-{row.suffix}",
        summary=f"fine-tuning on {row.data.name} at {row.image_size} px for {row.steps:,} steps{averaged}",
        settings=_settings(row),
        data_set=row.data,
        expected=row.expected,
        source="the paper, table 4; warm-up and augmentation from the released code",
        typical_model=row.typical_model,
        learning_rates=row.learning_rates,
        holdout=row.holdout,
    )


FINETUNING = tuple(_recipe(row) for row in TABLE_4)
"""Every row of table 4, and table 2's best resolutions on ImageNet."""
