"""Tiny cases for benchmarks, and a clock that goes as we say."""

from __future__ import annotations

import torch

from vitrail.benchmark.case import Case
from vitrail.model.variants import make_architecture

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = {"image_size": 32, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 10}


def tiny(what: str = "inference", batch: int = 2, **options) -> Case:
    return Case(what, "tiny", make_architecture("Ti/8", **{**TINY, **options}), batch, "fp32", CPU)


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time
