"""Vision Transformers of other libraries, built to the shape of ours.

Where a library lets us choose the GELU it gets ours, so that it computes the same function; torchvision and vit-pytorch
have only the exact one. Everything else is as the library comes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.benchmark.case import count_parameters
from vitrail.benchmark.measure import summarize_error
from vitrail.errors import ConfigError, NotApplicableError, did_you_mean
from vitrail.model.architecture import Architecture, VitArchitecture
from vitrail.model.cost import compute_cost

ALLOWED_DIFFERENCE = 0.005
"""Largest difference in the number of parameters, as a share of ours. vit-pytorch has no biases on q, k and v, and two
norms around its patch projection: 0.03% for B/16."""

SHAPE = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
"""What a peer is built from; in everything else the model must be the plain one of the paper."""
FREE_OPTIONS = ("gelu", "norm_eps")
"""Options that may differ: they do not change the cost."""


class LogitsOnly(nn.Module):
    """A model of transformers that returns its logits only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, K)."""
        logits: Tensor = self.model(images).logits
        return logits


def _timm(vision_transformer: Any, a: VitArchitecture) -> nn.Module:
    built: nn.Module = vision_transformer.VisionTransformer(
        img_size=a.image_size,
        patch_size=a.patch_size,
        in_chans=a.in_channels,
        num_classes=a.num_classes,
        embed_dim=a.width,
        depth=a.depth,
        num_heads=a.num_heads,
        mlp_ratio=a.mlp_dim / a.width,
        act_layer={"tanh": "gelu_tanh", "exact": "gelu", "quick": "quick_gelu"}[a.gelu],
    )
    return built


def _torchvision(vision_transformer: Any, a: VitArchitecture) -> nn.Module:
    if a.in_channels != 3:
        raise NotApplicableError(f"takes images of 3 channels, not of {a.in_channels}")
    if a.image_size[0] != a.image_size[1]:
        raise NotApplicableError("takes square images only")
    built: nn.Module = vision_transformer.VisionTransformer(
        image_size=a.image_size[0],
        patch_size=a.patch_size,
        num_layers=a.depth,
        num_heads=a.num_heads,
        hidden_dim=a.width,
        mlp_dim=a.mlp_dim,
        num_classes=a.num_classes,
    )
    return built


def _transformers(transformers: Any, a: VitArchitecture) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=a.width,
        num_hidden_layers=a.depth,
        num_attention_heads=a.num_heads,
        intermediate_size=a.mlp_dim,
        hidden_act={"tanh": "gelu_pytorch_tanh", "exact": "gelu", "quick": "quick_gelu"}[a.gelu],
        image_size=a.image_size,
        patch_size=a.patch_size,
        num_channels=a.in_channels,
        num_labels=a.num_classes,
    )
    return LogitsOnly(transformers.ViTForImageClassification(config))


def _vit_pytorch(vit_pytorch: Any, a: VitArchitecture) -> nn.Module:
    built: nn.Module = vit_pytorch.ViT(
        image_size=a.image_size,
        patch_size=a.patch_size,
        num_classes=a.num_classes,
        dim=a.width,
        depth=a.depth,
        heads=a.num_heads,
        mlp_dim=a.mlp_dim,
        channels=a.in_channels,
        dim_head=a.width // a.num_heads,
    )
    return built


PEERS: dict[str, tuple[str, Callable[[Any, VitArchitecture], nn.Module]]] = {
    "timm": ("timm.models.vision_transformer", _timm),
    "torchvision": ("torchvision.models.vision_transformer", _torchvision),
    "transformers": ("transformers", _transformers),
    "vit-pytorch": ("vit_pytorch", _vit_pytorch),
}
"""By package: the module to import, and the function that builds a model from it."""
RUNTIMES = {
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Runtimes that run our own model, exported, on a CPU, and the packages they need."""
TORCHVISION_OPERATORS = ("nms", "qnms")
"""Operators that torchvision's Python part, which timm imports, expects from its compiled part."""


def parse_peers(text: str, device: torch.device) -> list[str]:
    """Return the libraries that --peers names: `all` for the device, `none`, or names separated by commas."""
    if text == "none":
        return []
    if text == "all":
        return [*PEERS, *(RUNTIMES if device.type == "cpu" else ())]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = [*PEERS, *RUNTIMES]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or ":"
            raise ConfigError(f"--peers: unknown {name!r}{hint} give some of {', '.join(known)}, or all, or none")
    return names


def import_peer(library: str, device: torch.device) -> None:
    """Import a library, or raise a NotApplicableError with the reason why it cannot be measured."""
    if library in RUNTIMES:
        if device.type != "cpu":
            raise NotApplicableError("compared on a CPU only")
        check_packages(RUNTIMES[library])
        return
    module, _ = PEERS[library]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise NotApplicableError(f"not installed: pip install {library}")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        try:
            _import(library)
        except Exception as error:
            if "operator torchvision::" not in summarize_error(error):
                raise
            define_torchvision_operators()
            _import(library)
    except Exception as error:  # another package may raise anything
        raise NotApplicableError(f"installed, but it cannot be imported: {summarize_error(error)}") from None


def _import(library: str) -> None:
    module = importlib.import_module(PEERS[library][0])
    if library == "transformers":  # imports its parts only when they are used
        _ = module.ViTForImageClassification


@functools.cache
def define_torchvision_operators() -> torch.library.Library:
    """Make torchvision importable beside a torch of another build, such as one for CPUs.

    There its compiled part does not load, and the import fails because some operators are missing. These are for
    object detection and are never called here, so it is enough to declare them.
    """
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


def check_packages(names: Sequence[str]) -> None:
    """Raise a NotApplicableError that names the packages that are not installed."""
    if absent := [name for name in names if importlib.util.find_spec(name) is None]:
        raise NotApplicableError(f"not installed: pip install {' '.join(absent)}")


def build_peer(library: str, architecture: Architecture) -> nn.Module:
    """Build a library's model of this shape, float32 on the CPU, or raise a NotApplicableError with the reason."""
    if not isinstance(architecture, VitArchitecture):
        raise NotApplicableError("not built: only plain Vision Transformers are compared")
    if differs := list_special_options(architecture):
        raise NotApplicableError(f"not built: only plain Vision Transformers are compared, not with {differs}")
    module, build = PEERS[library]
    try:
        model = build(importlib.import_module(module), architecture)
    except NotApplicableError:
        raise
    except Exception as error:  # a library may raise anything
        raise NotApplicableError(f"cannot be built to this shape: {summarize_error(error)}") from None
    check_same_size(model, architecture)
    return model


def list_special_options(architecture: VitArchitecture) -> str:
    """Return the options in which a model differs from the paper's plain one, as in `registers = 4`."""
    plain = VitArchitecture(**{name: getattr(architecture, name) for name in SHAPE})
    fields = [name for name in VitArchitecture.model_fields if name not in (*SHAPE, *FREE_OPTIONS)]
    differing = [name for name in fields if getattr(architecture, name) != getattr(plain, name)]
    return ", ".join(
        "a ResNet" if name == "backbone" else f"{name} = {getattr(architecture, name)}" for name in differing
    )


def check_same_size(model: nn.Module, architecture: Architecture) -> None:
    """Refuse a model with a clearly different number of parameters."""
    ours, theirs = compute_cost(architecture).parameters, count_parameters(model)
    if abs(theirs - ours) > ALLOWED_DIFFERENCE * ours:
        raise NotApplicableError(
            f"refused: its model has {theirs:,} parameters and ours {ours:,}, which is another shape"
        )
