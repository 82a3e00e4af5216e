"""All that a run has learned so far, as named tensors: what a checkpoint holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.training.averaging import Average
from vitrail.training.muon import Muon


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimiser its state before its first step, all zero, as that step would. A checkpoint is then always of
    one kind, and can be read straight into it; and a first step that is left out leaves no momentum that was never
    set, as torch's fused SGD otherwise does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "momentum" in group:  # SGD's groups, and those of Muon that hold matrices
                if group["momentum"] or isinstance(optimizer, Muon):
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                continue
            place = parameter.device if group["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=place)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)


def name_tensors(objective: nn.Module, optimizer: torch.optim.Optimizer, average: Average | None) -> dict[str, Tensor]:
    """Every tensor that a run goes on from, by a name that does not depend on how it is spread over ranks."""
    found = {f"objective/{name}": tensor.detach() for name, tensor in objective.state_dict().items()}
    for name, parameter in objective.named_parameters():
        for part, tensor in optimizer.state.get(parameter, {}).items():
            found[f"optimizer/{name}/{part}"] = tensor
    if average is not None:
        found |= {f"average/{name}": tensor for name, tensor in average.tensors.items()}
    # safetensors reads no slice of a tensor without dimensions; a view writes through to the same memory.
    return {name: tensor.view(1) if tensor.ndim == 0 else tensor for name, tensor in found.items()}
