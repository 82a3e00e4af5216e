"""Everything that a run is made of, and where it stands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.resident import CachedBatches, ResidentLoader
from vitrail.objectives.base import Objective
from vitrail.objectives.metrics import Sums
from vitrail.system.ranks import Ranks
from vitrail.training.averaging import Average
from vitrail.training.checkpoint import CheckpointFolder
from vitrail.training.config import RunConfig
from vitrail.training.display import Display
from vitrail.training.graph_step import GraphStep
from vitrail.training.records import Records
from vitrail.training.stopping import Request
from vitrail.training.trackers import Tracker


@dataclass
class Progress:
    """Where a run stands, apart from tensors. All of it is in a checkpoint, so that going on is as if never stopped."""

    step: int = 0
    """Steps done."""
    position: int = 0
    """Samples used."""
    skipped: int = 0
    """Steps without a finite gradient, which changed nothing."""
    skipped_in_a_row: int = 0
    best: tuple[int, float] | None = None
    """The step of the best evaluation, and its value."""
    owes_evaluation: bool = False
    """One was due when the run was asked to stop."""
    window_total: dict[str, list[float]] = field(default_factory=dict)
    """Sums since the last record, over all ranks."""
    gradient_norm: float = math.nan
    """Of the last step."""
    seconds: float = 0.0
    """Spent so far, over all starts."""


@dataclass
class Pending:
    """A step whose work is under way: whether its gradient is finite is not known here yet."""

    number: int
    norm: Tensor
    """The gradient's, on the CPU, once it is `written`."""
    written: torch.cuda.Event | None
    sums: Sums


@dataclass
class Run:
    """Everything that a run is made of, ready to train."""

    config: RunConfig
    steps: int
    ranks: Ranks
    objective: Objective
    module: nn.Module
    """The objective, or what spreads it over ranks: what a training step calls."""
    learning: list[nn.Parameter]
    """The objective's, in its order: walking through all modules in every step takes longer than small steps do."""
    optimizer: torch.optim.Optimizer
    average: Average | None
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    loader: Callable[[int], TrainingLoader | ResidentLoader]
    """Batches of training from a position on."""
    training: TrainingLoader | ResidentLoader
    evaluation: EvaluationLoader | CachedBatches | None
    checkpoints: CheckpointFolder
    records: Records
    trackers: list[Tracker]
    display: Display
    data: str
    """What tells one data set from another."""
    weights: str
    """The same of the weights that it began from; empty for fresh ones, and on all ranks but the first."""
    deferred: bool = False
    """Whether the device itself leaves out a step without a finite gradient, and is not waited for."""
    recorded: GraphStep | None = None
    """In place of `learn` and what follows from it, where a step is a CUDA graph."""
    progress: Progress = field(default_factory=Progress)
    pending: Pending | None = None
    window: Sums = field(default_factory=dict)
    """Sums since the last record, on this rank."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the steps since the last record, in this start."""
    asked: Request = field(default_factory=Request)
    """Whether a signal came to this rank."""
    stopping: bool = False
    """Whether one came to any."""
