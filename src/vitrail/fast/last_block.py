"""The last block for no more tokens than are asked for.

Where the representation y is read from the class token alone, nobody reads what the last block makes of the others: it
needs their keys and values, and no queries, output projections or MLP of theirs. The function is the same; 7% of
B/16's products are gone.

Shapes: B images, T tokens, A tokens asked for, D width, H heads, d = D/H.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.model.base import ImageModel
from vitrail.model.encoder import EncoderBlock
from vitrail.model.heads import ClassPool, DistilledPool
from vitrail.model.vit import VisionTransformer


class LastBlock(nn.Module):
    """An encoder block that gives out its first A tokens only. It shares its weights with the block it is made of."""

    def __init__(self, block: EncoderBlock, asked: int) -> None:
        super().__init__()
        attention, width = block.attention, block.attention.qkv.in_features
        self.asked, self.num_heads = asked, attention.num_heads
        self.norm1, self.scale1, self.norm2, self.mlp = block.norm1, block.scale1, block.norm2, block.mlp
        self.scale2, self.out = block.scale2, attention.out
        self.query = _rows(attention.qkv, 0, width)
        self.keys_and_values = _rows(attention.qkv, width, 3 * width)

    def forward(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, A, D)."""
        x = self.norm1(z)
        q = self.query(x[:, : self.asked]).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # B, H, A, d
        k, v = self.keys_and_values(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        z = z[:, : self.asked] + self.scale1(self.out(y))
        z = z + self.scale2(self.mlp(self.norm2(z)))
        return z


def asked_tokens(model: ImageModel) -> int | None:
    """How many tokens, from the first on, y is read from; None where all are, or the last block is of another kind."""
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


def shorten(model: ImageModel) -> bool:
    """Put a `LastBlock` in the place of the last block, in place, where that is the same function. Whether it was.

    Afterwards `forward_features` gives the tokens that are asked for and no others; y and the logits are the same.
    For use, not for training: dropout and stochastic depth are left out of that block.
    """
    asked = asked_tokens(model)
    if asked is None:
        return False
    assert isinstance(model, VisionTransformer)
    last = model.encoder.blocks[-1]
    assert isinstance(last, EncoderBlock)
    model.encoder.blocks[-1] = LastBlock(last, asked)
    return True


def _rows(layer: nn.Linear, start: int, end: int) -> nn.Linear:
    """Some outputs of a dense layer, without a copy."""
    part = nn.Linear(layer.in_features, end - start, bias=layer.bias is not None, device="meta")
    part.weight = nn.Parameter(layer.weight.detach()[start:end], requires_grad=False)
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[start:end], requires_grad=False)
    return part
