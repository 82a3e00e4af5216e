"""Attention pooling for inference, without keys and values of every token.

The query is the same for all images. So a head's scores are one product of the tokens with a constant vector, and its
result is the value of one weighted mean of the tokens: two small products instead of two large ones. The bias of keys
adds the same number to all scores of a head, which the softmax takes out again.

Shapes: B images, T tokens, D width, H heads, d = D/H.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.model.pooling import AttentionPool

STEP = 8
"""Heads are padded to a multiple of this: rows of whole 16 bytes."""


class FusedAttentionPool:
    """Tokens (B, T, D) in half precision → (B, D), the same function as `AttentionPool`."""

    @torch.no_grad()
    def __init__(self, pool: AttentionPool, dtype: torch.dtype) -> None:
        """Take the weights of a pool; products are computed in `dtype`."""
        self.heads, self.prefix, width = pool.num_heads, pool.prefix, pool.q.in_features
        query = pool.q(pool.query).view(self.heads, 1, -1)  # H, 1, d
        keys, values = pool.kv.weight.view(2, self.heads, -1, width).unbind(0)  # H, d, D
        constant = (query * query.shape[2] ** -0.5 @ keys)[:, 0]  # H, D
        self.scores = F.pad(constant, (0, 0, 0, -self.heads % STEP)).to(dtype)
        self.values = values.transpose(1, 2).to(dtype).contiguous()  # H, D, d
        self.value_bias = pool.kv.bias[width:].detach().float()
        self.out, self.norm, self.mlp = (copy.deepcopy(part).eval() for part in (pool.out, pool.norm, pool.mlp))
        self.dtype = dtype

    def __call__(self, z: Tensor) -> Tensor:
        """(B, T, D) → (B, D), float32."""
        z = z[:, self.prefix :].to(self.dtype)
        with torch.autocast(z.device.type, enabled=False):
            weights = multiply_finely(z, self.scores)[..., : self.heads].softmax(dim=1)  # B, T, H
            mixed = weights.to(self.dtype).transpose(1, 2) @ z  # B, H, D
            y = torch.bmm(mixed.transpose(0, 1), self.values).transpose(0, 1).flatten(1).float() + self.value_bias
        with torch.autocast(z.device.type, self.dtype):
            y = self.out(y).float()
            refined: Tensor = y + self.mlp(self.norm(y))
        return refined.float()


def multiply_finely(z: Tensor, weight: Tensor) -> Tensor:
    """z (B, T, D), weight (N, D) → (B, T, N), float32: scores must not be rounded to half precision."""
    if not z.is_cuda:
        return F.linear(z.float(), weight.float())
    scores: Tensor = torch.mm(z.flatten(0, 1), weight.t(), out_dtype=torch.float32)
    return scores.view(*z.shape[:2], -1)
