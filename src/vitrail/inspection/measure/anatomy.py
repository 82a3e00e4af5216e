"""Where to find layers, patches and other tokens in any network.

Shapes: B images, N patches on a grid of (rows, columns), T = prefix + N tokens, D width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.model.base import ImageModel
from vitrail.model.bit import BitResNet
from vitrail.model.positions import Grid
from vitrail.model.timm_model import TimmModel
from vitrail.model.vit import VisionTransformer

MOST_AT_ONCE = 32 << 20
"""Bytes that the attention maps of one layer may take: they limit how many images run at a time."""
MOST_IMAGES_AT_ONCE = 32
MOST_PATCHES = 4096
"""The most patches to compare each with each: 64×64. Twice the side would take sixteen times the memory."""


LAST_NORM = "the last norm"


def unwrap_model(model: nn.Module) -> ImageModel:
    """Return the model itself, or the model inside a wrapper such as `torch.compile`'s."""
    inner = next((part for part in model.modules() if isinstance(part, ImageModel)), None)
    if inner is None:
        raise ConfigError(f"there is no model of vitrail's in this {type(model).__name__}: vitrail.load gives one")
    return inner


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for the block; afterwards every part has its own mode again."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def patch_stride(model: ImageModel) -> int:
    """Return the image pixels from one patch to the next; of a ResNet, between places of its last feature map."""
    if isinstance(model, TimmModel) and _is_transformer(model):
        return int(model.peer.patch_embed.feat_ratio())  # its patch size counts pixels of a hybrid's feature map
    assert isinstance(model, VisionTransformer | BitResNet | TimmModel)
    return model.stride


def patch_grid(model: ImageModel, images: Tensor) -> Grid:
    """Return rows and columns of the patches of a batch; raise a NotApplicableError for a network without patches."""
    if isinstance(model, VisionTransformer):
        return model.measure_grid(images)
    if isinstance(model, TimmModel) and _is_transformer(model):
        rows, columns = model.peer.patch_embed.dynamic_feat_size(tuple(images.shape[2:]))
        return int(rows), int(columns)
    raise NotApplicableError(f"{describe_kind(model)} does not cut images into patches")


def check_grid(grid: Grid) -> None:
    """Raise a NotApplicableError if a grid has too many patches to compare each with each."""
    patches = math.prod(grid)
    if patches > MOST_PATCHES:
        raise NotApplicableError(
            f"there are {grid[0]}×{grid[1]} = {patches:,} patches to compare each with each, and at "
            f"most {MOST_PATCHES:,} are allowed: use a smaller image size"
        )


def prefix_names(model: ImageModel) -> tuple[str, ...]:
    """Return the names of the tokens before the patches: class token, distillation token, registers."""
    if isinstance(model, VisionTransformer):
        count, first = model.prefix, model.architecture.class_token
        distilled = model.architecture.pool == "distilled"
    elif isinstance(model, TimmModel) and _is_transformer(model):
        count = int(getattr(model.peer, "num_prefix_tokens", 0))
        first = count > 0 and getattr(model.peer, "cls_token", None) is not None
        distilled = count > first and getattr(model.peer, "dist_token", None) is not None
    else:
        return ()
    registers = count - first - distilled
    names = ["register"] if registers == 1 else [f"register {number}" for number in range(1, registers + 1)]
    return (*["class token"][:first], *["distillation token"][:distilled], *names)


def list_layers(model: ImageModel) -> dict[str, nn.Module]:
    """Return the layers of a network by name, in the order in which they run."""
    if isinstance(model, VisionTransformer):
        return {f"block {number}": block for number, block in enumerate(model.encoder.blocks, start=1)}
    if isinstance(model, BitResNet):
        blocks = model.architecture.backbone.blocks
        names = [f"stage {s}, unit {u}" for s, units in enumerate(blocks, start=1) for u in range(1, units + 1)]
        return dict(zip(names, model.backbone.units, strict=True))
    assert isinstance(model, TimmModel)
    if _is_transformer(model):
        return {f"block {number}": block for number, block in enumerate(model.peer.blocks, start=1)}
    parts = dict(model.peer.named_modules())
    names = [str(stage.get("module")) for stage in _list_stages(model)]
    stages: dict[str, nn.Module] = {name.replace(".", " "): parts[name] for name in names if name in parts}
    if not stages:
        raise NotApplicableError(f"timm does not name the stages of {describe_kind(model)}")
    return stages


def list_states(model: ImageModel) -> dict[str, nn.Module]:
    """Return the layers by name and, of a network with patches, the last norm, whose output are its features."""
    states = list_layers(model)
    norm: nn.Module | None = None
    if isinstance(model, VisionTransformer):
        norm = model.encoder.norm
    elif isinstance(model, TimmModel) and _is_transformer(model):
        norm = getattr(model.peer, "norm", None)
    return states if norm is None or isinstance(norm, nn.Identity) else {**states, LAST_NORM: norm}


def arrange_on_grid(model: ImageModel, images: Tensor, state: Tensor) -> Tensor:
    """Return the output of a layer on its grid, (B, rows, columns, D): its patches, or its feature map."""
    if isinstance(model, VisionTransformer):
        return state if state.ndim == 4 else state[:, model.prefix :].unflatten(1, model.measure_grid(images))
    if isinstance(model, TimmModel) and _is_transformer(model):
        grid, prefix = patch_grid(model, images), len(prefix_names(model))
        if state.ndim == 3 and state.shape[1] == prefix + math.prod(grid):
            patches: Tensor = state[:, prefix:].unflatten(1, grid)
            return patches
    if state.ndim == 4:
        channels = {stage.get("num_chs") for stage in _list_stages(model)} if isinstance(model, TimmModel) else set()
        last = state.shape[3] in channels and state.shape[1] not in channels
        return state if last else state.permute(0, 2, 3, 1)
    raise NotApplicableError(f"the layers of {describe_kind(model)} output no map of the image")


def describe_kind(model: ImageModel) -> str:
    """Return what a model is, for error messages: "a ResNet", "timm's vit_tiny_patch16_224", …"""
    if isinstance(model, TimmModel):
        return f"timm's {model.architecture.name}"
    return "a ResNet" if isinstance(model, BitResNet) else "a Vision Transformer"


def split_batch(model: ImageModel, images: Tensor) -> Iterator[Tensor]:
    """Yield a batch in parts, so that the attention maps of a layer stay small at any resolution."""
    heads, tokens = 1, 1
    if isinstance(model, VisionTransformer):
        heads, tokens = model.architecture.num_heads, model.prefix + math.prod(model.measure_grid(images))
    elif isinstance(model, TimmModel) and _is_transformer(model):
        heads = max(int(getattr(part, "num_heads", 1)) for part in model.peer.modules())
        tokens = len(prefix_names(model)) + math.prod(patch_grid(model, images))
    fitting = MOST_AT_ONCE // (4 * heads * tokens**2)
    yield from images.split(min(max(fitting, 1), MOST_IMAGES_AT_ONCE))


def _is_transformer(model: TimmModel) -> bool:
    """Return whether a timm network has patches, and blocks that attend to all of them."""
    parts = ("patch_embed", "blocks")
    return all(hasattr(model.peer, part) for part in parts) and hasattr(model.peer.patch_embed, "dynamic_feat_size")


def _list_stages(model: TimmModel) -> list[dict[str, object]]:
    return [dict(stage) for stage in getattr(model.peer, "feature_info", None) or []]
