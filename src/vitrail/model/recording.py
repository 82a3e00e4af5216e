"""Record attention maps and outputs of blocks with hooks, without any change to the forward pass."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import ConfigError, NotApplicableError
from vitrail.model.attention import SelfAttention
from vitrail.model.encoder import Encoder
from vitrail.model.timm_model import TimmModel

Hook = Callable[[nn.Module, Any, Any], None]
MapsCallback = Callable[[int, Tensor], None]
"""Called with the index of an attention layer and its maps."""


def find_attention_layers(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a model, in the order in which they run.

    For a network of timm's these are the layers that can compute their maps without a fused kernel; parallel layers of
    one block are listed one after the other.

    Raises:
        NotApplicableError: a network of timm's without such layers.
        ConfigError: another model without self-attention.
    """
    own: list[nn.Module] = [module for module in model.modules() if isinstance(module, SelfAttention)]
    if own:
        return own
    for module in model.modules():
        if isinstance(module, TimmModel):
            return _find_timm_attention(module)
    raise ConfigError("there is no self-attention of vitrail's in this model to record: give a Vision Transformer")


@contextlib.contextmanager
def observe_attention(model: nn.Module, on_maps: MapsCallback, layers: Sequence[int] | None = None) -> Iterator[None]:
    """Inside the `with` block, call `on_maps(layer, maps)` each time that an attention layer runs.

    Maps are (B, H, T, T), at least float32, without gradient and without dropout; rows are queries and sum to 1.
    Nothing is stored: a caller that reduces them at once holds the maps of one layer only.

    vitrail's own layers compute their maps beside the fused path, so the model's output does not change. timm's layers
    leave the fused path while they are observed, so the output may differ by rounding.

    Args:
        model: a model, or any module that holds `SelfAttention` layers. A compiled one runs uncompiled inside.
        layers: indices of attention layers, from 0 in the order in which they run, negative ones from the end;
            all if None. An axial block has two: rows, whose maps are (B · rows, H, columns, columns), then columns.
    """
    attentions = find_attention_layers(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_compilation())
        for index in dict.fromkeys(_resolve_indices(layers, len(attentions))):
            _observe(attentions[index], functools.partial(on_maps, index), stack)
        yield


@contextlib.contextmanager
def record_attention(model: nn.Module, layers: Sequence[int] | None = None) -> Iterator[dict[int, Tensor]]:
    """Record attention maps inside the `with` block, also from a model whose attention is fused.

        with vitrail.record_attention(model) as maps:
            model(images)
        maps[0]     # (B, H, T, T): the first layer's; rows are queries and sum to 1

    Each call of the model replaces the maps of the one before. The fused path itself still runs, so the model's
    output does not change; a recorded layer computes its maps beside it, without gradient and without dropout. Only
    timm's networks leave their fused path, so their output may differ by rounding.

    Args:
        model: a model, or any module that holds `SelfAttention` layers. A compiled one runs uncompiled inside.
        layers: indices of attention layers, from 0 in the order in which they run, negative ones from the end;
            all if None. An axial block has two: rows, whose maps are (B · rows, H, columns, columns), then columns.
    """
    maps: dict[int, Tensor] = {}
    with observe_attention(model, maps.__setitem__, layers):
        yield maps


@contextlib.contextmanager
def record_blocks(encoder: Encoder, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Yield a list that holds the output of each of the blocks `layers`, with gradients, when the `with` block ends."""
    blocks = list(encoder.blocks)
    indices = _resolve_indices(layers, len(blocks))
    recorded: dict[int, Tensor] = {}
    outputs: list[Tensor] = []

    def make_hook(index: int) -> Hook:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            recorded[index] = output

        return hook

    with disable_compilation(), _hook_modules(blocks, indices, make_hook):
        yield outputs
    outputs.extend(recorded[index] for index in indices)


def _find_timm_attention(model: TimmModel) -> list[nn.Module]:
    """Return the attention layers of a network's blocks; attention that pools is not one of them."""
    inside = getattr(model.peer, "blocks", model.peer)
    layers = [part for part in inside.modules() if hasattr(part, "fused_attn") and hasattr(part, "attn_drop")]
    if not layers:
        raise NotApplicableError(f"timm's {model.architecture.name} has no attention, or none whose maps can be read")
    return layers


def _observe(attention: nn.Module, on_maps: Callable[[Tensor], None], stack: contextlib.ExitStack) -> None:
    """Call `on_maps` with the maps of one layer each time it runs, until the stack is closed."""
    if isinstance(attention, SelfAttention):

        @torch.no_grad()
        def after(module: SelfAttention, arguments: Any, output: Any) -> None:
            on_maps(module.weights(*arguments))

        stack.callback(attention.register_forward_hook(after).remove)
        return

    @torch.no_grad()
    def before(dropout: nn.Module, arguments: Any) -> None:
        maps: Tensor = arguments[0].detach()
        on_maps(maps.to(torch.promote_types(maps.dtype, torch.float32)))

    # timm's layers pass their maps through a dropout layer, unless a fused kernel is used.
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
    """Return a context in which compiled code runs uncompiled, because compiled code ignores hooks added later.

    It acts whenever the compiler has been imported: a function around the model may be compiled too.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
