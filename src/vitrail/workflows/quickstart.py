"""Everything in miniature, offline, on the handwritten digits that ship inside scikit-learn.

A fifth of every class is the test part, fixed and set aside before anything else; it enters no stage of training. On
the rest a small ViT is pre-trained, then fine-tuned at a higher resolution with a new head, as the paper does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from vitrail.data.loader import EvaluationLoader
from vitrail.data.open import open_data
from vitrail.metrics import Sums, add, means
from vitrail.model.base import ImageModel
from vitrail.objectives.classification import Classification
from vitrail.recipes import find
from vitrail.recipes.small import TEST_SHARE
from vitrail.train.resolve import resolve
from vitrail.train.start import start
from vitrail.weights.load import load
from vitrail.workflows.inspect import after


def quickstart(folder: str = "runs/quickstart") -> Iterator[str]:
    """Lines to print, as they come; the last is the accuracy on the test part."""
    root = Path(folder)
    yield "1. pre-training a small Vision Transformer on handwritten digits"
    first = resolve(find("quickstart").config, [f"run.folder={root / 'pretrain'}"])
    pretrained = start(first)
    yield f"   test accuracy after pre-training: {tested(load(pretrained.model)):.1%}"
    yield "2. fine-tuning it at a higher resolution, with a new head that starts at zero"
    given = [f"run.folder={root / 'finetune'}", f"model.weights={pretrained.model}"]
    second = resolve(find("quickstart-finetune").config, given)
    tuned = start(second)
    accuracy = tested(load(tuned.model))
    yield "3. looking inside both"
    yield from (f"   {line}" for line in after(first, pretrained))
    reported = list(after(second, tuned))
    yield f"curves: {tuned.folder / 'curves.png'}"
    yield f"model: {tuned.model}"
    yield "next: vitrail finetune --data YOUR_FOLDER --from hf:google/vit-base-patch16-224-in21k"
    yield from reported
    yield f"test accuracy: {accuracy:.1%}"


@torch.inference_mode()
def tested(model: ImageModel) -> float:
    """The accuracy on the test part."""
    source = open_data("digits", "val", holdout=TEST_SHARE)
    objective, sums = Classification(model).eval(), Sums()
    for batch in EvaluationLoader(source, model.preprocessing, batch_size=64):
        add(sums, objective(batch, key=0).sums)
    return means(sums)["accuracy"]
