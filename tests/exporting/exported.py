"""Small models whose outputs depend on every weight, and images for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import vitrail
from vitrail.exporting.runtimes import ExportRunner
from vitrail.model.architecture import Backbone, ResNetArchitecture, VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.create import build_empty_model
from vitrail.model.initialise import initialise

HYBRID = {"form": "hybrid", "norm_eps": 1e-5, "standardise_by": "std", "standardise_eps": 1e-5}
BIT = {"form": "bit", "norm_eps": 1e-5, "standardise_by": "variance", "standardise_eps": 1e-10}
SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}


def made(name: str = "Ti/4", **options: Any) -> ImageModel:
    """A model with noise on all of its parameters: fresh heads are zero, and fresh biases too."""
    model = vitrail.create_model(name, **{**SMALL, **options}).eval()
    return stirred(model)


def resnet(form: str, **fields_of_backbone: Any) -> ImageModel:
    """A small hybrid, or BiT."""
    shape = {"blocks": (1, 1), **fields_of_backbone}
    if form == "hybrid":
        fields = {**SMALL, "image_size": 32, "patch_size": 1, "backbone": Backbone(**shape, **HYBRID)}
        del fields["seed"]
        architecture = VitArchitecture(**fields)
    else:
        architecture = ResNetArchitecture(image_size=32, num_classes=5, backbone=Backbone(**shape, **BIT))
    model = build_empty_model(architecture).to_empty(device="cpu").eval()
    torch.manual_seed(0)
    initialise(model)
    return stirred(model)


@torch.no_grad()
def stirred(model: ImageModel, amount: float = 0.1) -> ImageModel:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return model


def images(count: int, channels: int, *size: int) -> Tensor:
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(count))


def pixels(count: int, height: int, width: int, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (count, height, width, channels), generator=generator, dtype=torch.uint8)


@torch.inference_mode()
def difference(run: ExportRunner, model: ImageModel, inputs: Tensor) -> float:
    expected = model(inputs)
    found = run(inputs)
    assert found.shape == expected.shape
    return float((found - expected).abs().max())
