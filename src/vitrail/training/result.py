"""The result of a finished run: the model with its card, and the learning curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitrail.model.base import ImageModel
from vitrail.system.device import device_name
from vitrail.system.files import hide_folders
from vitrail.system.intervals import Estimate, estimate_share
from vitrail.system.results import Result, Rows, format_count
from vitrail.training.best import find_best, read_best, save_best
from vitrail.training.config import RunConfig
from vitrail.training.curves import draw_curves
from vitrail.training.records import read_records
from vitrail.training.resolve import hide_config_folders, to_toml
from vitrail.training.run import Progress, TrainingRun
from vitrail.training.trained_model import build_trained_model, collect_weights, training_cost
from vitrail.training.validation import HonestAccuracy, estimate_honest_accuracy, get_choosing_part
from vitrail.weights.save import save

MODEL_FOLDER, CURVES_FILE = "model", "curves.png"


@dataclass(frozen=True, repr=False)
class TrainingResult(Result):
    """A finished run: the trained model, where its files are, and what its last evaluation measured."""

    model: ImageModel = field(compare=False)
    """The trained model on the CPU, ready to evaluate."""
    folder: Path
    weights: Path
    """The folder with the model, which `vitrail.load` reads."""
    config: RunConfig
    steps: int
    accuracy: Estimate | None
    """The accuracy of the model's evaluation; if the validation images are divided, on those that did not choose its
    weights. None if nothing was evaluated, or the objective has no classes."""
    evaluation: dict[str, float] | None
    """All measurements of the model's evaluation, if there was one."""
    evaluated: int
    """The number of images behind the accuracy."""
    choosing: dict[str, float] | None = None
    """The measurements of that evaluation on the images that choose: those of `evaluation`, or of one half."""
    fewshot: float | None = None
    """The few-shot accuracy of the model, if it was measured at its step."""
    report: Path | None = None
    """The page about the model; None if none was made."""
    card: str = field(default="", compare=False)
    """What the model card says of the training."""

    def summary(self) -> Rows:
        """Return the accuracy, the length of the run and its files."""
        is_task = self.config.objective.kind == "task"
        rows = [] if is_task else [("accuracy", describe_accuracy(self.accuracy, self.evaluated))]
        if self.evaluation is not None:
            rows += [(name, f"{value:.4f}") for name, value in self.evaluation.items() if name != "accuracy"]
        if self.fewshot is not None:
            rows.append((f"{self.config.run.fewshot_shots}-shot accuracy", f"{self.fewshot:.1%}"))
        rows += [("steps", f"{self.steps:,}"), ("weights", str(self.weights))]
        return rows if self.report is None else [*rows, ("report", str(self.report))]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data that JSON can hold, without the model and its card."""
        return {name: value for name, value in super().to_dict().items() if name != "card"}

    def figures(self) -> Sequence[Path]:
        """Return the learning curves."""
        return (self.folder / CURVES_FILE,)


def describe_accuracy(accuracy: Estimate | None, images: int) -> str:
    """Return an accuracy with its interval and the number of images as text."""
    if accuracy is None:
        return "not measured"
    interval = f"95% interval {accuracy.low:.1%} to {accuracy.high:.1%}"
    return f"{accuracy.value:.1%} of {format_count(images, 'image')} ({interval})"


def save_result(run: TrainingRun, progress: Progress) -> TrainingResult:
    """Write the model and the curves. All ranks must call this; the first one writes."""
    folder = run.config.run.folder
    records = read_records(run.records.path) if run.ranks.is_first else []
    model = build_trained_model(run.learner.objective.model, collect_weights(run.learner))
    model.training_cost = training_cost(run, progress)
    model.learned_from, model.chosen_by = run.data_fingerprint, run.choosing_fingerprint
    best = run.ranks.broadcast_from_first(find_best(run.config, records))
    step = progress.step
    takes_best = run.config.schedule.result == "best" and best is not None and best.step != step
    if takes_best and (chosen := read_best(run, best)) is not None:
        model, step = chosen, best.step
    honest = None
    if best is not None and best.step == step:  # otherwise the best weights could not be read
        honest = run.ranks.broadcast_from_first(estimate_honest_accuracy(records, run.config))
    card = card_text(run, progress, records, step, honest) if run.ranks.is_first else ""
    if run.ranks.is_first:
        save(model, folder / MODEL_FOLDER, notes=card)
        save_best(run, progress, records)
        draw_curves(records, folder / CURVES_FILE, str(folder))
    evaluations, fewshots = (
        [record for record in records if record["kind"] == kind and record["step"] == step]
        for kind in ("evaluation", "fewshot")
    )
    parts = (evaluations[-1], get_choosing_part(evaluations[-1], run.config.data)) if evaluations else ()
    measured = [{name: value for name, value in part.items() if isinstance(value, float)} for part in parts]
    measured, images = run.ranks.broadcast_from_first(measured), run.validation_images
    has_classes = run.config.objective.kind == "classification"
    counted = measured[0] if measured and has_classes else None  # other tasks may call something else an accuracy
    return TrainingResult(
        model=model,
        folder=folder,
        weights=folder / MODEL_FOLDER,
        config=run.config,
        steps=progress.step,
        accuracy=_estimate_accuracy(counted, images) if honest is None else honest.accuracy,
        evaluation=measured[0] if measured else None,
        choosing=measured[1] if measured else None,
        evaluated=images if honest is None else honest.images,
        fewshot=run.ranks.broadcast_from_first(fewshots[-1]["accuracy"] if fewshots else None),
        card=card,
    )


def _estimate_accuracy(measured: dict[str, float] | None, images: int) -> Estimate | None:
    if measured is None or "accuracy" not in measured or not images:
        return None
    return estimate_share(round(measured["accuracy"] * images), images)


def card_text(
    run: TrainingRun,
    progress: Progress,
    records: list[dict[str, Any]],
    step: int,
    honest: HonestAccuracy | None = None,
) -> str:
    """Describe how the model, with the weights of a step, was trained, for its card."""
    config, loader = run.config, run.training_loader
    weights = "fresh weights" if config.model.name else f"`{hide_folders(config.model.weights or '')}`"
    lines = [
        f"{progress.step:,} steps of {config.data.batch_size} images, {loader.epoch:.3g} epochs of "
        f"{len(loader.source):,} images of `{hide_folders(config.data.source)}`, from {weights}, "
        f"objective {config.objective.kind}, seed {config.run.seed}, {progress.seconds:,.0f} s on "
        f"{run.ranks.size} × {device_name(run.ranks.device)}."
    ]
    if step != progress.step:
        lines.append(f"The weights are those after step {step:,}, whose evaluation was the best.")
    for record in [each for each in records if each["kind"] == "evaluation" and each["step"] == step][-1:]:
        values = ", ".join(f"{name} {value:.4g}" for name, value in record.items() if isinstance(value, float))
        when = "At the end" if step == progress.step else "There"
        lines.append(f"{when} on the {run.validation_images:,} images of {record['part']}: {values}.")
    for record in [each for each in records if each["kind"] == "fewshot" and each["step"] == step][-1:]:
        of = hide_folders(config.run.fewshot_data or config.data.source)
        lines.append(f"{record['part'].capitalize()} accuracy on `{of}`: {record['accuracy']:.1%}.")
    if honest is not None:
        share = describe_accuracy(honest.accuracy, honest.images)
        lines.append(f"Those images chose these weights. Accuracy by images that did not: {share}.")
    lines.append(f"```toml\n{to_toml(hide_config_folders(config))}```")
    return "\n\n".join(lines)
