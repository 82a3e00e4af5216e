"""What a run is made of (`TrainingRun`), and how far it has come (`RunState`)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.resident import CachedBatches, ResidentImages, ResidentLoader
from vitrail.data.sources.source import Source
from vitrail.objectives.base import Objective
from vitrail.objectives.metrics import Sums
from vitrail.system.events import OnEvent
from vitrail.system.ranks import Ranks
from vitrail.training.averaging import Average
from vitrail.training.checkpoint_folder import CheckpointFolder
from vitrail.training.config import RunConfig
from vitrail.training.fewshot import FewshotRun
from vitrail.training.graph_step import GraphStep
from vitrail.training.records import Records
from vitrail.training.stopping import StopRequest
from vitrail.training.trackers import Tracker
from vitrail.training.validation import get_choosing_kind

if TYPE_CHECKING:
    from vitrail.fast.gpu.training import FusedTraining


@dataclass(frozen=True)
class Learner:
    """What learns, and how it learns."""

    objective: Objective
    module: nn.Module
    """What a training step calls: the objective itself, or a wrapper that distributes it over ranks."""
    parameters: list[nn.Parameter]
    """The objective's parameters that learn, in a list: walking through all modules takes longer than a small step."""
    optimizer: torch.optim.Optimizer
    average: Average | None
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    skips_on_device: bool
    """Whether the device itself skips a step without a finite gradient, so that the CPU need not wait for it."""
    graph_step: GraphStep | None
    """The whole step as one CUDA graph, if `run.graphs` is set."""
    fused: FusedTraining | None
    """vitrail's kernels, if they compute the steps."""
    computed_by: str
    """What computes the steps, and why: vitrail's kernels, or PyTorch."""


@dataclass(frozen=True)
class RunSetup:
    """The parts of a run that do not depend on the step it starts from. Building them writes nothing."""

    config: RunConfig
    steps: int
    ranks: Ranks
    learner: Learner
    images: Source | ResidentImages
    """The images to train on."""
    evaluation_loaders: tuple[EvaluationLoader | CachedBatches, ...]
    """One for the images to validate on, or two if they are divided; none if there are none."""
    checkpoints: CheckpointFolder
    records: Records
    fewshot: FewshotRun | None
    """How few-shot accuracy is measured; None if it is not."""
    repeats: int
    """How many of the images to train on are repeats of rare ones (`data.balance`)."""
    unused_holdout: float | None
    """The share of `data.holdout`, if nothing is set aside because the data has its own part "val"."""
    data_fingerprint: str
    choosing_fingerprint: str | None
    """Of the validation images; None if they do not choose the weights."""
    weights_digest: str
    """Of the weights that training starts from. Empty for fresh weights, and on all ranks except the first."""

    @property
    def validation_images(self) -> int:
        """The number of images to validate on."""
        return sum(len(loader.source) for loader in self.evaluation_loaders)

    @property
    def evaluation_kinds(self) -> tuple[str, ...]:
        """The kinds of evaluations that this run makes. The kind that chooses comes first."""
        kinds = [*(["evaluation"] if self.evaluation_loaders else []), *(["fewshot"] if self.fewshot else [])]
        return tuple(sorted(kinds, key=lambda kind: kind != get_choosing_kind(self.config)))


@dataclass(frozen=True)
class TrainingRun(RunSetup):
    """A run that is ready to train from its starting step. What changes while it trains is in `RunState`."""

    training_loader: TrainingLoader | ResidentLoader
    trackers: tuple[Tracker, ...]
    """Empty on all ranks except the first."""
    on_event: OnEvent
    """Called with every event on the first rank; does nothing on the others."""


def autocast(run: TrainingRun) -> AbstractContextManager[Any]:
    """Return a context in which products are computed in the run's precision."""
    if run.learner.precision == torch.float32:
        return nullcontext()
    return torch.autocast(run.ranks.device.type, run.learner.precision)


@dataclass
class Progress:
    """How far a run has come, without tensors. Every field is saved in a checkpoint's state.json."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Samples used."""
    skipped: int = 0
    """Steps without a finite gradient, which changed nothing."""
    skipped_in_a_row: int = 0
    best: tuple[int, float] | None = None
    """The step of the best evaluation, and its value."""
    owed: list[str] = field(default_factory=list)
    """Kinds of evaluations that are due. A stop request may interrupt them; the next start then makes up for them."""
    window_total: dict[str, list[float]] = field(default_factory=dict)
    """The sums since the last record, over all ranks."""
    gradient_norm: float = math.nan
    """Length of the last step's gradient."""
    seconds: float = 0.0
    """Training time so far, over all starts."""
    best_merit: list[float] = field(default_factory=list)
    """The merit of the best evaluation (see validation.py)."""
    evaluations: list[list[list[float]]] = field(default_factory=list)
    """The merits of all evaluations that choose so far, as `compute_merits` returns them."""
    has_ended: bool = False
    """Whether the run is over before its last step."""

    ADDED: ClassVar = ("best_merit", "evaluations", "has_ended", "owed")
    """Fields that checkpoints of earlier versions do not have."""

    @classmethod
    def from_saved(cls, saved: dict[str, Any]) -> Self:
        """Return the progress in a checkpoint's state.json."""
        progress = cls(**{name: saved[name] for name in vars(cls()) if name in saved or name not in cls.ADDED})
        if saved.get("owes_evaluation"):  # of an earlier version
            progress.owed = ["evaluation"]
        if progress.best is not None:
            progress.best = (progress.best[0], progress.best[1])
            progress.best_merit = progress.best_merit or [progress.best[1]]
        return progress


@dataclass
class PendingStep:
    """A step that the device may still be computing: whether its gradient is finite is not known yet."""

    number: int
    norm: Tensor
    """The gradient's length, on the CPU. It is valid once `norm_copied` has happened."""
    norm_copied: torch.cuda.Event | None
    sums: Sums


@dataclass
class RunState:
    """What changes while a run trains."""

    progress: Progress = field(default_factory=Progress)
    pending_step: PendingStep | None = None
    window: Sums = field(default_factory=dict)
    """The sums since the last record, of this rank."""
    step_seconds: list[float] = field(default_factory=list)
    """Duration of each step since the last record, in this start."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    """Whether this rank has received a stop signal."""
    is_stopping: bool = False
    """Whether any rank has received one."""
