"""Reading what a model computes on its way, through hooks: the forward pass knows nothing of it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.model.encoder import Encoder, SelfAttention
from vitrail.model.timm_model import TimmModel

Hook = Callable[[nn.Module, Any, Any], None]
MapsCallback = Callable[[int, Tensor], None]
"""Given the number of an attention layer, and its maps."""


def find_attention_layers(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a model in the order in which they run: vitrail's own, or those of a network of timm's.

    Of timm's those that can be told to compute their maps in the open; several that lie side by side in a block are
    counted one after the other. Without any: a NotApplicableError for a network of timm's, a ConfigError for all
    others.
    """
    own: list[nn.Module] = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if own:
        return own
    for module in model.modules():
        if isinstance(module, TimmModel):
            return _find_timm_attention(module)
    raise ConfigError("there is no self-attention of vitrail's in this model to record: give a Vision Transformer")


@contextlib.contextmanager
def observe_attention(model: nn.Module, tell: MapsCallback, layers: Sequence[int] | None = None) -> Iterator[None]:
    """While the block lasts, `tell(layer, maps)` is called with each layer's attention maps as that layer runs.

    Maps are (B, H, T, T), at least float32, without gradient and without dropout; rows are queries and sum to 1.
    Nothing is kept: who reduces them at once never holds more than one layer's.

    vitrail's own layers compute their maps beside the fused path, so the model's output does not change. Those of timm
    leave the fused path while they are observed, so the output may differ by rounding.

    Args:
        model: a model, or any module that holds `SelfAttention` layers. A compiled one runs uncompiled inside.
        layers: which attention layers, counted from 0 in the order they run, negative ones from the end; all if
            None. An axial block has two: rows, whose maps are (B · rows, H, columns, columns), then columns.
    """
    attentions = find_attention_layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_compilation())
        for index in dict.fromkeys(_resolve_indices(layers, len(attentions))):
            _observe(attentions[index], functools.partial(tell, index), stack)
        yield


@contextlib.contextmanager
def record_attention(model: nn.Module, layers: Sequence[int] | None = None) -> Iterator[dict[int, Tensor]]:
    """Attention maps from a model whose attention is fused, while the block lasts.

        with vitrail.record_attention(model) as maps:
            model(images)
        maps[0]     # (B, H, T, T): the first layer's; rows are queries and sum to 1

    Each call of the model replaces the maps of the one before. The fused path itself still runs, so the model's
    output does not change; a recorded layer computes its maps beside it, without gradient and without dropout. Only
    timm's networks leave their fused path meanwhile, and may differ by rounding.

    Args:
        model: a model, or any module that holds `SelfAttention` layers. A compiled one runs uncompiled inside.
        layers: which attention layers, counted from 0 in the order they run, negative ones from the end; all if
            None. An axial block has two: rows, whose maps are (B · rows, H, columns, columns), then columns.
    """
    maps: dict[int, Tensor] = {}
    with observe_attention(model, maps.__setitem__, layers):
        yield maps


@contextlib.contextmanager
def record_blocks(encoder: Encoder, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """The outputs of an encoder's blocks, with their gradients: one for each of `layers`, once the block has ended."""
    blocks = list(encoder.blocks)
    indices = _resolve_indices(layers, len(blocks))
    found: dict[int, Tensor] = {}
    outputs: list[Tensor] = []

    def keep(index: int) -> Hook:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            found[index] = output

        return hook

    with disable_compilation(), _hook_modules(blocks, indices, keep):
        yield outputs
    outputs.extend(found[index] for index in indices)


def _find_timm_attention(model: TimmModel) -> list[nn.Module]:
    """Those of the blocks, where a network has any: what pools by attention is no layer."""
    inside = getattr(model.peer, "blocks", model.peer)
    found = [part for part in inside.modules() if hasattr(part, "fused_attn") and hasattr(part, "attn_drop")]
    if not found:
        raise NotApplicableError(f"timm's {model.architecture.name} has no attention, or none whose maps can be read")
    return found


def _observe(attention: nn.Module, tell: Callable[[Tensor], None], stack: contextlib.ExitStack) -> None:
    """Until the stack unwinds."""
    if isinstance(attention, SelfAttention):

        @torch.no_grad()
        def after(module: SelfAttention, arguments: Any, output: Any) -> None:
            tell(module.weights(arguments[0]))

        stack.callback(attention.register_forward_hook(after).remove)
        return

    @torch.no_grad()
    def before(dropout: nn.Module, arguments: Any) -> None:
        maps: Tensor = arguments[0].detach()
        tell(maps.to(torch.promote_types(maps.dtype, torch.float32)))

    # timm's layers give their maps to a dropout layer of their own, unless a fused kernel keeps them to itself.
    part: Any = attention
    stack.callback(part.attn_drop.register_forward_pre_hook(before).remove)
    stack.callback(setattr, part, "fused_attn", part.fused_attn)
    part.fused_attn = False


def _resolve_indices(layers: Sequence[int] | int | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    if isinstance(layers, int):
        layers = [layers]
    for layer in layers:
        if not -count <= layer < count:
            raise ConfigError(f"layer {layer} of a model with {count}: give 0 to {count - 1}, or −1 for the last")
    return [layer % count for layer in layers]


@contextlib.contextmanager
def _hook_modules(modules: Sequence[nn.Module], indices: Sequence[int], make: Callable[[int], Hook]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for index in dict.fromkeys(indices):
            stack.callback(modules[index].register_forward_hook(make(index)).remove)
        yield


def disable_compilation() -> contextlib.AbstractContextManager[Any]:
    """Compiled code does not look for hooks that were added later, so it must not run while they are wanted.

    Once the compiler has been imported anything may be compiled, a function around the model too.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
