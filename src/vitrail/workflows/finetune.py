"""A classifier for a folder of images: what the paper does to transfer, with numbers chosen for the data at hand.

A new head that starts at zero, a higher resolution than the model was trained at, SGD with a cosine schedule; with a
sweep, the learning rate is chosen on a held-out part and the model then trained again on all of the training data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vitrail.config import show_size
from vitrail.data.open import DEFAULT_HOLDOUT, list_splits, open_data
from vitrail.data.sources.source import Source
from vitrail.data.transforms.decode import decode_to_pillow
from vitrail.errors import ConfigError, DataError
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost, count_tokens
from vitrail.model.timm_model import TimmModel, measure_activation_bytes
from vitrail.system.files import short_name
from vitrail.training.build import count_steps, open_training_data
from vitrail.training.config import RunConfig
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training
from vitrail.training.sweep import change_config, choose_best, run_trials
from vitrail.weights.load import load
from vitrail.workflows.train import describe_result

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03)
"""Those that the paper tries, for batches of 512."""
PAPER_BATCH = 512
GROWTH = 1.5
"""By how much the resolution is raised: the paper goes from 224 to 384."""
MOST_ON_A_CPU = 10e9
"""Operations for an image beyond which a CPU is not asked for a higher resolution: a B/16 would take hours."""
FEW = 10_000
"""Images below which crops are gentler than the paper's."""
LOOKED_AT = 32
"""Images whose size is looked at, to know what resolution the data has."""
SCRATCH_LEARNING_RATES = (0.0003, 0.001, 0.003)


@dataclass(frozen=True)
class DataSummary:
    """What there is to train on."""

    images: int
    classes: int
    short_side: int
    """Of a typical image, in pixels."""
    has_validation: bool
    """Whether the data comes with a part to validate on."""


def finetune(data: str, model: str | None = None, sweep: bool = False, overrides: Sequence[str] = ()) -> Iterator[str]:
    """Lines to print, as they come."""
    given = {override.partition("=")[0].strip().rpartition(".")[2] for override in overrides}
    if sweep and "learning_rate" in given:
        raise ConfigError("--sweep chooses the learning rate: leave optimizer.learning_rate out, or --sweep")
    look = summarise_data(data)
    if model is None:
        yield "training from scratch, which needs many images; `--from MODEL` starts from a trained model"
        tree = make_scratch_config(look)
        rates: Sequence[float] = SCRATCH_LEARNING_RATES
    else:
        tree = make_finetune_config(look, load(model), model)
        rates = [scale_learning_rate(rate, tree["data"]["batch_size"]) for rate in LEARNING_RATES]
    tree["data"]["source"] = data
    tree["run"]["folder"] = f"runs/{name_run_folder(data, model)}"
    config = set_intervals(resolve(tree, overrides), given, look)
    yield describe_choices(config, look)
    if sweep:
        config = yield from sweep_learning_rates(config, rates, look)
    yield from describe_result(config, run_training(config))


def set_intervals(config: RunConfig, given: set[str], look: DataSummary) -> RunConfig:
    """With a warm-up and intervals that suit the length, whoever chose that; what was `given` stays."""
    steps = count_steps(config, look.images)
    fitting = {
        "schedule": {"warmup_steps": steps // 10},
        "run": {"evaluate_every": max(steps // 4, 1), "checkpoint_every": max(steps // 4, 1)},
    }
    tree = config.model_dump()
    for section, values in fitting.items():
        tree[section] |= {key: value for key, value in values.items() if key not in given}
    return RunConfig(**tree)


def sweep_learning_rates(config: RunConfig, rates: Sequence[float], look: DataSummary) -> Generator[str, None, RunConfig]:
    """Train with each learning rate, choose by the held-out part, and give the configuration of the final training."""
    if open_training_data(config.data).evaluation is None:
        raise ConfigError("--sweep chooses by a part that is held out: leave data.holdout and data.validate_on alone")
    tried = []
    for trial in run_trials(config, rates):
        tried.append(trial)
        yield str(trial)
    found = choose_best(tried)
    update: dict[str, dict[str, Any]] = {"optimizer": {"learning_rate": found.rate}}
    if not look.has_validation:
        update["data"] = {"holdout": 0.0}
    seen = "" if look.has_validation else f" on all images; those of the {found.accuracy:.1%} are then among them"
    yield f"chosen: {found.rate:.3g}; now trained again{seen}"
    return change_config(config, update)


def summarise_data(data: str) -> DataSummary:
    """How many images, how many classes, how large."""
    splits = list_splits(data)
    source = open_data(data, "train") if splits else open_data(data)
    if source.num_classes < 2:
        raise DataError(f"{data} has {source.num_classes} class: a classifier needs a folder for each of two or more")
    labels = source.labels(0, len(source))
    counts = np.bincount(labels[labels >= 0], minlength=source.num_classes)  # one that has none is told in reading it
    if not counts.all():
        empty = source.classes[int(counts.argmin())] if source.classes else int(counts.argmin())
        raise DataError(
            f"{data} has no image of {empty!r} that can be read: `vitrail data check` tells what was left out; export "
            "those as JPEG, or take the folder away"
        )
    return DataSummary(len(source), source.num_classes, _short_side(source), "val" in splits)


def _short_side(source: Source) -> int:
    """The median of some images, spread evenly over the data."""
    sides = []
    for index in range(0, len(source), max(len(source) // LOOKED_AT, 1)):
        try:
            content = source.read(index).content
            sides.append(min(content.shape[1:] if isinstance(content, torch.Tensor) else decode_to_pillow(content).size))
        except DataError:
            continue
    if not sides:
        raise DataError("none of the images that were looked at can be read: `vitrail data check` names what is wrong")
    return int(statistics.median(sides))


def make_finetune_config(look: DataSummary, model: ImageModel, name: str) -> dict[str, Any]:
    """The paper's way, on less data."""
    size = choose_image_size(model, look.short_side, torch.cuda.is_available())
    tree = _make_shared_config(look)
    tree["model"] = {"weights": name, "image_size": size}
    rate = scale_learning_rate(LEARNING_RATES[2], tree["data"]["batch_size"])
    tree["optimizer"] = {"kind": "sgd", "momentum": 0.9, "learning_rate": rate, "clip_norm": 1.0}
    tree["optimizer"]["accumulate"] = count_batch_parts(model, size, tree["data"]["batch_size"])
    return tree


def count_batch_parts(model: ImageModel, size: tuple[int, int], batch: int) -> int:
    """In how many parts a GPU's memory holds a batch. A layer keeps about 34 bytes of a token's channel in bf16."""
    if not torch.cuda.is_available():
        return 1
    a = model.architecture
    if isinstance(a, VitArchitecture):
        image = 34 * count_tokens(a, size) * a.width * a.depth
    elif isinstance(model, TimmModel):
        image = measure_activation_bytes(model.architecture.copy_at_size(size)) // 2  # bf16 takes half of float32
    else:
        image = 60_000_000 * a.backbone.width_factor * size[0] * size[1] // 224**2  # of a ResNet-50, and more of others
    free, _ = torch.cuda.mem_get_info()
    parts = 1
    while parts < batch and batch // parts * image > 0.6 * free:
        parts *= 2
    return parts


def make_scratch_config(look: DataSummary) -> dict[str, Any]:
    """A small ViT, AdamW and regularisation: little data and no pre-training is not what ViTs are best at."""
    # About 64 patches: enough to see shapes, few enough for a CPU.
    patch = next((patch for patch in (4, 8, 16) if patch * 8 >= min(look.short_side, 128)), 16)
    size = patch * 8
    tree = _make_shared_config(look)
    tree["model"] = {"name": f"Ti/{patch}", "image_size": size, "depth": 6, "pool": "average", "stochastic_depth": 0.1}
    tree["optimizer"] = {"kind": "adamw", "learning_rate": SCRATCH_LEARNING_RATES[1], "weight_decay": 0.05}
    return tree


def _make_shared_config(look: DataSummary) -> dict[str, Any]:
    """Batch and length: small batches for few images, so that there are enough steps in a pass over them."""
    most = PAPER_BATCH if torch.cuda.is_available() else 32
    batch = max(2, min(most, 2 ** int(math.log2(max(look.images * 0.9 / 4, 2)))))
    steps = min(max(math.ceil(30 * look.images / batch), 200), 10_000)
    # The paper crops from 5% of the area on; with few images that leaves little to learn from.
    gentle = {"crop_area": (0.35, 1.0)} if look.images < FEW else {}
    held_out = {} if look.has_validation else {"holdout": DEFAULT_HOLDOUT}
    return {
        "data": {"batch_size": batch, "workers": 0 if look.images < 1000 else 2, **held_out, "augmentation": gentle},
        "schedule": {"steps": steps, "decay": "cosine"},
        "run": {"log_every": 10},
    }


def scale_learning_rate(rate: float, batch: int) -> float:
    """A learning rate of the paper's for another batch size: noise grows as a batch shrinks, so it goes by the root."""
    return float(f"{rate * math.sqrt(batch / PAPER_BATCH):.2g}")


def choose_image_size(model: ImageModel, short_side: int, gpu: bool) -> tuple[int, int]:
    """A resolution half as high again, in whole patches, unless the images have no more to show, or it takes a GPU."""
    if isinstance(model, TimmModel):
        stride = model.stride
    elif not isinstance(model.architecture, VitArchitecture):
        stride = model.architecture.backbone.stride
    else:
        stride = model.architecture.stride
        if model.architecture.position == "relative":
            return model.image_size  # it is bound to its grid
    height, width = model.image_size
    if short_side <= min(height, width):
        return height, width
    factor = min(GROWTH, short_side / min(height, width))
    higher, wider = (max(round(side * factor / stride) * stride, side) for side in (height, width))
    try:
        flops = compute_cost(model.architecture, (higher, wider)).flops
    except ConfigError:  # a network of timm's that is bound to its size
        return height, width
    return (height, width) if not gpu and flops > MOST_ON_A_CPU else (higher, wider)


def describe_choices(config: RunConfig, look: DataSummary) -> str:
    """What was picked, in a line."""
    size = show_size(config.model.image_size) if config.model.image_size else "its own size"
    steps = config.schedule.steps
    length = f"{steps} steps" if steps is not None else f"{config.schedule.epochs:g} epochs"
    return (
        f"{look.images:,} images of {look.classes} classes, about {look.short_side} pixels: training at {size} "
        f"for {length} of {config.data.batch_size}, learning rate {config.optimizer.learning_rate:g}; crops from "
        f"{config.data.augmentation.crop_area[0]:.0%} of the area on, {describe_flip(config.data.augmentation.flip)}"
    )


def describe_flip(flip: float) -> str:
    """Whether images are, in words."""
    return "mirrored at random (data.augmentation.flip=0 where left and right matter)" if flip else "not mirrored"


def name_run_folder(data: str, model: str | None) -> str:
    """finetune-photos-from-quickstart: the same for the same command, so that it goes on where it was stopped."""
    return f"finetune-{short_name(data)}" + (f"-from-{short_name(model)}" if model else "")
