"""Everything in miniature, offline, on the handwritten digits that ship inside scikit-learn.

A fifth of every class is the test part, which no stage of training sees. A small ViT is pre-trained on the rest, then
fine-tuned at a higher resolution with a new head, as in the paper. A model pre-trained on photographs can be fine-tuned
on the same digits for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from vitrail.data.loader import EvaluationLoader
from vitrail.data.open import open_data
from vitrail.model.base import ImageModel
from vitrail.objectives.classification import Classification
from vitrail.objectives.metrics import Sums, add_sums, compute_means
from vitrail.recipes import find_recipe
from vitrail.recipes.small import TEST_SHARE
from vitrail.training.resolve import read_toml, resolve
from vitrail.training.run_folder import CONFIG_FILE
from vitrail.training.run_training import run_training
from vitrail.weights.load import load
from vitrail.workflows.run_report import write_run_report

TRANSFER_SIZE = 32
"""Image size for the pre-trained model. Digits have 8 pixels, and a CPU should be done in half a minute."""
TRANSFER = (
    *(f"model.image_size={TRANSFER_SIZE}", "data.batch_size=32", "optimizer.learning_rate=0.03"),
    *("schedule.steps=150", "schedule.warmup_steps=15"),
)
"""Settings that differ from fine-tuning the model that was pre-trained on digits."""


def quickstart(folder: str = "runs/quickstart") -> Iterator[str]:
    """Pre-train, fine-tune and test; yield lines to print, the last with the test accuracy."""
    root = Path(folder)
    yield "1. pre-training a small Vision Transformer on handwritten digits"
    first = resolve(find_recipe("quickstart").config, [f"run.folder={root / 'pretrain'}"])
    pretrained = run_training(first)
    yield f"   test accuracy after pre-training: {measure_test_accuracy(load(pretrained.model)):.1%}"
    yield "2. fine-tuning it at a higher resolution, with a new head that starts at zero"
    overrides = [f"run.folder={root / 'finetune'}", f"model.weights={pretrained.model}"]
    second = resolve(find_recipe("quickstart-finetune").config, overrides)
    tuned = run_training(second)
    accuracy = measure_test_accuracy(load(tuned.model))
    yield "3. looking inside both"
    yield from (f"   {line}" for line in write_run_report(first, pretrained))
    report_lines = list(write_run_report(second, tuned))
    yield f"curves: {tuned.folder / 'curves.png'}"
    yield f"model: {tuned.model}"
    yield "next: vitrail finetune --data YOUR_FOLDER --from hf:google/vit-base-patch16-224-in21k"
    yield from report_lines
    yield f"test accuracy: {accuracy:.1%}"


def quickstart_with_model(model: str, folder: str = "runs/quickstart") -> Iterator[str]:
    """Run the quickstart, then fine-tune `model` on the same digits; yield lines to print."""
    load(model, image_size=TRANSFER_SIZE)  # fails before a minute of training if the model is unusable
    yield from quickstart(folder)
    yield f"4. fine-tuning {model} on the same digits, at {TRANSFER_SIZE} pixels"
    overrides = [f"run.folder={Path(folder) / 'transfer'}", f"model.weights={model}", *TRANSFER]
    yield f"model: {run_training(resolve(find_recipe('quickstart-finetune').config, overrides)).model}"


def compare_runs(model: str, folder: str = "runs/quickstart") -> list[tuple[str, str, str]]:
    """Return rows for what `quickstart_with_model` trained: the start, the images seen, the test accuracy."""
    runs_by_start = {"scratch": ("pretrain", "finetune"), model: ("transfer",)}
    return [
        (
            name,
            f"{sum(count_images_seen(Path(folder) / run) for run in runs):,}",
            f"{measure_test_accuracy(load(Path(folder) / runs[-1])):.1%}",
        )
        for name, runs in runs_by_start.items()
    ]


def count_images_seen(run: Path) -> int:
    """Return the number of images in all steps of a run."""
    config = resolve(read_toml(run / CONFIG_FILE))
    return (config.schedule.steps or 0) * config.data.batch_size


@torch.inference_mode()
def measure_test_accuracy(model: ImageModel) -> float:
    source = open_data("digits", "val", holdout=TEST_SHARE)
    objective, sums = Classification(model).eval(), Sums()
    for batch in EvaluationLoader(source, model.preprocessing, batch_size=64):
        add_sums(sums, objective(batch, key=0).sums)
    return compute_means(sums)["accuracy"]
