"""Choose the settings of a fine-tuning for the data and the model: the paper's, adapted to less data."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail.data.open import Data, has_labelled_test, list_splits, name_data, open_training_images, propose_data
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import decode_to_pillow
from vitrail.errors import ConfigError, DataError
from vitrail.model.architecture import Backbone, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost, count_tokens
from vitrail.model.timm_model import TimmModel, measure_activation_bytes
from vitrail.system.files import short_name
from vitrail.system.results import format_count
from vitrail.training.build import count_steps
from vitrail.training.config import RunConfig
from vitrail.weights.source import PANE

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03)
"""The learning rates that the paper tries, for batches of 512."""
PAPER_BATCH = 512
FITTED_HEAD_RATE, RATE_WIDTH = 1e-4, 256
"""AdamW's learning rate from a fitted head, for a model of this width; a wider one gets less, in proportion. Measured
on photos of pets with pane: 1e-4 was better than 3e-5 and 3e-4, and better than SGD at any rate."""
OPTIMIZER_KEYS = {"kind", "learning_rate", "momentum", "weight_decay"}
GROWTH = 1.5
"""Factor of the resolution: the paper goes from 224 to 384."""
MOST_ON_A_CPU = 10e9
"""Operations per image above which a CPU keeps the resolution: a B/16 would take hours."""
HOLDOUT, BIG_HOLDOUT, FEW_TO_TEST = 0.1, 0.2, 2_000
"""Share of the images that is set aside, and the larger share below that number of images."""
LEAST_DIVIDED = 200
"""Number of validation images from which one half of them chooses and the other reports."""
EVALUATIONS = 8
"""Number of evaluations in a run."""
PATIENCE = 4
"""Evaluations without a better one after which training ends."""
FEW = 10_000
"""Number of images below which crops are gentler than the paper's."""
SIZE_SAMPLES = 32
"""Number of images whose size is read to find the resolution of the data."""
SCRATCH_LEARNING_RATES = (0.0003, 0.001, 0.003)
TABLES = (".csv", ".tsv", ".parquet", ".tar")
COMMON_NAMES = ("annotations", "data", "index", "labels", "metadata", "train", "images")
"""Names of tables that say nothing about the data."""


@dataclass(frozen=True)
class DataSummary:
    """What the settings depend on, of the training data."""

    images: int
    classes: int
    """For another task than labels, the outputs of the model."""
    short_side: int
    """Shorter side of a typical image, in pixels."""
    pixels: int
    """Pixels of a typical image."""
    has_validation: bool
    """Whether the data has a validation split."""
    has_test: bool
    """Whether the data has a test split with labels."""


def summarise_data(data: Data) -> DataSummary:
    """Count images and classes of the training data and find the typical image size.

    Raises:
        DataError: no image can be read; or, of labels, there are fewer than two classes, or a class without an image.
    """
    source, splits = open_training_images(data), list_splits(data)
    is_labels = source.task.kind == "labels"
    if is_labels:
        _check_classes(source, data)
    sizes = _read_some_sizes(source)
    return DataSummary(
        images=len(source),
        classes=source.num_classes if is_labels else len(source.task.output_names),
        short_side=int(statistics.median(min(size) for size in sizes)),
        pixels=int(statistics.median(height * width for height, width in sizes)),
        has_validation="val" in splits,
        has_test=has_labelled_test(data) if is_labels else "test" in splits,
    )


def _check_classes(source: Source, data: Data) -> None:
    """Raise a DataError if there are fewer than two classes, or a class without a readable image."""
    name = name_data(data)
    if source.num_classes < 2:
        count = format_count(source.num_classes, "class")
        raise propose_data(data) or DataError(
            f"{name} has {count}: a classifier needs a folder for each of two or more"
        )
    labels = source.labels(0, len(source))
    counts = np.bincount(labels[labels >= 0], minlength=source.num_classes)  # a missing label fails when it is read
    if not counts.all():
        empty = source.classes[int(counts.argmin())] if source.classes else int(counts.argmin())
        raise propose_data(data) or DataError(
            f"{name} has no image of {empty!r} that can be read: `vitrail data check` tells what was left out; "
            "export those as JPEG, or take the folder away"
        )


def _read_some_sizes(source: Source) -> list[tuple[int, int]]:
    """Return the two sides of some images, spread evenly over the data."""
    sizes = []
    for index in range(0, len(source), max(len(source) // SIZE_SAMPLES, 1)):
        try:
            content = source.read(index).content
            size = content.shape[1:] if isinstance(content, torch.Tensor) else decode_to_pillow(content).size
            sizes.append((int(size[0]), int(size[1])))
        except DataError:
            continue
    if not sizes:
        raise DataError("none of the images that were looked at can be read: `vitrail data check` names what is wrong")
    return sizes


def make_finetune_config(
    summary: DataSummary, model: ImageModel, name: str, share: float | None = None
) -> dict[str, Any]:
    """Return the settings for fine-tuning a model: the paper's, adapted to less data; `share` is `data.share`."""
    size = choose_image_size(model, summary.short_side, torch.cuda.is_available())
    tree = _make_shared_config(summary, share)
    tree["model"] = {"weights": name, "image_size": size}
    rate = scale_learning_rate(LEARNING_RATES[2], tree["data"]["batch_size"])
    tree["optimizer"] = {"kind": "sgd", "momentum": 0.9, "learning_rate": rate, "clip_norm": 1.0}
    tree["optimizer"]["accumulate"] = count_batch_parts(model, size, tree["data"]["batch_size"])
    return tree


def choose_optimizer_for_fitted_head(model: ImageModel) -> dict[str, Any]:
    """Return the optimizer of a short training that starts from a fitted head: AdamW with small steps.

    The paper's SGD starts from a head of zeros and needs more steps than fit into minutes on a CPU.
    """
    architecture = model.architecture
    width = architecture.width if isinstance(architecture, VitArchitecture) else RATE_WIDTH
    rate = float(f"{FITTED_HEAD_RATE * RATE_WIDTH / width:.2g}")
    return {"kind": "adamw", "learning_rate": rate, "weight_decay": 0.05}


def count_batch_parts(model: ImageModel, size: tuple[int, int], batch: int) -> int:
    """Return the number of parts into which a batch must be split to fit into the GPU's memory; 1 on a CPU."""
    if not torch.cuda.is_available():
        return 1
    a = model.architecture
    if isinstance(a, VitArchitecture):
        # A layer keeps about 34 bytes per token and channel in bf16.
        image_bytes = 34 * count_tokens(a, size) * a.width * a.depth
        image_bytes += _estimate_resnet_bytes(a.backbone, size) if a.backbone else 0
    elif isinstance(model, TimmModel):
        image_bytes = measure_activation_bytes(model.architecture.copy_at_size(size)) // 2  # bf16 takes half of float32
    else:
        image_bytes = _estimate_resnet_bytes(a.backbone, size)
    free, _ = torch.cuda.mem_get_info()
    parts = 1
    while parts < batch and batch // parts * image_bytes > 0.6 * free:
        parts *= 2
    return parts


def _estimate_resnet_bytes(backbone: Backbone, size: tuple[int, int]) -> int:
    """Return about how many bytes a ResNet keeps for each image in bf16, from what a ResNet-50 keeps at 224 pixels."""
    pixels = size[0] * size[1] * (1 if backbone.root == "large" else 16)  # a small root does not divide them by 4 × 4
    return 60_000_000 * backbone.root_channels // 64 * pixels // 224**2


def make_scratch_config(summary: DataSummary, share: float | None = None) -> dict[str, Any]:
    """Return the settings for training from scratch: a small ViT, AdamW and regularisation, for little data.

    `share` is `data.share`.
    """
    # About 64 patches: enough for shapes, few enough for a CPU.
    patch = next((patch for patch in (4, 8, 16) if patch * 8 >= min(summary.short_side, 128)), 16)
    size = patch * 8
    tree = _make_shared_config(summary, share)
    tree["model"] = {"name": f"Ti/{patch}", "image_size": size, "depth": 6, "pool": "average", "stochastic_depth": 0.1}
    tree["optimizer"] = {"kind": "adamw", "learning_rate": SCRATCH_LEARNING_RATES[1], "weight_decay": 0.05}
    return tree


def _make_shared_config(summary: DataSummary, share: float | None) -> dict[str, Any]:
    """Return batch size, length and crops. Few images get small batches, so that an epoch has enough steps.

    What is held out does not depend on the share, so that all shares are validated on the same images.
    """
    images = _count_shared(summary, share)
    most = PAPER_BATCH if torch.cuda.is_available() else 32
    batch = max(2, min(most, 2 ** int(math.log2(max(images * 0.9 / 4, 2)))))
    steps = min(max(math.ceil(30 * images / batch), 200), 10_000)
    # The paper crops down to 5% of the area; with few images that leaves too little to learn from.
    gentle = {"crop_area": (0.35, 1.0)} if images < FEW else {}
    held_out = choose_holdout(summary)
    return {
        "data": {"batch_size": batch, "workers": 0 if images < 1000 else 2, **held_out, "augmentation": gentle},
        "schedule": {"steps": steps, "decay": "cosine", "patience": PATIENCE, "result": "best"},
        "run": {"log_every": 10},
    }


def choose_holdout(summary: DataSummary) -> dict[str, float]:
    """Return `data.holdout` under its name, or nothing for data with validation images of its own."""
    return {} if summary.has_validation else {"holdout": HOLDOUT if summary.images >= FEW_TO_TEST else BIG_HOLDOUT}


def _count_shared(summary: DataSummary, share: float | None) -> int:
    """Return about how many images a share of the data has; all of them if it is None."""
    return summary.images if share is None else max(round(summary.images * share), 1)


def choose_division(reports_on_test: bool, validation_images: int, is_sweep: bool) -> str:
    """Return `data.divide_validation`: how the accuracy is kept apart from what chooses the weights.

    If a test split reports, nothing is divided. A sweep chooses a learning rate too, by the first half, so the other
    half must report.
    """
    if reports_on_test:
        return "no"
    return "halves" if is_sweep or validation_images >= LEAST_DIVIDED else "cross-fit"


def scale_learning_rate(rate: float, batch: int) -> float:
    """Scale one of the paper's learning rates to another batch size, with its square root."""
    return float(f"{rate * math.sqrt(batch / PAPER_BATCH):.2g}")


def choose_image_size(model: ImageModel, short_side: int, has_gpu: bool) -> tuple[int, int]:
    """Return (height, width) for training: up to 1.5 times the model's, in whole patches.

    It is no larger than the images, and stays the model's if a CPU would take too long or the model allows no other.
    """
    if isinstance(model, TimmModel):
        stride = model.stride
    elif not isinstance(model.architecture, VitArchitecture):
        stride = model.architecture.backbone.stride
    else:
        stride = model.architecture.stride
        if model.architecture.position == "relative":
            return model.image_size  # relative positions are bound to the grid
    height, width = model.image_size
    if short_side <= min(height, width):
        return height, width
    factor = min(GROWTH, short_side / min(height, width))
    higher, wider = (max(round(side * factor / stride) * stride, side) for side in (height, width))
    try:
        flops = compute_cost(model.architecture, (higher, wider)).flops
    except ConfigError:  # a timm network with a fixed size
        return height, width
    return (height, width) if not has_gpu and flops > MOST_ON_A_CPU else (higher, wider)


def set_intervals(config: RunConfig, given_keys: set[str], summary: DataSummary) -> RunConfig:
    """Return the configuration with warm-up and intervals that fit its number of steps; `given_keys` stay unchanged.

    The last of the evaluations is at the last step, or a few steps before it would have been due.
    """
    steps = count_steps(config, _count_shared(summary, config.data.share))
    often = math.ceil(steps / EVALUATIONS)
    values_by_section = {
        "schedule": {"warmup_steps": steps // 10},
        "run": {"evaluate_every": often, "checkpoint_every": often},
    }
    tree = config.model_dump()
    for section, values in values_by_section.items():
        tree[section] |= {key: value for key, value in values.items() if key not in given_keys}
    return RunConfig(**tree)


def name_run_folder(data: str, model: str | None, is_quick: bool = False) -> str:
    """Return a short name such as photos, photos-quick or photos-from-vit-base: the same command has the same folder.

    Args:
        data: the name of the data. A table with a common name, such as photos/labels.csv, is called after its folder.
        model: the model to start from; pane is not named, None means from scratch.
        is_quick: whether only a head is fitted.
    """
    path = Path(data)
    name = short_name(data)
    if path.suffix.lower() in TABLES:
        is_common = path.stem.lower() in COMMON_NAMES and path.parent.name
        name = short_name(path.parent.name if is_common else path.stem)
    start = "-scratch" if model is None else "" if model == PANE else f"-from-{short_name(model)}"
    return name + ("-quick" if is_quick else "") + start
