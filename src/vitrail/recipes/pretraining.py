"""Supervised pre-training as in the paper: a row here is a row of its table 3.

The paper says Adam with weight decay. Its decay is decoupled from the gradient, which PyTorch calls AdamW; the values
are AdamW's. All models use β 0.9/0.999, batches of 4,096 at 224 pixels and 10,000 steps of warm-up. Linear decay ends
at 1e-5, as in the released code. Gradients are clipped on ImageNet only. Vision Transformers and hybrids have the
representation layer of the pre-training head.

R200x3 of table 6 has no recipe, because the paper does not give its learning rate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vitrail.recipes.recipe import DataSet, Recipe, Settings, make_data_settings

JFT = DataSet("JFT-300M", images=303_000_000, classes=18_291)
IMAGENET_21K = DataSet("ImageNet-21k", images=14_200_000, classes=21_841)
IMAGENET = DataSet("ImageNet", images=1_281_167, classes=1_000)

BATCH_SIZE = 4096
LINEAR_END = 1e-5
"""Where linear decay ends, from the released code; the paper does not say."""
WIDTH = {"B": 768, "L": 1024, "H": 1280}
"""Width of the representation layer, the same as the model's. Repeated here: `vitrail.model` is slow to import."""


class PretrainingRow(NamedTuple):
    """A row of the paper's table 3."""

    models: tuple[str, ...]
    data: DataSet
    epochs: tuple[int, ...]
    learning_rate: float
    decay: str
    weight_decay: float
    dropout: float


TABLE_3 = (
    PretrainingRow(("B/16", "B/32"), JFT, (7,), 8e-4, "linear", 0.1, 0.0),
    PretrainingRow(("L/32",), JFT, (7,), 6e-4, "linear", 0.1, 0.0),
    PretrainingRow(("L/16",), JFT, (7, 14), 4e-4, "linear", 0.1, 0.0),
    PretrainingRow(("H/14",), JFT, (14,), 3e-4, "linear", 0.1, 0.0),
    PretrainingRow(("BiT-R50x1", "BiT-R50x2"), JFT, (7,), 1e-3, "linear", 0.1, 0.0),
    PretrainingRow(("BiT-R101x1",), JFT, (7,), 8e-4, "linear", 0.1, 0.0),
    PretrainingRow(("BiT-R152x1",), JFT, (7,), 6e-4, "linear", 0.1, 0.0),
    PretrainingRow(("BiT-R152x2",), JFT, (7, 14), 6e-4, "linear", 0.1, 0.0),  # 14 epochs: from table 6
    PretrainingRow(("R50+B/16", "R50+B/32"), JFT, (7,), 8e-4, "linear", 0.1, 0.0),
    PretrainingRow(("R50+L/32",), JFT, (7,), 2e-4, "linear", 0.1, 0.0),
    PretrainingRow(("R50+L/16",), JFT, (7, 14), 4e-4, "linear", 0.1, 0.0),
    PretrainingRow(("B/16", "B/32"), IMAGENET_21K, (90,), 1e-3, "linear", 0.03, 0.1),
    PretrainingRow(("L/16", "L/32"), IMAGENET_21K, (90, 30), 1e-3, "linear", 0.03, 0.1),
    PretrainingRow(("B/16", "B/32", "L/16", "L/32"), IMAGENET, (300,), 3e-3, "cosine", 0.3, 0.1),
)


class Table6Result(NamedTuple):
    """A row of table 6: top-1 accuracy (%) after fine-tuning, and the cost of pre-training."""

    imagenet: float
    cifar100: float
    exaflops: int


TABLE_6 = {
    ("B/32", 7): Table6Result(80.73, 90.49, 55),
    ("B/16", 7): Table6Result(84.15, 91.87, 224),
    ("L/32", 7): Table6Result(84.37, 92.52, 196),
    ("L/16", 7): Table6Result(86.30, 93.46, 783),
    ("L/16", 14): Table6Result(87.12, 94.04, 1567),
    ("H/14", 14): Table6Result(88.08, 94.71, 4262),
    ("BiT-R50x1", 7): Table6Result(77.54, 86.07, 50),
    ("BiT-R50x2", 7): Table6Result(82.12, 89.20, 199),
    ("BiT-R101x1", 7): Table6Result(80.67, 89.17, 96),
    ("BiT-R152x1", 7): Table6Result(81.88, 90.22, 141),
    ("BiT-R152x2", 7): Table6Result(84.97, 92.05, 563),
    ("BiT-R152x2", 14): Table6Result(85.56, 91.92, 1126),
    ("R50+B/32", 7): Table6Result(84.90, 92.24, 106),
    ("R50+B/16", 7): Table6Result(85.58, 92.63, 274),
    ("R50+L/32", 7): Table6Result(85.68, 92.93, 246),
    ("R50+L/16", 7): Table6Result(86.60, 93.64, 859),
    ("R50+L/16", 14): Table6Result(87.12, 93.89, 1668),
}

TABLE_5 = {
    (IMAGENET_21K, "B/16"): (83.97, 91.67),
    (IMAGENET_21K, "B/32"): (81.28, 91.97),
    (IMAGENET_21K, "L/16"): (85.15, 93.44),
    (IMAGENET_21K, "L/32"): (80.99, 93.04),
    (IMAGENET, "B/16"): (77.91, 87.13),
    (IMAGENET, "B/32"): (73.38, 86.31),
    (IMAGENET, "L/16"): (76.53, 86.35),
    (IMAGENET, "L/32"): (71.16, 87.07),
}
"""Top-1 accuracy (%) on ImageNet and CIFAR-100, for pre-training that table 6 does not cover."""

# The paper does not name its loss. The authors' released head for ImageNet-21k starts from a bias of −10, which suits a
# sigmoid loss. Training JFT in the same way, and ImageNet by softmax, is our choice.
SIGMOID: dict[str, Any] = {"kind": "classification", "loss": "sigmoid", "head_bias": -10.0}
SOFTMAX: dict[str, Any] = {"kind": "classification", "loss": "softmax", "head_bias": 0.0}


class DataSetDefaults(NamedTuple):
    """The prefix of recipe names on a data set, and the settings that table 3 does not give."""

    prefix: str
    usual_epochs: int
    objective: dict[str, Any]
    clip_norm: float | None
    holdout: float
    evaluate_every: int
    checkpoint_every: int


DEFAULTS = {
    JFT: DataSetDefaults("jft", 7, SIGMOID, None, 0.001, 20_000, 5_000),
    IMAGENET_21K: DataSetDefaults("in21k", 90, SIGMOID, None, 0.001, 10_000, 5_000),
    IMAGENET: DataSetDefaults("imagenet", 300, SOFTMAX, 1.0, 0.01, 2_000, 2_000),
}


def _name(row: PretrainingRow, model: str, epochs: int) -> str:
    """Return a name such as jft-r50+b16, or jft-l16-14 for a length that is not the usual one on that data set."""
    defaults = DEFAULTS[row.data]
    suffix = f"-{epochs}" if len(row.epochs) > 1 and epochs != defaults.usual_epochs else ""
    return f"{defaults.prefix}-{model.removeprefix('BiT-').replace('/', '').lower()}{suffix}"


def _settings(row: PretrainingRow, model: str, epochs: int) -> Settings:
    defaults = DEFAULTS[row.data]
    options: dict[str, Any] = {}
    if not model.startswith("BiT-"):
        letter = model.split("+")[-1].split("/")[0]
        options = {"representation_size": WIDTH[letter], "dropout": row.dropout}
    schedule: dict[str, Any] = {"epochs": epochs, "warmup_steps": 10_000, "decay": row.decay}
    if row.decay == "linear":
        schedule["final_learning_rate"] = LINEAR_END
    return {
        "model": {"name": model, "image_size": 224, **options},
        "data": make_data_settings(defaults.holdout, BATCH_SIZE),
        "objective": defaults.objective,
        "optimizer": {
            "kind": "adamw",
            "learning_rate": row.learning_rate,
            "weight_decay": row.weight_decay,
            "betas": (0.9, 0.999),
            "clip_norm": defaults.clip_norm,
        },
        "schedule": schedule,
        "run": {"evaluate_every": defaults.evaluate_every, "checkpoint_every": defaults.checkpoint_every},
    }


def _format_expected(row: PretrainingRow, model: str, epochs: int) -> str:
    if row.data is JFT:
        imagenet, cifar100, _ = TABLE_6[model, epochs]
        where = "table 6"
        if model == "H/14":
            where = "table 6; 88.04 and 94.55 in table 5"
    else:
        imagenet, cifar100 = TABLE_5[row.data, model]
        where = "table 5"
        if len(row.epochs) > 1:
            where = "table 5, which does not say after how many epochs"
    return f"{imagenet:.2f} on ImageNet, {cifar100:.2f} on CIFAR-100, fine-tuned at 384 px ({where})"


def _source(row: PretrainingRow, model: str, epochs: int) -> str:
    if model == "BiT-R152x2" and epochs == 14:
        return (
            "the paper, table 3, for the epochs of table 6; that the learning rate is that of 7 epochs is our reading"
        )
    return "the paper, table 3"


def _recipe(row: PretrainingRow, model: str, epochs: int) -> Recipe:
    return Recipe(
        name=_name(row, model, epochs),
        summary=f"{model} on {row.data.name} for {epochs} epochs",
        settings=_settings(row, model, epochs),
        data_set=row.data,
        expected=_format_expected(row, model, epochs),
        source=_source(row, model, epochs),
        paper_exaflops=TABLE_6[model, epochs].exaflops if row.data is JFT else None,
    )


PRETRAINING = tuple(_recipe(row, model, epochs) for row in TABLE_3 for model in row.models for epochs in row.epochs)
"""Every model of table 3, for each number of epochs given there."""
