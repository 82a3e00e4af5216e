"""The result of a finished run: the model with its card, and the learning curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrail.config import TrainingCost
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.model.create import build_empty_model
from vitrail.system.device import device_name
from vitrail.training.curves import draw_curves
from vitrail.training.distributed import gather_tensor
from vitrail.training.records import read_records
from vitrail.training.resolve import to_toml
from vitrail.training.run import Learner, Progress, TrainingRun
from vitrail.weights.save import save


@dataclass(frozen=True)
class TrainingResult:
    """Where a finished run's files are, and what its last evaluation measured."""

    folder: Path
    model: Path
    steps: int
    evaluation: dict[str, float] | None
    """The measurements of the last evaluation, if there was one."""
    evaluated: int
    """The number of images of that evaluation."""


def save_result(run: TrainingRun, progress: Progress) -> TrainingResult:
    """Write the model and the curves. All ranks must call this; the first one writes."""
    folder = run.config.run.folder
    weights = collect_weights(run.learner)
    records = read_records(run.records.path) if run.ranks.is_first else []
    if run.ranks.is_first:
        model = build_trained_model(run.learner.objective.model, weights)
        model.training_cost, model.learned_from = training_cost(run, progress), run.data_fingerprint
        save(model, folder / "model", notes=card_text(run, progress, records))
        draw_curves(records, folder / "curves.png", str(folder))
    evaluations = [record for record in records if record["kind"] == "evaluation" and record["step"] == run.steps]
    measured = {n: v for n, v in evaluations[-1].items() if isinstance(v, float)} if evaluations else None
    return TrainingResult(
        folder, folder / "model", run.steps, run.ranks.broadcast_from_first(measured), count_evaluation_images(run)
    )


def collect_weights(learner: Learner) -> dict[str, Tensor]:
    """Return the objective's weights, averaged if there is an average, whole and on the CPU. All ranks must call it."""
    tensors = learner.average.tensors if learner.average is not None else learner.objective.state_dict()
    return {name: gather_tensor(tensor.detach()).cpu() for name, tensor in tensors.items()}


def count_evaluation_images(run: TrainingRun) -> int:
    return len(run.evaluation_loader.source) if run.evaluation_loader is not None else 0


def build_trained_model(trained: ImageModel, weights: dict[str, Tensor]) -> ImageModel:
    """Build a new model with the weights of an objective's state, ready to evaluate."""
    model = build_empty_model(trained.architecture)
    own = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    model.load_state_dict(own, assign=True)
    model.preprocessing, model.labels = trained.preprocessing, trained.labels
    if trained.origin is not None and trained.origin.format != "native":
        # The source and the licence of the first weights also hold for weights that were trained from them.
        notes = (*trained.origin.notes, "trained further since")
        model.origin = trained.origin.model_copy(update={"notes": notes})
    return model.eval()


def training_cost(run: TrainingRun, progress: Progress) -> TrainingCost:
    """Return what the run has cost so far, including the cost of the weights that it started from."""
    model = run.learner.objective.model
    cost = TrainingCost(
        flops=FORWARD_AND_BACKWARD * compute_cost(model.architecture).flops * progress.position,
        device_seconds=progress.seconds * run.ranks.size,
        devices=(device_name(run.ranks.device),),
    )
    return cost if run.config.model.weights is None else cost.after(model.training_cost)


def card_text(run: TrainingRun, progress: Progress, records: list[dict[str, Any]]) -> str:
    """Describe how the model was trained, for its card."""
    config, loader = run.config, run.training_loader
    weights = "fresh weights" if config.model.name else f"`{config.model.weights}`"
    lines = [
        f"{run.steps:,} steps of {config.data.batch_size} images, {loader.epoch:.3g} epochs of {len(loader.source):,} "
        f"images of `{config.data.source}`, from {weights}, "
        f"objective {config.objective.kind}, seed {config.run.seed}, {progress.seconds:,.0f} s on "
        f"{run.ranks.size} × {device_name(run.ranks.device)}."
    ]
    for record in records[-1:]:
        if record["kind"] == "evaluation":
            values = ", ".join(f"{name} {value:.4g}" for name, value in record.items() if isinstance(value, float))
            lines.append(f"At the end on the {count_evaluation_images(run):,} images of {record['part']}: {values}.")
    lines.append(f"```toml\n{to_toml(config)}```")
    return "\n\n".join(lines)
