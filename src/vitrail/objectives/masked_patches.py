"""Masked patch prediction: the paper's self-supervision (section 4.6, appendix B.1.2).

Half of the patch embeddings of an image are corrupted: 80% of those become a learned mask embedding, 10% the embedding
of another patch of the image, and 10% stay. The model predicts the original patches at the corrupted places, by default
their mean colour in 3 bits a channel. Positions are added after the corruption, so a masked patch still has its place.

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
from vitrail.objectives.base import Objective, Outcome, evaluation_outcome
from vitrail.objectives.metrics import sum_and_count
from vitrail.objectives.noise import draw_integers, draw_uniform
from vitrail.system.device import float64_device
from vitrail.system.precision import widen

Target = Literal["mean-colour", "colours-4x4", "pixels"]
BITS = 3
"""Bits of each channel of a colour."""
CELLS = 4
"""Rows and columns of cells in a patch for the target "colours-4x4"."""
MOST_CHANNELS = 3
"""Largest number of channels of a colour target: 3 make 512 classes, and a fourth would make 4,096."""


class MaskedPatches(Objective):
    """Trains a model to predict the corrupted patches of images.

    Head and pooling, which this does not use, are frozen, because ranks would wait for their gradients. A model that is
    saved and loaded again has them unfrozen.
    """

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
        """Take a Vision Transformer, with or without a head.

        Args:
            target: "mean-colour": the patch's mean colour, one of 8^C. "colours-4x4": the mean colour of each of 4×4
                cells; the loss is the mean over them. "pixels": all normalised pixels, by mean squared error.
            corrupted: share of the patches of each image to corrupt, above 0 to 1; at least one patch.
            masked: share of the corrupted patches that become the mask embedding.
            swapped: share of the corrupted patches that become the embedding of another patch; the rest stays.
            seed: seed of the initial mask embedding and prediction layer.
        """
        super().__init__(model)
        _check_options(model, target, corrupted, masked, swapped)
        self.target: Target = target
        self.corrupted, self.masked, self.swapped = corrupted, masked, swapped
        # Drawn on the CPU, like a model's weights, but from another sequence than a model with the same seed.
        generator = torch.Generator().manual_seed(derive_seed(seed, 1))
        token = torch.empty(1, self.model.width, device="cpu").normal_(std=0.02, generator=generator)
        self.mask_token = nn.Parameter(token)
        outputs = count_outputs(target, self.model.in_channels, self.model.stride)
        self.prediction = nn.Linear(self.model.width, outputs, device="meta").to_empty(device="cpu")
        with torch.no_grad():
            fill_lecun_normal(self.prediction, generator)
        for unused in (self.model.pool, self.model.pool_norm, self.model.head):
            unused.requires_grad_(False)

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return the mean loss over corrupted patches, and sums of "loss" and, for colours, "accuracy" over them.

        `key` and the sample numbers decide what is corrupted, and how.
        """
        images = self.images(batch)
        tokens, grid = self.model.tokens(images), self.model.measure_grid(images)
        choices = choose_corruption(batch.indices, tokens.shape[1], key, self.corrupted, self.masked, self.swapped)
        encoded = self.model.encode(corrupt(tokens, self.mask_token, choices), grid)
        patches = encoded[:, self.model.prefix :]
        predictions = widen(self.prediction(gather_patches(patches, choices.places)))
        targets = gather_patches(self.targets(batch.images, images), choices.places)
        compare = compare_pixels if self.target == "pixels" else compare_colours
        measured = compare(predictions, targets)
        if self.training:
            return Outcome(measured["loss"].mean(), {name: sum_and_count(values) for name, values in measured.items()})
        mask = batch.mask[:, None].expand_as(choices.places)
        return evaluation_outcome({name: sum_and_count(values, mask) for name, values in measured.items()})

    def targets(self, images: Tensor, normalised: Tensor) -> Tensor:
        """Return the (B, N, …) targets: colours of the uint8 images, or pixels of the normalised ones."""
        match self.target:
            case "mean-colour":
                return compute_mean_colour(images, self.model.stride)[:, :, None]
            case "colours-4x4":
                return compute_colours_4x4(images, self.model.stride)
            case "pixels":
                return extract_patch_pixels(normalised, self.model.stride)

    def parts_to_compile(self) -> list[nn.Module]:
        """Return the encoder and a hybrid's ResNet: the model itself is never called as a whole."""
        parts = (self.model.backbone, self.model.encoder)
        return [part for part in parts if part is not None]


def _check_options(model: ImageModel, target: str, corrupted: float, masked: float, swapped: float) -> None:
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


def count_outputs(target: Target, channels: int, stride: int) -> int:
    """Return the number of outputs that predict one patch."""
    if target == "pixels":
        return channels * stride * stride
    cells = CELLS * CELLS if target == "colours-4x4" else 1
    return cells << BITS * channels


# ---- Corruption ------------------------------------------------------------------------------------------------------


class Corruption(NamedTuple):
    """Which patches of each image are corrupted, and how. Those neither masked nor swapped stay as they are."""

    places: Tensor
    """(B, M) int64: the corrupted patches, without repetition in an image."""
    masked: Tensor
    """(B, M) bool."""
    swapped: Tensor
    """(B, M) bool."""
    others: Tensor
    """(B, M) int64: the patch whose embedding a swapped one gets. It is another patch, if there is one, of the same
    image, because the number of ranks decides which images share a batch."""


def choose_corruption(
    samples: Tensor, patches: int, key: int, corrupted: float = 0.5, masked: float = 0.8, swapped: float = 0.1
) -> Corruption:
    """Choose the patches to corrupt in images of N `patches`, from their (B,) sample numbers.

    Every image gets the same number, so that shapes are fixed and all ranks have the same weight. What happens to each
    chosen patch is drawn independently.
    """
    place = samples.device
    samples = samples.to(float64_device(place))  # Apple's GPU has not been seen to multiply 64 bits exactly
    count = max(1, round(corrupted * patches))
    order = draw_uniform(derive_seed(key, 0), samples, patches).argsort(dim=1, stable=True)  # stable, for ties
    places = order[:, :count]
    kind = draw_uniform(derive_seed(key, 1), samples, count)
    steps = 1 + draw_integers(derive_seed(key, 2), samples, count, patches - 1)
    return Corruption(
        places.to(place),
        masked=(kind < masked).to(place),
        swapped=((kind >= masked) & (kind < masked + swapped)).to(place),
        others=((places + steps) % patches).to(place),
    )


def corrupt(tokens: Tensor, mask_token: Tensor, choices: Corruption) -> Tensor:
    """Return the (B, N, D) embedded patches with the chosen ones replaced; `mask_token` is (1, D)."""
    places, masked, swapped, others = choices
    own = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
    sources = own.scatter(1, places, torch.where(swapped, others, places))
    hidden = torch.zeros_like(own, dtype=torch.bool).scatter(1, places, masked)
    return torch.where(hidden[:, :, None], mask_token, gather_patches(tokens, sources))


def gather_patches(values: Tensor, places: Tensor) -> Tensor:
    """Return the (B, M, …) values at the (B, M) places of each image, out of (B, N, …)."""
    images = torch.arange(len(values), device=values.device)
    return values[images[:, None], places]


# ---- Targets ---------------------------------------------------------------------------------------------------------


def compute_mean_colour(images: Tensor, stride: int) -> Tensor:
    """Return (B, N) int64 colours of (B, C, height, width) uint8: red · 64 + green · 8 + blue, each from 0 to 7."""
    return quantise_colours(images, stride).flatten(1)


def compute_colours_4x4(images: Tensor, stride: int) -> Tensor:
    """Return (B, N, 16) int64: the mean colours of the 4×4 cells of each patch, row by row."""
    cells: Tensor = quantise_colours(images, stride // CELLS).unflatten(2, (-1, CELLS)).unflatten(1, (-1, CELLS))
    return cells.transpose(2, 3).flatten(3).flatten(1, 2)  # from B, rows, 4, columns, 4


def quantise_colours(images: Tensor, side: int) -> Tensor:
    """Return (B, height / side, width / side) int64: the 3-bit mean colour of each square of uint8 images.

    Integer arithmetic rounds the same way on every device.
    """
    levels = (split_into_squares(images, side).sum(dim=(3, 5), dtype=torch.int64) << BITS) // (256 * side * side)
    number = levels[:, 0]
    for level in levels[:, 1:].unbind(1):
        number = (number << BITS) + level
    return number


def extract_patch_pixels(images: Tensor, stride: int) -> Tensor:
    """Return (B, N, C · stride²): the pixels of each patch, ordered by channel, row and column."""
    return split_into_squares(images, stride).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def split_into_squares(images: Tensor, side: int) -> Tensor:
    """View (B, C, height, width) as (B, C, height / side, side, width / side, side), without a copy."""
    split: Tensor = images.unflatten(3, (-1, side)).unflatten(2, (-1, side))
    return split


# ---- Losses ----------------------------------------------------------------------------------------------------------


def compare_colours(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return (B, M) "loss" and "accuracy" of each patch, means over its cells: (B, M, cells · K) and (B, M, cells)."""
    logits = predictions.unflatten(2, (targets.shape[2], -1))
    losses = F.cross_entropy(logits.flatten(0, 2), targets.flatten(), reduction="none").view_as(targets)
    is_right = logits.argmax(dim=3) == targets
    return {"loss": losses.mean(dim=2), "accuracy": is_right.float().mean(dim=2)}


def compare_pixels(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the (B, M) "loss" of each patch: the mean squared difference of its C · stride² pixels."""
    return {"loss": (predictions - targets).square().mean(dim=2)}
