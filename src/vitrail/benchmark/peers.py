"""The other libraries' Vision Transformers, built to the same shape as ours, or the reason why that cannot be.

Where a library lets us choose the GELU it gets ours, so that it computes the same function; torchvision and vit-pytorch
have the exact one alone. Everything else is as the library comes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError, did_you_mean
from vitrail.model.architecture import Architecture, VitArchitecture
from vitrail.model.cost import cost

ALLOWED = 0.005
"""By which share a peer may have more or fewer parameters than ours: vit-pytorch has no biases on q, k and v, and two
norms around its patch projection, which for B/16 is 0.03%."""

SHAPE = ("image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes")
"""What a peer is built from; in all else the model must be the plain one of the paper."""
NUMERICAL = ("gelu", "norm_eps")
"""Costs nothing that differs from one value to another."""


class Logits(nn.Module):
    """A network of transformers' that gives its logits and nothing around them."""

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
        raise NotApplicableError("takes square images alone")
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
    return Logits(transformers.ViTForImageClassification(config))


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
"""Package → the module to import, and what builds a model from it."""
RUNTIMES = {
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
    "openvino": ("onnx", "onnxscript", "openvino"),
}
"""Those that run our own model, exported, on a CPU → the packages that this takes."""
TORCHVISION_OPERATORS = ("nms", "qnms")
"""What the Python part of torchvision, which timm imports, expects its compiled part to have defined."""


def parse_peers(text: str, device: torch.device) -> list[str]:
    """`all`, `none`, or names with commas between; all that there are for the device."""
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


def importable(library: str, device: torch.device) -> None:
    """Import a peer; a NotApplicableError says why it cannot be."""
    if library in RUNTIMES:
        if device.type != "cpu":
            raise NotApplicableError("compared on a CPU alone")
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
            if "operator torchvision::" not in in_a_line(error):
                raise
            define_torchvision_operators()
            _import(library)
    except Exception as error:  # whatever a stranger's package raises
        raise NotApplicableError(f"installed, but it cannot be imported: {in_a_line(error)}") from None


def _import(library: str) -> None:
    found = importlib.import_module(PEERS[library][0])
    if library == "transformers":  # imports what it is asked for when it is asked
        _ = found.ViTForImageClassification


@functools.cache
def define_torchvision_operators() -> torch.library.Library:
    """Let torchvision be imported beside a torch of another kind, as one for CUDA beside one for CPUs.

    Its compiled part does not load there, and on import it looks for operators that this would have defined. They are
    for boxes around objects, which no Vision Transformer has: defined and without an implementation they serve.
    """
    operators = torch.library.Library("torchvision", "FRAGMENT")
    for name in TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return operators


def check_packages(names: Sequence[str]) -> None:
    """A NotApplicableError names what is not installed."""
    if absent := [name for name in names if importlib.util.find_spec(name) is None]:
        raise NotApplicableError(f"not installed: pip install {' '.join(absent)}")


def peer_model(library: str, architecture: Architecture) -> nn.Module:
    """A peer's model of this shape, float32 on the CPU; a NotApplicableError says why there is none."""
    if not isinstance(architecture, VitArchitecture):
        raise NotApplicableError("not built: only plain Vision Transformers are compared")
    if differs := beyond_plain(architecture):
        raise NotApplicableError(f"not built: only plain Vision Transformers are compared, not with {differs}")
    module, build = PEERS[library]
    try:
        model = build(importlib.import_module(module), architecture)
    except NotApplicableError:
        raise
    except Exception as error:  # whatever a library says to a shape that it does not like
        raise NotApplicableError(f"cannot be built to this shape: {in_a_line(error)}") from None
    check_same_size(model, architecture)
    return model


def beyond_plain(architecture: VitArchitecture) -> str:
    """The options in which a model is not the paper's plain one, as in `registers = 4`."""
    plain = VitArchitecture(**{name: getattr(architecture, name) for name in SHAPE})
    fields = [name for name in VitArchitecture.model_fields if name not in (*SHAPE, *NUMERICAL)]
    differing = [name for name in fields if getattr(architecture, name) != getattr(plain, name)]
    return ", ".join(
        "a ResNet" if name == "backbone" else f"{name} = {getattr(architecture, name)}" for name in differing
    )


def check_same_size(model: nn.Module, architecture: Architecture) -> None:
    """Refuse a model with another number of parameters: it would not be the same that is compared."""
    ours, theirs = cost(architecture).parameters, parameters_of(model)
    if abs(theirs - ours) > ALLOWED * ours:
        raise NotApplicableError(
            f"refused: its model has {theirs:,} parameters and ours {ours:,}, which is another shape"
        )


def parameters_of(model: nn.Module) -> int:
    """How many numbers are learned."""
    return sum(parameter.numel() for parameter in model.parameters())


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for library in libraries:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def in_a_line(error: BaseException) -> str:
    """What an exception goes back to, its kind and the first line of its words; files by name alone, for it is kept."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = str(error).strip().splitlines()[:1]
    told = re.sub(r"(?<![\w.])(?:/[^\s/:'\"]+)+/(?=[^\s/])", "", words[0])[:200] if words else ""
    return f"{type(error).__name__}: {told}" if told else type(error).__name__
