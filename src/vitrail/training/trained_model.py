"""Build the model that a run has trained, from the weights of its objective."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.config import TrainingCost
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.model.create import build_empty_model
from vitrail.system.device import device_name
from vitrail.training.distributed import gather_tensor
from vitrail.training.run import Learner, Progress, TrainingRun


def collect_weights(learner: Learner) -> dict[str, Tensor]:
    """Return the objective's weights, averaged if there is an average, whole and on the CPU. All ranks must call it."""
    tensors = learner.average.tensors if learner.average is not None else learner.objective.state_dict()
    return {name: gather_tensor(tensor.detach()).cpu() for name, tensor in tensors.items()}


def build_trained_model(trained: ImageModel, weights: dict[str, Tensor]) -> ImageModel:
    """Build a new model with the weights of an objective's state, ready to evaluate."""
    model = build_empty_model(trained.architecture)
    own = {name.removeprefix("model."): tensor for name, tensor in weights.items() if name.startswith("model.")}
    for name, empty in model.state_dict().items():
        if empty.ndim == 0 and name in own:
            own[name] = own[name].view(())  # a checkpoint stores it with one dimension
    model.load_state_dict(own, assign=True)
    model.preprocessing, model.labels = trained.preprocessing, trained.labels
    model.stored_task = trained.stored_task
    if trained.origin is not None and trained.origin.format != "native":
        # The source and the licence of the first weights also hold for weights that were trained from them.
        notes = (*trained.origin.notes, "trained further since")
        model.origin = trained.origin.model_copy(update={"notes": notes})
    return model.eval()


def training_cost(run: TrainingRun, progress: Progress) -> TrainingCost:
    """Return what the run has cost so far, including the cost of the weights that it started from."""
    model = run.learner.objective.model
    cost = TrainingCost(
        flops=FORWARD_AND_BACKWARD * run.learner.objective.count_flops() * progress.position,
        device_seconds=progress.seconds * run.ranks.size,
        devices=(device_name(run.ranks.device),),
    )
    return cost if run.config.model.weights is None else cost.after(model.training_cost)


def linear_head_cost(model: ImageModel, images: int, seconds: float, device: torch.device) -> TrainingCost:
    """Return what a model with a linear head has cost: its own training, and the features of the images.

    Args:
        model: The model, with the cost that it was loaded with.
        images: Number of images whose features were computed.
        seconds: Time for features and fit.
        device: Where features were computed.
    """
    flops = compute_cost(model.architecture).flops * images
    cost = TrainingCost(flops=flops, device_seconds=seconds, devices=(device_name(device),), kind="linear head")
    return cost.after(model.training_cost)
