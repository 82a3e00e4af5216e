"""Everything in miniature, offline, on the handwritten digits that ship inside scikit-learn.

This version builds models, looks at them and takes their weights elsewhere; it does not train yet, and says so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import functional as F

from vitrail.model.create import create_model
from vitrail.model.recording import record_attention
from vitrail.model.vit import VisionTransformer
from vitrail.weights.convert import convert
from vitrail.weights.load import load
from vitrail.weights.save import save

IMAGES, SIZE, LARGER = 64, 32, 48


@torch.inference_mode()
def quickstart() -> Iterator[str]:
    """Lines to print, each measured when it is asked for."""
    images = digits(IMAGES, SIZE)
    yield f"{IMAGES} real handwritten digits, {SIZE}×{SIZE} pixels, in [−1, 1]"
    model = small_model("learned-1d")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    yield f"a Ti/4 for them: {parameters:,} parameters, weights fresh from seed 0"

    tokens = model.tokens(images)
    encoded = model.encode(tokens)
    y = model.embed(images)
    shapes = [("images", images), ("tokens", tokens), ("encoded", encoded), ("y", y), ("logits", model(images))]
    yield "the way through it: " + " → ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes)

    before = model(images)
    with record_attention(model) as maps:
        during = model(images)
    error = max((rows.sum(dim=-1) - 1).abs().max().item() for rows in maps.values())
    same = "unchanged" if torch.equal(before, during) else "CHANGED"
    yield f"attention of {len(maps)} layers recorded: rows sum to 1 within {error:.0e}, output {same} bit for bit"

    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))
    for position in ("none", "learned-1d"):
        change = change_when_shuffled(small_model(position), images, order)
        yield f"patches shuffled, position embedding {position}: y moves by {change:.1e} of its size"

    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "native")
        convert(Path(folder) / "native", Path(folder) / "google", "google")
        again = load(Path(folder) / "google")
    same = "the same" if torch.equal(again.embed(images), model.embed(images)) else "ANOTHER"
    yield f"saved, converted to Google's npz and loaded back: {same} y bit for bit"

    model.resize(LARGER)
    y = model.embed(digits(IMAGES, LARGER))
    yield f"resized to {LARGER}×{LARGER}: {model.prefix + model.grid[0] * model.grid[1]} tokens, y {tuple(y.shape)}"

    start = time.perf_counter()
    model(digits(IMAGES, LARGER))
    yield f"speed at that size: {IMAGES / (time.perf_counter() - start):.0f} images/s on this CPU"


def small_model(position: str) -> VisionTransformer:
    """A Tiny for digits, ready to evaluate."""
    model = create_model("Ti/4", image_size=SIZE, in_channels=1, num_classes=10, position=position, seed=0)
    assert isinstance(model, VisionTransformer)
    return model.eval()


def digits(count: int, size: int) -> Tensor:
    """(count, 1, size, size) in [−1, 1]."""
    pixels = torch.from_numpy(load_digits().images[:count]).float()[:, None] / 8 - 1
    return F.interpolate(pixels, size=(size, size), mode="bilinear")


def change_when_shuffled(model: VisionTransformer, images: Tensor, order: Tensor) -> float:
    """How far the representation moves, relative to its size, when the patches change places."""
    tokens = model.tokens(images)
    y, shuffled = (model.pooled(model.encode(t)) for t in (tokens, tokens[:, order]))
    return float((y - shuffled).norm() / y.norm())
