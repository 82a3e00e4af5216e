"""The paper's equations 1 to 4 in float64, as loops over patches, heads and tokens, with nothing fused.

Reads the parameters of a model by name and shares no code with it.
"""

from __future__ import annotations

import math

import numpy as np
import torch


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_exact(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def layer_norm(row: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    mean = sum(row) / len(row)
    variance = sum((value - mean) ** 2 for value in row) / len(row)
    return np.array([(v - mean) / math.sqrt(variance + eps) * w + b for v, w, b in zip(row, weight, bias, strict=True)])


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    return [power / sum(powers) for power in powers]


class ReferenceViT:
    """One image at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.p = {name: tensor.detach().double().numpy().copy() for name, tensor in model.state_dict().items()}
        self.a = model.architecture

    def patches(self, image: np.ndarray) -> list[np.ndarray]:
        """The image cut row by row into flattened patches."""
        side = self.a.patch_size
        return [
            image[:, top : top + side, left : left + side].reshape(-1)
            for top in range(0, image.shape[1], side)
            for left in range(0, image.shape[2], side)
        ]

    def position(self, layer: int, row: int, column: int) -> np.ndarray:
        """What is added to a patch."""
        a, p = self.a, self.p
        columns = a.image_size[1] // a.patch_size
        if a.position in ("none", "relative"):
            return np.zeros(a.width)
        prefix = f"position_embedding.{layer if a.position_at == 'every-layer' else 0}."
        if a.position == "learned-1d":
            return p[prefix + "table"][1 + row * columns + column]
        if a.position == "learned-2d":
            return np.concatenate([p[prefix + "column_table"][column], p[prefix + "row_table"][row]])
        quarter = a.width // 4
        omega = [1 / 10000 ** (i / (quarter - 1)) for i in range(quarter)]
        return np.array(
            [math.sin(column * w) for w in omega]
            + [math.cos(column * w) for w in omega]
            + [math.sin(row * w) for w in omega]
            + [math.cos(row * w) for w in omega]
        )

    def class_position(self, layer: int) -> np.ndarray:
        a, p = self.a, self.p
        prefix = f"position_embedding.{layer if a.position_at == 'every-layer' else 0}."
        if a.position == "learned-1d":
            return p[prefix + "table"][0]
        if a.position == "learned-2d":
            return p[prefix + "prefix_table"][0]
        return np.zeros(a.width)

    def add_positions(self, z: list[np.ndarray], layer: int) -> list[np.ndarray]:
        columns = self.a.image_size[1] // self.a.patch_size
        moved = [z[0] + self.class_position(layer)]
        for index, token in enumerate(z[1:]):
            moved.append(token + self.position(layer, index // columns, index % columns))
        return moved

    def attention(self, x: list[np.ndarray], prefix: str) -> list[np.ndarray]:
        a, p = self.a, self.p
        width = a.width // a.num_heads
        qkv = [p[prefix + "qkv.weight"] @ token + p[prefix + "qkv.bias"] for token in x]
        tokens = range(len(x))
        mixed = [np.zeros(a.width) for _ in tokens]
        for head in range(a.num_heads):
            part = slice(head * width, (head + 1) * width)
            q = [row[: a.width][part] for row in qkv]
            k = [row[a.width : 2 * a.width][part] for row in qkv]
            v = [row[2 * a.width :][part] for row in qkv]
            for i in tokens:
                logits = []
                for j in tokens:
                    logit = q[i] @ k[j]
                    if a.position == "relative" and i > 0 and j > 0:
                        patches = len(x) - 1
                        logit += q[i] @ p[prefix + "relative.table"][(i - j) + patches - 1]
                    logits.append(logit / math.sqrt(width))
                for j, weight in enumerate(softmax(logits)):
                    mixed[i][part] += weight * v[j]
        return [p[prefix + "out.weight"] @ token + p[prefix + "out.bias"] for token in mixed]

    def norm(self, row: np.ndarray, prefix: str) -> np.ndarray:
        return layer_norm(row, self.p[prefix + "weight"], self.p[prefix + "bias"], self.a.norm_eps)

    def encode(self, image: np.ndarray) -> np.ndarray:
        a, p = self.a, self.p
        gelu = {"tanh": gelu_tanh, "exact": gelu_exact}[a.gelu]
        e, e_bias = p["patch_embed.projection.weight"], p["patch_embed.projection.bias"]
        z = [p["class_token"][0], *(e @ patch + e_bias for patch in self.patches(image))]
        z = self.add_positions(z, 0)  # equation 1
        for layer in range(a.depth):
            if layer > 0 and a.position_at != "input":
                z = self.add_positions(z, layer)
            block = f"encoder.blocks.{layer}."
            mixed = self.attention([self.norm(token, block + "norm1.") for token in z], block + "attention.")
            z = [m + token for m, token in zip(mixed, z, strict=True)]  # equation 2
            after = []
            for token in z:
                hidden = p[block + "mlp.fc1.weight"] @ self.norm(token, block + "norm2.") + p[block + "mlp.fc1.bias"]
                hidden = np.array([gelu(value) for value in hidden])
                after.append(p[block + "mlp.fc2.weight"] @ hidden + p[block + "mlp.fc2.bias"] + token)  # equation 3
            z = after
        return np.stack([self.norm(token, "encoder.norm.") for token in z])

    def y(self, image: np.ndarray) -> np.ndarray:
        return self.encode(image)[0]  # equation 4

    def logits(self, image: np.ndarray) -> np.ndarray:
        return self.p["head.weight"] @ self.y(image) + self.p["head.bias"]
