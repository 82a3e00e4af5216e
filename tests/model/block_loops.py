"""An encoder block with all its options, written as loops over images, heads, tokens and channels in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def array(tensor: Any) -> Array | None:
    return None if tensor is None else tensor.detach().double().numpy()


def compute_norm(x: Array, module: Any, kind: str, eps: float) -> Array:
    """One token or head at a time: (d,) → (d,); x itself if the module has no parameters."""
    if not list(module.parameters()):
        return x
    weight = array(module.weight)
    if kind == "rms":
        return x / math.sqrt(sum(value * value for value in x) / len(x) + eps) * weight
    mean = sum(x) / len(x)
    variance = sum((value - mean) ** 2 for value in x) / len(x)
    return (x - mean) / math.sqrt(variance + eps) * weight + array(module.bias)


def apply_linear(x: Array, layer: Any) -> Array:
    """(in,) → (out,)."""
    y = array(layer.weight) @ x
    return y if layer.bias is None else y + array(layer.bias)


def turn(x: Array, angles: Array, layout: str) -> Array:
    """(d,) turned by (d/2,) angles, one for each pair."""
    turned, half = x.copy(), len(x) // 2
    for pair, angle in enumerate(angles):
        i, j = (pair, pair + half) if layout == "halves" else (2 * pair, 2 * pair + 1)
        turned[i] = x[i] * math.cos(angle) - x[j] * math.sin(angle)
        turned[j] = x[i] * math.sin(angle) + x[j] * math.cos(angle)
    return turned


def find_angles(model: Any, layer: int, head: int, row: int, column: int, grid: tuple[int, int]) -> Array:
    """The angles of one patch, in one head of one layer: (d/2,)."""
    rotary, quarter = model.architecture.rotary, model.architecture.head_width // 4
    if rotary.coordinates == "unit":
        y, x = ((2 * (place + 0.5) / side - 1) * 2 * math.pi for place, side in zip((row, column), grid, strict=True))
    else:
        scale = [1.0, 1.0]
        if rotary.reference_grid is not None:
            scale = [there / here for there, here in zip(rotary.reference_grid, grid, strict=True)]
        y, x = ((place + rotary.offset) * factor for place, factor in zip((row, column), scale, strict=True))
    first, second = (y, x) if rotary.first == "row" else (x, y)
    if rotary.learned:
        frequencies = array(model.rotary.frequencies)[:, layer, head]
        return first * frequencies[0] + second * frequencies[1]
    frequencies = np.array([rotary.base ** -(i / quarter) for i in range(quarter)])
    return np.concatenate([first * frequencies, second * frequencies])


def find_bias(model: Any, layer: int, head: int, query: int, key: int, grid: tuple[int, int]) -> float:
    """BEiT's bias for one pair of tokens, from a table for this very grid."""
    a = model.architecture
    if a.position != "relative-bias":
        return 0.0
    shared = a.position_at == "shared"
    module = model.relative_bias if shared else model.encoder.blocks[layer].attention.relative_bias
    table, prefix = array(module.table)[:, head], a.prefix
    if query < prefix or key < prefix:
        return float(table[-1] if query < prefix and key < prefix else table[-3] if query < prefix else table[-2])
    (q_row, q_column), (k_row, k_column) = (divmod(token - prefix, grid[1]) for token in (query, key))
    down, right = q_row - k_row + grid[0] - 1, q_column - k_column + grid[1] - 1
    return float(table[down * (2 * grid[1] - 1) + right])


def attend(model: Any, layer: int, x: Array, grid: tuple[int, int]) -> tuple[Array, Array]:
    """(T, D) → attention's output (T, D) and its weights (H, T, T)."""
    a, attention = model.architecture, model.encoder.blocks[layer].attention
    tokens, width, d = len(x), a.width, a.head_width
    qkv = np.stack([apply_linear(token, attention.qkv) for token in x])
    if attention.q_bias is not None:
        qkv[:, :width] += array(attention.q_bias)
        qkv[:, 2 * width :] += array(attention.v_bias)
    mixed, maps = np.zeros((tokens, width)), np.zeros((a.num_heads, tokens, tokens))
    for head in range(a.num_heads):
        place = slice(head * d, (head + 1) * d)
        parts = [qkv[:, start : start + width][:, place] for start in (0, width, 2 * width)]
        queries = np.stack([compute_norm(q, attention.q_norm, a.norm, a.norm_eps) for q in parts[0]])
        keys = np.stack([compute_norm(k, attention.k_norm, a.norm, a.norm_eps) for k in parts[1]])
        for token in range(a.prefix, tokens if a.rotary is not None else 0):
            row, column = divmod(token - a.prefix, grid[1])
            angles = find_angles(model, layer, head, row, column, grid)
            queries[token] = turn(queries[token], angles, a.rotary.layout)
            keys[token] = turn(keys[token], angles, a.rotary.layout)
        for q in range(tokens):
            logits = [
                float(queries[q] @ keys[k]) / math.sqrt(d) + find_bias(model, layer, head, q, k, grid)
                for k in range(tokens)
            ]
            shares = np.exp(np.array(logits) - max(logits))
            maps[head, q] = shares / shares.sum()
            mixed[q, place] = maps[head, q] @ parts[2]
    normed = [compute_norm(token, attention.norm, a.norm, a.norm_eps) for token in mixed]
    return np.stack([apply_linear(token, attention.out) for token in normed]), maps


def apply_mlp(model: Any, layer: int, x: Array) -> Array:
    """(D,) → (D,)."""
    a, mlp = model.architecture, model.encoder.blocks[layer].mlp
    hidden = apply_linear(x, mlp.fc1)
    if a.mlp == "swiglu":
        gate, value = hidden[: a.mlp_dim], hidden[a.mlp_dim :]
        hidden = gate / (1 + np.exp(-gate)) * value
    else:
        hidden = np.array([0.5 * h * (1 + math.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) for h in hidden])
    return apply_linear(compute_norm(hidden, mlp.norm, a.norm, a.norm_eps), mlp.fc2)


def encode(model: Any, z: Array, grid: tuple[int, int]) -> tuple[Array, list[Array]]:
    """(T, D) tokens that go into the encoder → (T, D) encoded ones, and the maps of each layer."""
    a, maps = model.architecture, []

    def norm(tokens: Array, module: Any) -> Array:
        return np.stack([compute_norm(token, module, a.norm, a.norm_eps) for token in tokens])

    for layer, block in enumerate(model.encoder.blocks):
        behind = a.norm_at == "after"
        branch, weights = attend(model, layer, z if behind else norm(z, block.norm1), grid)
        z = z + (norm(branch, block.norm1) if behind else branch)
        branch = np.stack([apply_mlp(model, layer, token) for token in (z if behind else norm(z, block.norm2))])
        z = z + (norm(branch, block.norm2) if behind else branch)
        maps.append(weights)
    return norm(z, model.encoder.norm), maps
