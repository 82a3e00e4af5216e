"""A shorter last block, for models that read only some tokens of it.

Many models read the representation y from the class token alone. Then the last block needs the keys and values of all
tokens, but queries, output projection and MLP only for the tokens that are read. The function stays the same; B/16
saves 7% of its multiplications.

Shapes: B images, T tokens, R tokens that are read (always the first ones), D width, H heads, d = D/H.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.fast.known_parts import find_unknown_part
from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock
from vitrail.model.pooling import ClassPool, DistilledPool
from vitrail.model.vit import VisionTransformer


class LastBlock(nn.Module):
    """An encoder block that computes only its first R tokens. It shares the weights of the block it is made from."""

    def __init__(self, block: EncoderBlock, read_count: int) -> None:
        super().__init__()
        attention, width = block.attention, block.attention.qkv.in_features
        self.read_count, self.num_heads = read_count, attention.num_heads
        self.norm1, self.scale1, self.norm2, self.mlp = block.norm1, block.scale1, block.norm2, block.mlp
        self.scale2, self.out = block.scale2, attention.out
        self.query = _select_outputs(attention.qkv, 0, width)
        self.keys_and_values = _select_outputs(attention.qkv, width, 3 * width)

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, R, D)."""
        x = self.norm1(z)
        q = self.query(x[:, : self.read_count]).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # B, H, R, d
        k, v = self.keys_and_values(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        z = z[:, : self.read_count] + self.scale1(self.out(y))
        z = z + self.scale2(self.mlp(self.norm2(z)))
        return z


def count_read_tokens(model: ImageModel) -> int | None:
    """Return how many tokens, from the first on, y is read from; they are none of the patches.

    None means that the last block cannot be shortened: all tokens are read, or the block is of another kind.
    """
    if not isinstance(model, VisionTransformer):
        return None
    last = model.encoder.blocks[-1]
    if not isinstance(last, EncoderBlock) or last.attention.relative is not None:
        return None
    match model.pool:
        case ClassPool():
            return 1
        case DistilledPool():
            return 2
        case _:
            return None


def shorten_last_block(model: ImageModel) -> bool:
    """Replace a model's last block by a `LastBlock`, in place, where that computes the same function.

    Afterwards `forward_features` returns only the tokens that are read; y and the logits are the same. The result is
    for inference: the new block has no dropout and no stochastic depth.

    Returns:
        Whether the block was replaced.
    """
    read_count = count_read_tokens(model)
    if read_count is None:
        return False
    assert isinstance(model, VisionTransformer)
    if find_unknown_part(model.architecture):
        return False
    last = model.encoder.blocks[-1]
    assert isinstance(last, EncoderBlock)
    model.encoder.blocks[-1] = LastBlock(last, read_count)
    return True


def _select_outputs(layer: nn.Linear, start: int, end: int) -> nn.Linear:
    """Return a dense layer with some of the outputs of `layer`; the weights are not copied."""
    part = nn.Linear(layer.in_features, end - start, bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(layer.weight.detach()[start:end], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[start:end], requires_grad=False)
    return part
