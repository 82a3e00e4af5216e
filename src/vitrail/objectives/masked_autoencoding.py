"""Masked autoencoding (MAE, arXiv 2111.06377): the encoder sees a quarter of the patches, a decoder predicts the rest.

Not in the paper, which predicts corrupted patches (masked_patches.py). Here hidden patches do not enter the encoder at
all, which saves most of its time. The decoder is thrown away afterwards.

Shapes: B images, C channels, N patches in row-major order on a grid, V visible and H hidden ones, D width, W width of
the decoder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrail.data.loader import Batch
from vitrail.data.order import derive_seed
from vitrail.errors import ConfigError
from vitrail.model.architecture import VitArchitecture
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost, count_encoder_flops
from vitrail.model.encoder import build_encoder
from vitrail.model.initialise import fill_lecun_normal, initialise_module
from vitrail.model.patches import PatchEmbed
from vitrail.model.positions import Grid, SinCosPositions
from vitrail.model.vit import VisionTransformer
from vitrail.objectives.base import Objective, Outcome, evaluation_outcome
from vitrail.objectives.masked_patches import compare_pixels, extract_patch_pixels, gather_patches
from vitrail.objectives.metrics import sum_and_count
from vitrail.objectives.noise import draw_uniform
from vitrail.system.device import float64_device
from vitrail.system.precision import widen

EPS = 1e-6
"""Added to the variance of a patch before its pixels are divided by the root of it."""


class MaskedAutoencoding(Objective):
    """Trains a model to predict the pixels of patches that it does not see.

    Head and pooling, which this does not use, are frozen, as in `MaskedPatches`.
    """

    model: VisionTransformer

    def __init__(
        self,
        model: ImageModel,
        *,
        hidden: float = 0.75,
        normalised: bool = True,
        decoder_width: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        seed: int = 0,
    ) -> None:
        """Take a Vision Transformer, with or without a head.

        Args:
            hidden: share of the patches of each image that the encoder does not see; one at least, and not all.
            normalised: whether the target is each patch's pixels minus their mean, divided by their deviation.
            decoder_width: W, a multiple of 4 and of the heads.
            decoder_depth: number of the decoder's blocks.
            decoder_heads: number of its heads.
            seed: seed of the decoder's initial weights.
        """
        super().__init__(model)
        _check_options(model, hidden, normalised, decoder_width, decoder_heads)
        self.hidden, self.normalised = hidden, normalised
        with torch.device("meta"):  # memory without values: nothing is drawn from torch's own generator
            decoder = PixelDecoder(self.model, decoder_width, decoder_depth, decoder_heads)
        self.decoder = decoder.to_empty(device="cpu")
        self.decoder.initialise(torch.Generator().manual_seed(derive_seed(seed, 1)))
        for unused in (self.model.pool, self.model.pool_norm, self.model.head):
            unused.requires_grad_(False)

    def forward(self, batch: Batch, key: int) -> Outcome:
        """Return the mean squared error over hidden patches, and its sum.

        `key` and the sample numbers decide what is hidden.
        """
        images = self.images(batch)
        tokens, grid = self.model.tokens(images), self.model.measure_grid(images)
        choice = choose_visible(batch.indices, tokens.shape[1], key, self.hidden)
        encoded = self.model.encode(tokens, grid, choice.visible)
        predictions = widen(gather_patches(self.decoder(encoded, choice.visible, grid), choice.hidden))
        targets = extract_patch_pixels(images, self.model.stride)
        if self.normalised:
            targets = normalise_patches(targets)
        measured = compare_pixels(predictions, gather_patches(targets, choice.hidden))
        if self.training:
            return Outcome(measured["loss"].mean(), {name: sum_and_count(values) for name, values in measured.items()})
        mask = batch.mask[:, None].expand_as(choice.hidden)
        return evaluation_outcome({name: sum_and_count(values, mask) for name, values in measured.items()})

    def count_flops(self) -> int:
        """Return the operations of one forward pass of one image: of what the encoder sees, and of the decoder."""
        a, patches = self.model.architecture, self.model.grid[0] * self.model.grid[1]
        visible = patches - count_hidden(patches, self.hidden)
        unseen = count_encoder_flops(a, patches) - count_encoder_flops(a, visible)
        return compute_cost(a).flops - unseen + self.decoder.count_flops(visible, patches)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Set it for the decoder too, which sees all patches."""
        super().set_gradient_checkpointing(enabled)
        self.decoder.encoder.gradient_checkpointing = enabled

    def parts_to_compile(self) -> list[nn.Module]:
        """Return both stacks of blocks: the model itself is never called as a whole."""
        return [self.model.encoder, self.decoder.encoder]


class PixelDecoder(nn.Module):
    """Encoded visible patches → the pixels of all patches: mask embeddings at the hidden places, then a few blocks."""

    def __init__(self, model: VisionTransformer, width: int, depth: int, num_heads: int) -> None:
        super().__init__()
        a = VitArchitecture(
            patch_size=model.stride, image_size=model.image_size, width=width, depth=depth, num_heads=num_heads,
            mlp_dim=4 * width, gelu=model.architecture.gelu, norm_eps=model.architecture.norm_eps,
        )  # fmt: skip
        self.architecture, self.prefix = a, model.prefix
        self.embed = nn.Linear(model.width, width)
        self.mask_token = nn.Parameter(torch.empty(1, width))
        self.positions: nn.Module = SinCosPositions(model.grid, width)
        self.encoder = build_encoder(a, model.grid)
        self.prediction = nn.Linear(width, model.in_channels * model.stride**2)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Fill all parameters, as those of a model are filled."""
        for module in self.modules():
            initialise_module(module, generator)
        for linear in (self.embed, self.prediction):
            fill_lecun_normal(linear, generator)
        self.mask_token.normal_(std=0.02, generator=generator)

    def count_flops(self, visible: int, patches: int) -> int:
        """Return the operations for one image of N `patches`, V of them visible."""
        dense = self.embed.weight.numel() * (self.prefix + visible) + self.prediction.weight.numel() * patches
        return 2 * dense + count_encoder_flops(self.architecture, patches + self.prefix - self.architecture.prefix)

    def forward(self, encoded: Tensor, visible: Tensor, grid: Grid) -> Tensor:
        """Encoded tokens (B, prefix + V, D), their places (B, V) → (B, N, C · stride²)."""
        prefix, patches = self.embed(encoded).tensor_split([self.prefix], dim=1)
        blank = self.mask_token.to(patches.dtype).expand(len(patches), grid[0] * grid[1], -1)
        patches = blank.scatter(1, visible[:, :, None].expand_as(patches), patches) + self.positions(grid)
        decoded = self.encoder(torch.cat([prefix, patches], dim=1))
        pixels: Tensor = self.prediction(decoded[:, self.prefix :])
        return pixels


class VisibleChoice(NamedTuple):
    """Which patches of each image the encoder sees."""

    visible: Tensor
    """(B, V) int64: in no order."""
    hidden: Tensor
    """(B, H) int64: all others."""


def choose_visible(samples: Tensor, patches: int, key: int, hidden: float) -> VisibleChoice:
    """Choose what is hidden in images of N `patches`, from their (B,) sample numbers: equally many in every image."""
    place = samples.device
    samples = samples.to(float64_device(place))  # Apple's GPU has not been seen to multiply 64 bits exactly
    count = count_hidden(patches, hidden)
    order = draw_uniform(derive_seed(key, 0), samples, patches).argsort(dim=1, stable=True).to(place)
    return VisibleChoice(order[:, count:], order[:, :count])


def count_hidden(patches: int, hidden: float) -> int:
    """Return how many of N `patches` are hidden: one at least, and not all."""
    return min(max(1, round(hidden * patches)), patches - 1)


def normalise_patches(pixels: Tensor) -> Tensor:
    """(B, N, P) → the same, every patch with mean 0 and deviation 1."""
    return (pixels - pixels.mean(dim=2, keepdim=True)) / (pixels.var(dim=2, keepdim=True) + EPS).sqrt()


def _check_options(model: ImageModel, hidden: float, normalised: bool, width: int, heads: int) -> None:
    if not isinstance(model, VisionTransformer):
        raise ConfigError(
            f"masked autoencoding hides patches, and a {type(model).__name__} has none: choose a Vision Transformer, "
            'such as "S/16"'
        )
    if model.backbone is not None or not isinstance(model.patch_embed, PatchEmbed):
        raise ConfigError(
            "masked autoencoding hides patches from the encoder, and convolutions in front of it would show them: "
            'choose a plain model, such as "S/16"'
        )
    if (why := model.explain_hidden_patches()) is not None:
        raise ConfigError(f"masked autoencoding: {why}")
    if not 0 < hidden < 1:
        raise ConfigError(f"hidden = {hidden}: give a share between 0 and 1")
    if model.grid[0] * model.grid[1] < 2:
        raise ConfigError("masked autoencoding needs at least two patches: choose larger images or smaller patches")
    if normalised and model.in_channels * model.stride**2 < 2:
        raise ConfigError("a patch of one value cannot be normalised: give normalised=False, or larger patches")
    if heads < 1 or width % heads or width % 4:
        raise ConfigError(f"decoder_width = {width}: give a multiple of 4 and of decoder_heads = {heads}")
