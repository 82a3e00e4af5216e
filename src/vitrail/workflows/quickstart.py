"""Everything in miniature, offline, on the handwritten digits that ship inside scikit-learn.

A fifth of every class is the test part, which no stage of training sees. A small ViT is pre-trained on the rest, then
fine-tuned at a higher resolution with a new head, as in the paper. A model pre-trained on photographs can be fine-tuned
on the same digits for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrail.data.loader import EvaluationLoader
from vitrail.data.open import open_data
from vitrail.data.sources.source import Source
from vitrail.errors import ConfigError
from vitrail.inference.engine import Model
from vitrail.model.base import ImageModel
from vitrail.model.create import copy_model
from vitrail.objectives.classification import Classification
from vitrail.objectives.metrics import Sums, add_sums, compute_means
from vitrail.recipes import find_recipe
from vitrail.recipes.small import TEST_SHARE
from vitrail.system.events import OnEvent, open_listener
from vitrail.system.intervals import Estimate, estimate_share
from vitrail.system.results import Result, Rows, to_plain
from vitrail.training.resolve import resolve
from vitrail.training.result import CURVES_FILE, TrainingResult, describe_accuracy
from vitrail.training.run_training import run_training
from vitrail.workflows.run_report import write_run_report
from vitrail.workflows.start_model import choose_start, name_model, open_start, save_start

TRANSFER_SIZE = 32
"""Image size for the pre-trained model. Digits have 8 pixels, and a CPU should be done in half a minute."""
TRANSFER: dict[str, Any] = {
    "model.image_size": TRANSFER_SIZE,
    "data.batch_size": 32,
    "optimizer.learning_rate": 0.03,
    "schedule.steps": 150,
    "schedule.warmup_steps": 15,
}
"""Settings that differ from fine-tuning the model that was pre-trained on digits."""


class QuickstartRow(NamedTuple):
    """One line of the comparison."""

    start: str
    """The model that the training started from, or "scratch"."""
    images: int
    """Images in all steps of training, counted as often as they were seen."""
    accuracy: Estimate
    """On the test part."""


@dataclass(frozen=True, repr=False)
class QuickstartResult(Result):
    """The model of the quickstart, and its accuracy on the test part."""

    model: ImageModel = field(compare=False)
    """The fine-tuned model on the CPU, ready to evaluate."""
    folder: Path
    """The folder of its run; the others lie beside it."""
    weights: Path
    accuracy: Estimate
    """On the test part."""
    pretrained_accuracy: Estimate
    """The same after pre-training."""
    images: int
    """The number of test images."""
    report: Path | None
    rows: tuple[QuickstartRow, ...] = ()
    """The comparison with the model that was given, if one was."""

    def summary(self) -> Rows:
        """Return the accuracies and the files."""
        rows = [
            ("test accuracy", describe_accuracy(self.accuracy, self.images)),
            ("after pre-training", f"{self.pretrained_accuracy.value:.1%}"),
            ("weights", str(self.weights)),
        ]
        return rows if self.report is None else [*rows, ("report", str(self.report))]

    def tables(self) -> Mapping[str, Sequence[Sequence[str]]]:
        """Return the comparison."""
        rows = [(row.start, f"{row.images:,}", f"{row.accuracy.value:.1%}") for row in self.rows]
        return {"Handwritten digits": [("from", "images in training", "test accuracy"), *rows]} if rows else {}

    def figures(self) -> Sequence[Path]:
        """Return the learning curves."""
        return (self.folder / CURVES_FILE,)


def quickstart(
    folder: str | Path = "runs/quickstart", model: Model | None = None, *, on_event: OnEvent | None = None
) -> QuickstartResult:
    """Pre-train a small Vision Transformer on handwritten digits, fine-tune it larger, and test it, offline.

    The same call goes on with what was stopped.

    Args:
        folder: where the runs go.
        model: MODEL or a loaded model to fine-tune on the same digits, for comparison.
        on_event: called with what happens; None shows a bar on a terminal or in a notebook.

    Events:
        stage: number, title.
        tested: run ("pretrain", "finetune" or "transfer"), folder, weights, accuracy (value, low, high), images.
        training, step, train, evaluation, checkpoint, trained: see vitrail/system/events.py.
        report: folder, path, problem: the report of a run, or None and why none could be made.
        progress: passes over images.
    """
    root, start, loaded = Path(folder), None, None
    if model is not None:
        start = choose_start(model, ())
        if start is None:
            raise ConfigError("a comparison needs a trained model: name another than scratch, or none")
        loaded = open_start(start, (TRANSFER_SIZE, TRANSFER_SIZE))  # fails before a minute of training
    with open_listener(on_event) as listener:
        listener("stage", {"number": 1, "title": "pre-training a small Vision Transformer on handwritten digits"})
        pretrained = _train("quickstart", {"run.folder": root / "pretrain"}, None, listener)
        before = _test(pretrained, listener)
        title = "fine-tuning it at a higher resolution, with a new head that starts at zero"
        listener("stage", {"number": 2, "title": title})
        given = {"run.folder": root / "finetune", "model.weights": pretrained.weights}
        tuned = _train("quickstart-finetune", given, copy_model(pretrained.model), listener)
        after = _test(tuned, listener)
        listener("stage", {"number": 3, "title": "looking inside both"})
        write_run_report(pretrained, on_event=listener)
        tuned = write_run_report(tuned, on_event=listener)
        rows: tuple[QuickstartRow, ...] = ()
        if start is not None and loaded is not None:
            transferred = _transfer(start, loaded, root / "transfer", listener)
            scratch = QuickstartRow("scratch", sum(map(count_images_seen, (pretrained, tuned))), after)
            rows = (scratch, transferred)
    images = len(_open_test_part())
    return QuickstartResult(tuned.model, tuned.folder, tuned.weights, after, before, images, tuned.report, rows)


def _transfer(start: str | ImageModel, loaded: ImageModel, folder: Path, listener: OnEvent) -> QuickstartRow:
    """Fine-tune another model on the same digits."""
    name = name_model(start)
    title = f"fine-tuning {name} on the same digits, at {TRANSFER_SIZE} pixels"
    listener("stage", {"number": 4, "title": title})
    weights = start if isinstance(start, str) else save_start(loaded, folder, begun_from=loaded)
    given = {"run.folder": folder, "model.weights": weights, **TRANSFER}
    result = _train("quickstart-finetune", given, loaded, listener)
    return QuickstartRow(name, count_images_seen(result), _test(result, listener))


def _train(recipe: str, settings: dict[str, Any], start: ImageModel | None, listener: OnEvent) -> TrainingResult:
    return run_training(resolve(find_recipe(recipe).config, settings), start=start, on_event=listener)


def _test(result: TrainingResult, listener: OnEvent) -> Estimate:
    """Measure a run's model on the test part, and tell the caller."""
    accuracy, images = measure_test_accuracy(result.model), len(_open_test_part())
    values = {"run": result.folder.name, "folder": result.folder, "weights": result.weights}
    listener("tested", to_plain({**values, "accuracy": accuracy, "images": images}))
    return accuracy


def count_images_seen(result: TrainingResult) -> int:
    """Return the number of images in all steps of a run."""
    return result.steps * result.config.data.batch_size


def _open_test_part() -> Source:
    return open_data("digits", "val", holdout=TEST_SHARE)


@torch.inference_mode()
def measure_test_accuracy(model: ImageModel) -> Estimate:
    """Return the accuracy on the digits that no stage of training sees."""
    source = _open_test_part()
    objective, sums = Classification(model).eval(), Sums()
    for batch in EvaluationLoader(source, model.preprocessing, batch_size=64):
        add_sums(sums, objective(batch, key=0).sums)
    return estimate_share(round(compute_means(sums)["accuracy"] * len(source)), len(source))
