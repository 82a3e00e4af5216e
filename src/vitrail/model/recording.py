"""Reading what a model computes on its way, through hooks: the forward pass knows nothing of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.model.encoder import Encoder, SelfAttention

Hook = Callable[[nn.Module, Any, Any], None]


@contextlib.contextmanager
def record_attention(model: nn.Module, layers: Sequence[int] | None = None) -> Iterator[dict[int, Tensor]]:
    """Attention maps from a model whose attention is fused, while the block lasts.

        with vitrail.record_attention(model) as maps:
            model(images)
        maps[0]     # (B, H, T, T): the first layer's; rows are queries and sum to 1

    Each call of the model replaces the maps of the one before. The fused path itself still runs, so the model's
    output does not change; a recorded layer computes its maps beside it, without gradient and without dropout.

    Args:
        model: a model, or any module that holds `SelfAttention` layers. A compiled one runs uncompiled inside.
        layers: which attention layers, counted from 0 in the order they run, negative ones from the end; all if
            None. An axial block has two: rows, whose maps are (B · rows, H, columns, columns), then columns.
    """
    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if not attentions:
        raise ConfigError("there is no self-attention of vitrail's in this model to record: give a Vision Transformer")
    maps: dict[int, Tensor] = {}

    def keep(index: int) -> Hook:
        @torch.no_grad()
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            assert isinstance(module, SelfAttention)
            maps[index] = module.weights(arguments[0])

        return hook

    with _uncompiled(), _hooked(attentions, _indices(layers, len(attentions)), keep):
        yield maps


@contextlib.contextmanager
def record_blocks(encoder: Encoder, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """The outputs of an encoder's blocks, with their gradients: one for each of `layers`, once the block has ended."""
    blocks = list(encoder.blocks)
    indices = _indices(layers, len(blocks))
    found: dict[int, Tensor] = {}
    outputs: list[Tensor] = []

    def keep(index: int) -> Hook:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            found[index] = output

        return hook

    with _uncompiled(), _hooked(blocks, indices, keep):
        yield outputs
    outputs.extend(found[index] for index in indices)


def _indices(layers: Sequence[int] | int | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    if isinstance(layers, int):
        layers = [layers]
    for layer in layers:
        if not -count <= layer < count:
            raise ConfigError(f"layer {layer} of a model with {count}: give 0 to {count - 1}, or −1 for the last")
    return [layer % count for layer in layers]


@contextlib.contextmanager
def _hooked(modules: Sequence[nn.Module], indices: Sequence[int], make: Callable[[int], Hook]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for index in dict.fromkeys(indices):
            stack.callback(modules[index].register_forward_hook(make(index)).remove)
        yield


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Compiled code does not look for hooks that were added later, so it must not run while they are wanted.

    Once the compiler has been imported anything may be compiled, a function around the model too.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
