"""Self-supervised pre-training as in the paper: masked patch prediction.

Half of the patch embeddings are corrupted (80% masked, 10% swapped, 10% kept), and the model predicts the 3-bit mean
colour of each corrupted patch. The paper gives the optimizer and the length; it mentions no weight decay, dropout or
clipping, so these recipes have none.
"""

from __future__ import annotations

from typing import Any

from vitrail.recipes.pretraining import BATCH_SIZE, IMAGENET, JFT
from vitrail.recipes.recipe import Recipe, Settings, make_data_settings

MEAN_COLOUR: dict[str, Any] = {
    "kind": "masked-patches",
    "target": "mean-colour",
    "corrupted": 0.5,
    "masked": 0.8,
    "swapped": 0.1,
}


def _settings(steps: int, holdout: float = 0.001) -> Settings:
    return {
        # No head: the objective has its own layer that predicts the colours.
        "model": {"name": "B/16", "image_size": 224, "num_classes": 0},
        "data": make_data_settings(holdout, BATCH_SIZE),
        "objective": MEAN_COLOUR,
        "optimizer": {"kind": "adam", "learning_rate": 2e-4, "betas": (0.9, 0.999), "clip_norm": None},
        "schedule": {"steps": steps, "warmup_steps": 10_000, "decay": "cosine"},
        "run": {"evaluate_every": 20_000, "checkpoint_every": 5_000},
    }


MASKED_PATCHES = (
    Recipe(
        name="mpp-b16",
        summary="B/16 by masked patch prediction, no labels, 1M steps",
        settings=_settings(1_000_000),
        data_set=JFT,
        expected="79.9 on ImageNet, fine-tuned: 2 more than from scratch, 4 less than supervised (the paper's text)",
        source="the paper's text on self-supervision",
    ),
    Recipe(
        name="mpp-b16-100k",
        summary="B/16 by masked patch prediction, no labels, 100k steps",
        settings=_settings(100_000),
        data_set=JFT,
        expected="hardly less than mpp-b16: gains flatten after 100k steps (the paper's text; it gives no number)",
        source="the paper's text on self-supervision; that the cosine ends after 100k steps is ours",
    ),
    Recipe(
        name="mpp-imagenet-b16",
        summary="B/16 by masked patch prediction on ImageNet, no labels, 1M steps",
        settings=_settings(1_000_000, holdout=0.01),
        data_set=IMAGENET,
        expected="gains similar to mpp-b16's (the paper's appendix B.1.2; it gives no number)",
        source="the paper's appendix B.1.2; that all settings are those of mpp-b16 is our reading",
    ),
)
