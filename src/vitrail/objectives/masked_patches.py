"""Masked patch prediction: the paper's self-supervision (section 4.6, appendix B.1.2).

Half of the patch embeddings of an image are corrupted: of those, 80% become a learned mask embedding, 10% that of
another patch of the image, 10% stay. From what the encoder makes of the corrupted places, the patches themselves are
predicted, by default as their mean colour in 3 bits a channel. Corruption comes before positions are added, so that a
masked patch still knows its place.

Shapes: B images, C channels, N patches in row-major order, M corrupted ones, D width, K colours.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import ConfigError
from vitrail.model.base import ImageModel
from vitrail.model.initialise import fill_lecun_normal
from vitrail.model.vit import VisionTransformer
from vitrail.objectives.base import Objective, Outcome, evaluated
from vitrail.objectives.metrics import sum_and_count
from vitrail.objectives.noise import integers, uniform

Target = Literal["mean-colour", "colours-4x4", "pixels"]
BITS = 3
"""Of each channel of a colour."""
CELLS = 4
"""Rows and columns that a patch is averaged down to for the target "colours-4x4"."""
MOST_CHANNELS = 3
"""Of colours: 3 bits of each of 3 channels make 512 classes, and a fourth channel would make 4,096."""


class MaskedPatches(Objective):
    """Images in; how badly their corrupted patches are predicted.

    What the model has and this does not use (head, pooling) is frozen, because ranks would wait for its gradients. It
    learns again once the weights were saved and loaded.
    """

    better = "loss"
    model: VisionTransformer

    def __init__(
        self,
        model: ImageModel,
        *,
        target: Target = "mean-colour",
        corrupted: float = 0.5,
        masked: float = 0.8,
        swapped: float = 0.1,
        seed: int = 0,
    ) -> None:
        """A Vision Transformer, with or without a head, and how it is trained.

        Args:
            target: "mean-colour": the patch's mean colour, one of 8^C. "colours-4x4": that of each of 4×4 cells; the
                loss is the mean over them. "pixels": all normalised pixels, by mean squared error.
            corrupted: the share of every image's patches, rounded to a whole number of them and at least one.
            masked: of those, how many become the mask embedding.
            swapped: of those, how many become the embedding of another patch; the rest stays.
            seed: of the initial mask embedding and prediction layer.
        """
        super().__init__(model)
        _check(model, target, corrupted, masked, swapped)
        self.target: Target = target
        self.corrupted, self.masked, self.swapped = corrupted, masked, swapped
        # Drawn on the CPU, like a model's values; from another sequence than a model of the same seed.
        generator = torch.Generator().manual_seed(derive_seed(seed, 1))
        token = torch.empty(1, self.model.width, device="cpu").normal_(std=0.02, generator=generator)
        self.mask_token = nn.Parameter(token)
        outputs = outputs_of(target, self.model.in_channels, self.model.stride)
        self.prediction = nn.Linear(self.model.width, outputs, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            fill_lecun_normal(self.prediction, generator)
        for unused in (self.model.pool, self.model.pool_norm, self.model.head):
            unused.requires_grad_(False)

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Mean loss over corrupted patches; sums of "loss" and, for colours, "accuracy", which count those patches.

        `key` and the samples' numbers decide what is corrupted, and how.
        """
        images = self.images(batch)
        tokens, grid = self.model.tokens(images), self.model.measure_grid(images)
        choices = choose(batch.indices, tokens.shape[1], key, self.corrupted, self.masked, self.swapped)
        encoded = self.model.encode(corrupt(tokens, self.mask_token, choices), grid)
        patches = encoded[:, self.model.prefix :]
        predictions = self.prediction(at(patches, choices.places)).float()
        targets = at(self.targets(batch.images, images), choices.places)
        compare = compare_pixels if self.target == "pixels" else compare_colours
        measured = compare(predictions, targets)
        if self.training:
            return Outcome(measured["loss"].mean(), {name: sum_and_count(values) for name, values in measured.items()})
        mask = batch.mask[:, None].expand_as(choices.places)
        return evaluated({name: sum_and_count(values, mask) for name, values in measured.items()})

    def targets(self, images: Tensor, normalised: Tensor) -> Tensor:
        """(B, C, height, width), uint8 and normalised → (B, N, …): colours from the first, pixels from the second."""
        match self.target:
            case "mean-colour":
                return mean_colour(images, self.model.stride)[:, :, None]
            case "colours-4x4":
                return colours_4x4(images, self.model.stride)
            case "pixels":
                return patch_pixels(normalised, self.model.stride)

    def parts_to_compile(self) -> list[nn.Module]:
        """The encoder, and a hybrid's ResNet: `tokens` and `encode` are methods, so the model is never called whole."""
        parts = (self.model.backbone, self.model.encoder)
        return [part for part in parts if part is not None]


def _check(model: ImageModel, target: str, corrupted: float, masked: float, swapped: float) -> None:
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"masked patches are predicted by a Vision Transformer, plain or hybrid, and a {type(model).__name__} has "
            'no patches: choose a model such as "S/16" or "R50+B/16"'
        )
    if target not in ("mean-colour", "colours-4x4", "pixels"):
        raise ConfigError(f"target = {target!r}: give mean-colour, colours-4x4 or pixels")
    if not (0 < corrupted <= 1 and 0 <= masked <= 1 and 0 <= swapped <= 1 and masked + swapped <= 1 + 1e-9):
        raise ConfigError(
            f"corrupted = {corrupted}, masked = {masked}, swapped = {swapped}: give shares from 0 to 1, the first "
            "above 0, the other two at most 1 together"
        )
    if target != "pixels" and model.in_channels > MOST_CHANNELS:
        raise ConfigError(
            f'target "{target}" counts colours of 1 to {MOST_CHANNELS} channels, and the model sees '
            f'{model.in_channels}: take target "pixels"'
        )
    if target == "colours-4x4" and model.stride % CELLS:
        raise ConfigError(
            f'target "colours-4x4" cuts a patch into 4×4 cells, so it needs patches of 4, 8, 12, 16 … pixels, not '
            f'{model.stride}: choose such a model, or target "mean-colour"'
        )


def outputs_of(target: Target, channels: int, stride: int) -> int:
    """How many numbers the prediction of a patch has."""
    if target == "pixels":
        return channels * stride * stride
    cells = CELLS * CELLS if target == "colours-4x4" else 1
    return cells << BITS * channels


# ---- Corruption ------------------------------------------------------------------------------------------------------


class Choices(NamedTuple):
    """Which patches of each image are corrupted, and how. What is neither masked nor swapped stays as it is."""

    places: Tensor
    """(B, M) int64, no two of an image alike."""
    masked: Tensor
    """(B, M) bool."""
    swapped: Tensor
    """(B, M) bool."""
    others: Tensor
    """(B, M) int64: the place in the same image whose embedding a swapped one gets. Never its own, unless there is
    no other. Of the same image, because which images share a batch depends on ranks."""


def choose(
    samples: Tensor, patches: int, key: int, corrupted: float = 0.5, masked: float = 0.8, swapped: float = 0.1
) -> Choices:
    """(B,) sample numbers, N patches in each → what to corrupt.

    The same number in every image, so that shapes are fixed and the means of ranks weigh the same; what becomes of each
    is drawn for it alone.
    """
    count = max(1, round(corrupted * patches))
    order = uniform(derive_seed(key, 0), samples, patches).argsort(dim=1, stable=True)  # stable: ties, too, are no accident
    places = order[:, :count]
    kind = uniform(derive_seed(key, 1), samples, count)
    steps = 1 + integers(derive_seed(key, 2), samples, count, patches - 1)
    return Choices(
        places,
        masked=kind < masked,
        swapped=(kind >= masked) & (kind < masked + swapped),
        others=(places + steps) % patches,
    )


def corrupt(tokens: Tensor, mask_token: Tensor, choices: Choices) -> Tensor:
    """(B, N, D) embedded patches and (1, D) → the patches with the chosen ones replaced."""
    places, masked, swapped, others = choices
    own = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    sources = own.scatter(1, places, torch.where(swapped, others, places))
    hidden = torch.zeros_like(own, dtype=torch.bool).scatter(1, places, masked)
    return torch.where(hidden[:, :, None], mask_token, at(tokens, sources))


def at(values: Tensor, places: Tensor) -> Tensor:
    """(B, N, …) and (B, M) → (B, M, …): what stands at the places of each image."""
    images = torch.arange(len(values), device=values.device)
    return values[images[:, None], places]


# ---- Targets ---------------------------------------------------------------------------------------------------------


def mean_colour(images: Tensor, stride: int) -> Tensor:
    """(B, C, height, width) uint8 → (B, N) int64 from 0 to 8^C − 1: red · 64 + green · 8 + blue, each from 0 to 7."""
    return colours(images, stride).flatten(1)


def colours_4x4(images: Tensor, stride: int) -> Tensor:
    """(B, C, height, width) uint8 → (B, N, 16) int64: the mean colours of 4×4 cells of each patch, row by row."""
    cells: Tensor = colours(images, stride // CELLS).unflatten(2, (-1, CELLS)).unflatten(1, (-1, CELLS))
    return cells.transpose(2, 3).flatten(3).flatten(1, 2)  # from B, rows, 4, columns, 4


def colours(images: Tensor, side: int) -> Tensor:
    """(B, C, height, width) uint8 → (B, height / side, width / side) int64: the 3-bit mean colour of each square.

    In whole numbers, so that a mean on the border of two levels falls to the same one on every device.
    """
    levels = (squares(images, side).sum(dim=(3, 5), dtype=torch.int64) << BITS) // (256 * side * side)
    number = levels[:, 0]
    for level in levels[:, 1:].unbind(1):
        number = (number << BITS) + level
    return number


def patch_pixels(images: Tensor, stride: int) -> Tensor:
    """(B, C, height, width) → (B, N, C · stride²): the pixels of each patch as (channel, row, column)."""
    return squares(images, stride).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def squares(images: Tensor, side: int) -> Tensor:
    """(B, C, height, width) → (B, C, height / side, side, width / side, side), without a copy."""
    cut: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    return cut


# ---- Losses ----------------------------------------------------------------------------------------------------------


def compare_colours(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """(B, M, cells · K) and (B, M, cells) → "loss" and "accuracy" of each patch, (B, M): means over its cells."""
    logits = predictions.unflatten(2, (targets.shape[2], -1))
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
    right = logits.argmax(dim=3) == targets
    return {"loss": losses.mean(dim=2), "accuracy": right.float().mean(dim=2)}


def compare_pixels(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """(B, M, C · stride²) twice → "loss" of each patch, (B, M): the mean squared difference."""
    return {"loss": (predictions - targets).square().mean(dim=2)}
