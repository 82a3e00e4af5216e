"""The peer libraries, used as oracles. Import them from here.

torchvision's wheel registers operators that its compiled part defines; beside a torch without CUDA that part does not
load and the import fails. Defining the two operators first lets the Python part, which is all we need, import.
"""

from __future__ import annotations

import importlib.metadata
import os

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

if torch.version.cuda is None and not importlib.metadata.version("torchvision").endswith("+cpu"):
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import timm
import torchvision
import transformers

__all__ = ["timm", "torchvision", "transformers"]
