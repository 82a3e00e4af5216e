"""The two sizes in which every study can be run: `tiny` on any machine, `small` on one GPU.

A scale fixes the data sets' sizes, the model that all arms start from, and the settings of pre-training and
fine-tuning. An arm changes what its study is about, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import ConfigError, did_you_mean

Tree = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """What all studies of one size have in common."""

    name: str
    seeds: int
    """How many seeds a study has, if the caller does not say."""
    pretraining: Mapping[str, Any]
    """The configuration of a pre-training, without its data."""
    finetuning: Mapping[str, Any]
    """The configuration of a fine-tuning, without its data and weights."""
    shots: int
    """Images of each class for few-shot accuracy."""
    test_images: int
    """Images of each data set, at most, on which few-shot accuracy is measured."""
    kept_size: int | None
    """Images of different sizes are made squares of so many pixels when they are opened; None leaves them as they
    are."""
    models: Mapping[str, Mapping[str, Any]]
    """The architectures that several studies compare: vit, larger vit, hybrid, BiT; each a whole section `model`."""
    data: str | None = None
    """The images to pre-train on, if the caller gives none."""
    transfer: Sequence[str] = ()
    """The data sets to transfer to, if the caller gives none."""

    @property
    def steps(self) -> int:
        """The number of steps of a pre-training."""
        return int(self.pretraining["schedule"]["steps"])

    @property
    def image_size(self) -> int:
        """The resolution of pre-training."""
        return int(self.pretraining["model"]["image_size"])

    @property
    def patch_size(self) -> int:
        """The patch size of the model that all arms start from."""
        return int(str(self.pretraining["model"]["name"]).rpartition("/")[2])

    def compute_digest(self) -> str:
        """Return a digest of everything that decides what a run measures."""
        decisive = [self.name, self.pretraining, self.finetuning, self.shots, self.test_images, self.kept_size]
        return hashlib.blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=8).hexdigest()

    def scale_steps(self, factor: float) -> Tree:
        """Return settings of a schedule that is `factor` times as long as a pre-training."""
        steps = max(round(self.steps * factor), 10)
        return {"schedule.steps": steps, "schedule.warmup_steps": steps // 10}


TINY_VIT: Tree = {
    **{"name": "Ti/4", "image_size": 16, "in_channels": 1},
    **{"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64},
}
TINY_IMAGES: Tree = {"image_size": 16, "in_channels": 1, "root": "small", "stage_channels": 32}

TINY = Scale(
    name="tiny",
    seeds=2,
    pretraining={
        "model": TINY_VIT,
        "data": {
            "validate_on": "holdout",
            "holdout": 0.1,
            "batch_size": 32,
            # A mirrored digit is a different shape, and a small crop of one cannot be recognised.
            "augmentation": {"crop_area": (0.7, 1.0), "crop_ratio": (0.9, 1.1), "flip": 0.0},
        },
        "optimizer": {"kind": "adamw", "learning_rate": 3e-3, "weight_decay": 0.05},
        "schedule": {"steps": 40, "warmup_steps": 4, "decay": "cosine"},
        "run": {"threads": 1},
    },
    finetuning={
        "data": {
            "validate_on": "none",
            "holdout": 0.0,
            "batch_size": 32,
            "augmentation": {"crop_area": (0.7, 1.0), "crop_ratio": (0.9, 1.1), "flip": 0.0},
        },
        "optimizer": {"kind": "sgd", "learning_rate": 0.03, "momentum": 0.9},
        "schedule": {"steps": 20, "warmup_steps": 2, "decay": "cosine"},
        "run": {"threads": 1},
    },
    shots=5,
    test_images=300,
    kept_size=None,
    models={
        "ViT": TINY_VIT,
        "larger ViT": {**TINY_VIT, "width": 64, "depth": 4, "mlp_dim": 128},
        "hybrid": {**TINY_VIT, **TINY_IMAGES, "name": "R26+Ti/16", "blocks": (1,), "patch_size": 4},
        "BiT": {**TINY_IMAGES, "name": "BiT-R26x1", "blocks": (1, 1)},
    },
    data="digits",
    transfer=("digits",),
)

SMALL_VIT: Tree = {
    **{"name": "Ti/4", "image_size": 32},
    **{"width": 192, "depth": 6, "num_heads": 3, "mlp_dim": 768},
}
SMALL_IMAGES: Tree = {"image_size": 32, "root": "small", "stage_channels": 32}

SMALL = Scale(
    name="small",
    seeds=3,
    pretraining={
        "model": SMALL_VIT,
        "data": {
            "validate_on": "holdout",
            "holdout": 0.05,
            "batch_size": 256,
            "on_device": True,
            "augmentation": {"crop_area": (0.3, 1.0), "flip": 0.5},
        },
        "optimizer": {"kind": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "schedule": {"steps": 2400, "warmup_steps": 240, "decay": "cosine"},
        "run": {"graphs": True},
    },
    finetuning={
        "data": {
            "validate_on": "none",
            "holdout": 0.0,
            "batch_size": 128,
            "on_device": True,
            "augmentation": {"crop_area": (0.3, 1.0), "flip": 0.5},
        },
        "optimizer": {"kind": "sgd", "learning_rate": 0.03, "momentum": 0.9},
        "schedule": {"steps": 500, "warmup_steps": 50, "decay": "cosine"},
        "run": {"graphs": True},
    },
    shots=10,
    test_images=5000,
    kept_size=64,
    models={
        "ViT": SMALL_VIT,
        "larger ViT": {**SMALL_VIT, "width": 320, "depth": 8, "num_heads": 5, "mlp_dim": 1280},
        "hybrid": {**SMALL_VIT, **SMALL_IMAGES, "name": "R26+Ti/16", "blocks": (1, 1, 2), "depth": 4},
        "BiT": {**SMALL_IMAGES, "name": "BiT-R26x1"},
    },
)

SCALES = {scale.name: scale for scale in (TINY, SMALL)}


def find_scale(name: str) -> Scale:
    """Return the scale with a name; raise a ConfigError that lists them if there is none."""
    if name not in SCALES:
        raise ConfigError(f"unknown scale {name!r}{did_you_mean(name, SCALES)}: give {' or '.join(SCALES)}")
    return SCALES[name]
