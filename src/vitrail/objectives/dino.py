"""DINO (arXiv 2104.14294): the model predicts, from every view, what a slowly following teacher sees in another.

Not in the paper. The teacher is an exponential average of the model and its head. It sees only global views, and its
answers are made sharp and equally common (Sinkhorn), which keeps all images from the same answer. Head and teacher are
thrown away afterwards.

Shapes: B images, V views, K prototypes.
"""

from __future__ import annotations

import copy
import math
from typing import Self

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.model.vit import VisionTransformer
from vitrail.objectives.base import Outcome, evaluation_outcome
from vitrail.objectives.metrics import sum_and_count
from vitrail.objectives.multi_crop import MultiCropObjective
from vitrail.objectives.projection import PrototypeHead, initialise_projection
from vitrail.objectives.rank_sums import sum_over_ranks
from vitrail.objectives.views import GLOBAL_VIEWS, Views

SINKHORN_ROUNDS = 3


class Dino(MultiCropObjective):
    """Trains a model to agree with its own average about other views of the same image."""

    def __init__(
        self,
        model: ImageModel,
        *,
        views: Views | None = None,
        prototypes: int = 4096,
        projector_width: int = 2048,
        temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        teacher_momentum: float = 0.996,
        seed: int = 0,
    ) -> None:
        """Take a model, with or without a head.

        Args:
            views: Which views are compared.
            prototypes: K.
            projector_width: width of both hidden layers of the head.
            temperature: divides the model's similarities to prototypes.
            teacher_temperature: divides the teacher's; smaller, so that its answers are sharper.
            teacher_momentum: the share of itself that the teacher keeps in the first step; it rises to 1.
            seed: seed of the head's initial weights.
        """
        super().__init__(model, views or Views())
        if not 0 < teacher_momentum < 1:
            raise ConfigError(f"teacher_momentum = {teacher_momentum}: give a share between 0 and 1, such as 0.996")
        self.temperature, self.teacher_temperature = temperature, teacher_temperature
        self.teacher_momentum = teacher_momentum
        with torch.device("meta"):  # memory without values: nothing is drawn from torch's own generator
            projector = PrototypeHead(model.architecture.representation_width, projector_width, prototypes)
        self.projector = projector.to_empty(device="cpu")
        initialise_projection(self.projector, seed)
        self.teacher = Teacher(copy.deepcopy(model), copy.deepcopy(self.projector))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all parts except the teacher, which drops nothing."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return the loss and its sum. `key` sets the views."""
        global_views = self.make_global_views(batch, key)
        local_views = self.make_local_views(batch, key) if self.views.local_count else None
        with torch.no_grad():
            seen = self.teacher.model.embed(global_views).unflatten(0, (GLOBAL_VIEWS, -1))
            similarities = self.teacher.projector(self.select_counted(seen, batch).flatten(0, 1))
            answers = balance_answers(similarities / self.teacher_temperature).unflatten(0, (GLOBAL_VIEWS, -1))
        embedded = self.select_counted(self.embed_views(global_views, local_views), batch)
        predictions = self.projector(embedded.flatten(0, 1)) / self.temperature
        losses = compare_answers(answers, predictions.unflatten(0, embedded.shape[:2]))
        sums = {"loss": sum_and_count(losses)}
        return Outcome(losses.mean(), sums) if self.training else evaluation_outcome(sums)

    @torch.no_grad()
    def finish_step(self, progress: float) -> None:
        """Move the teacher towards the model, by less the further the training is."""
        momentum = 1 - (1 - self.teacher_momentum) * (1 + math.cos(math.pi * progress)) / 2
        ours, theirs = [*_list_tensors(self.model), *_list_tensors(self.projector)], _list_tensors(self.teacher)
        torch._foreach_lerp_(theirs, ours, 1 - momentum)

    def count_flops(self) -> int:
        """Add the teacher's forward pass, a third of one with a backward pass."""
        return (
            super().count_flops() + GLOBAL_VIEWS * compute_cost(self.model.architecture).flops // FORWARD_AND_BACKWARD
        )

    def parts_to_compile(self) -> list[nn.Module]:
        """Return the blocks of the model and of the teacher."""
        teacher = self.teacher.model
        return [*super().parts_to_compile(), *([teacher.encoder] if isinstance(teacher, VisionTransformer) else [])]


class Teacher(nn.Module):
    """The averages of a model and its projector, which do not learn by themselves."""

    def __init__(self, model: ImageModel, projector: PrototypeHead) -> None:
        super().__init__()
        self.model, self.projector = model, projector
        self.requires_grad_(False)


def balance_answers(logits: Tensor) -> Tensor:
    """Return (N, K) probabilities that sum to 1 for each sample and are about equally common over all ranks' samples.

    Sinkhorn's iteration, from the softmax of the logits.
    """
    mass = logits.softmax(dim=1)
    for _ in range(SINKHORN_ROUNDS):
        mass = mass / sum_over_ranks(mass.sum(dim=0)).clamp(min=1e-30)
        mass = mass / mass.sum(dim=1, keepdim=True)
    return mass


def compare_answers(answers: Tensor, logits: Tensor) -> Tensor:
    """Return (B,): the mean cross entropy of (V, B, K) logits and the teacher's (2, B, K) answers to other views."""
    logs = logits.log_softmax(dim=2)
    entropies = -torch.einsum("tbk,vbk->tvb", answers, logs)
    other = ~torch.eye(len(answers), len(logits), dtype=torch.bool, device=logits.device)
    return (entropies * other[:, :, None]).sum(dim=(0, 1)) / (len(answers) * (len(logits) - 1))


def _list_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parts of floating-point parameters and buffers that are on this rank."""
    tensors = [tensor for tensor in module.state_dict(keep_vars=True).values() if tensor.is_floating_point()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
