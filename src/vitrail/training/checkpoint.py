"""What a checkpoint of a run holds: `save_checkpoint` writes one, `resume` goes on from the newest.

How the files are written, so that a checkpoint is whole or absent, is in checkpoint_folder.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.system.device import float64_device
from vitrail.training.averaging import Average
from vitrail.training.checkpoint_folder import check_state
from vitrail.training.run import Progress, RunSetup, RunState, TrainingRun
from vitrail.weights.formats.native import describe_config


def save_checkpoint(run: TrainingRun, state: RunState) -> None:
    """Save everything that the run needs to go on from this step as if it had never stopped.

    There must be no pending step. The files are written in the background.
    """
    assert state.pending_step is None
    learner, progress = run.learner, state.progress
    # Each rank has its own sums since the last record. Their total is saved; the first rank resumes with all of it.
    progress.window_total = {name: pair.tolist() for name, pair in run.ranks.sum_over_ranks(state.window).items()}
    if run.ranks.is_first:
        run.records.bring_to_disk()
    model = learner.objective.model
    # With its description, a checkpoint can be loaded as a model without the data and the first weights of the run.
    described = describe_config(model.architecture, model.preprocessing, model.labels, model.origin, model.stored_task)
    saved = {**vars(progress), "scaler": learner.scaler.state_dict(), "model": described}
    tensors = name_tensors(learner.objective, learner.optimizer, learner.average)
    run.checkpoints.save(progress.step, tensors, saved, best=progress.best[0] if progress.best else None)


def resume(setup: RunSetup) -> RunState:
    """Load the newest whole checkpoint into the learner, and return the state at its step.

    If there is no checkpoint, the learner stays as it is and the state is that of a new run. Records of later steps
    are removed from metrics.jsonl.

    Raises:
        TrainingError: All checkpoints are damaged, or the newest is of another run or lacks something.
    """
    learner, ranks, state = setup.learner, setup.ranks, RunState()
    setup.checkpoints.open()
    path = setup.checkpoints.find_newest()
    if path is not None:
        tensors = name_tensors(learner.objective, learner.optimizer, learner.average)
        saved = setup.checkpoints.load(path, tensors)
        check_state(path, saved, ["scaler", *(name for name in vars(Progress()) if name not in Progress.ADDED)])
        if saved["scaler"]:
            learner.scaler.load_state_dict(saved["scaler"])
        state.progress = progress = Progress.from_saved(saved)
        for name, pair in progress.window_total.items():
            total = torch.tensor(pair, dtype=torch.float64, device=float64_device(ranks.device))
            state.window[name] = total if ranks.is_first else torch.zeros_like(total)
    if ranks.is_first:
        # Without a checkpoint the run begins again, and even what was measured before its first step is repeated.
        setup.records.keep_until(-1 if path is None else state.progress.step, state.progress.owed)
    return state


def name_tensors(objective: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name. Names do not depend on how the tensors are spread over ranks."""
    tensors = {f"objective/{name}": tensor.detach() for name, tensor in objective.state_dict().items()}
    for name, parameter in objective.named_parameters():
        for part, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{part}"] = tensor
    if average is not None:
        tensors |= {f"average/{name}": tensor for name, tensor in average.tensors.items()}
    # safetensors reads no slice of a tensor without dimensions; a view writes through to the same memory.
    return {name: tensor.view(1) if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}
