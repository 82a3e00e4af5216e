"""Masked autoencoding: its loss against transformers' on the same weights and mask, and what is visible."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from peers import transformers
from samples import randomise
from vitrail.data.loader import Batch
from vitrail.data.transforms.mixing import Mixing
from vitrail.model.positions import LearnedPositions1d
from vitrail.objectives import masked_autoencoding
from vitrail.objectives.build import build_objective
from vitrail.objectives.masked_autoencoding import (
    MaskedAutoencoding,
    PixelDecoder,
    VisibleChoice,
    choose_visible,
    normalise_patches,
)
from vitrail.training.optim import count_layers_above

SMALL = {"decoder_width": 32, "decoder_depth": 2, "decoder_heads": 2}


def vit(**options):
    sizes = {"image_size": (16, 24), "num_classes": 0, "depth": 2, "width": 32, "num_heads": 2, "mlp_dim": 64}
    return randomise(vitrail.create_model("Ti/4", **{**sizes, **options}))


def batch(count: int = 4, size: tuple[int, int] = (16, 24)) -> Batch:
    images = torch.randint(0, 256, (count, 3, *size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    mask = torch.ones(count, dtype=torch.bool)
    return Batch(images, {}, torch.arange(count) + 11, mask)


def take_images(whole: Batch, part: slice) -> Batch:
    return whole.change_tensors(lambda values: values[part])


def copy_decoder(theirs, decoder: PixelDecoder) -> None:
    """Give our decoder the weights of transformers'."""
    state = {name.removeprefix("decoder_"): tensor for name, tensor in theirs.state_dict().items()}
    ours = {"mask_token": state["mask_token"][0], "positions.table": state["pos_embed"][0, 1:]}
    for kind in ("weight", "bias"):
        ours[f"embed.{kind}"], ours[f"encoder.norm.{kind}"] = state[f"embed.{kind}"], state[f"norm.{kind}"]
        # They order the pixels of a patch by row, column and channel, we by channel, row and column.
        ours[f"prediction.{kind}"] = state[f"pred.{kind}"].unflatten(0, (-1, 3)).transpose(0, 1).flatten(0, 1)
        for number in range(len(decoder.encoder.blocks)):
            block, layer = f"encoder.blocks.{number}", f"layers.{number}"
            parts = [state[f"{layer}.attention.{part}_proj.{kind}"] for part in "qkv"]
            ours[f"{block}.attention.qkv.{kind}"] = torch.cat(parts)
            ours[f"{block}.attention.out.{kind}"] = state[f"{layer}.attention.o_proj.{kind}"]
            for norm, their_norm in (("norm1", "layernorm_before"), ("norm2", "layernorm_after")):
                ours[f"{block}.{norm}.{kind}"] = state[f"{layer}.{their_norm}.{kind}"]
            for layer_name in ("fc1", "fc2"):
                ours[f"{block}.mlp.{layer_name}.{kind}"] = state[f"{layer}.mlp.{layer_name}.{kind}"]
    table = ours["positions.table"]
    decoder.positions = LearnedPositions1d(decoder.positions.grid, table.shape[1], 0)  # theirs has other frequencies
    decoder.load_state_dict(ours)


def build_peer(normalised: bool, hidden: float):
    config = transformers.ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=24, patch_size=4,
        layer_norm_eps=1e-6, decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=128, norm_pix_loss=normalised, mask_ratio=hidden,
    )  # fmt: skip
    theirs = transformers.ViTMAEForPreTraining(config).double().eval()
    table = theirs.decoder.decoder_pos_embed.clone()
    randomise(theirs)
    with torch.no_grad():
        theirs.decoder.decoder_pos_embed.copy_(table)  # fixed; its row for the class token is 0
    return theirs


@pytest.mark.parametrize(("normalised", "hidden"), [(True, 0.75), (False, 0.5)])
def test_loss_and_gradients_equal_those_of_transformers(normalised, hidden, tmp_path, monkeypatch):
    theirs = build_peer(normalised, hidden)
    theirs.save_pretrained(tmp_path)
    model = vitrail.load(tmp_path).double()
    ours = MaskedAutoencoding(model, hidden=hidden, normalised=normalised, **SMALL).double().train()
    copy_decoder(theirs.decoder, ours.decoder)
    images = torch.randn(3, 3, 24, 24, dtype=torch.float64)
    noise = torch.rand(3, 36, dtype=torch.float64)
    order, count = noise.argsort(dim=1), int(36 * (1 - hidden))
    monkeypatch.setattr(
        masked_autoencoding, "choose_visible", lambda *_: VisibleChoice(order[:, :count], order[:, count:])
    )
    monkeypatch.setattr(ours, "images", lambda _: images)
    found, expected = ours(batch(3), 0).loss, theirs(images, noise=noise).loss
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)  # the loss itself is float32
    predictions: Tensor = ours.decoder(
        model.encode(model.tokens(images), None, order[:, :count]), order[:, :count], model.grid
    )
    exact = theirs(images, noise=noise).logits.unflatten(2, (-1, 3)).transpose(2, 3).flatten(2)
    torch.testing.assert_close(predictions, exact, atol=1e-12, rtol=1e-10)
    found.backward()
    expected.backward()
    for mine, their in (
        (
            model.patch_embed.projection.weight.grad.flatten(),
            theirs.vit.embeddings.patch_embeddings.projection.weight.grad.flatten(),
        ),
        (ours.decoder.embed.weight.grad, theirs.decoder.decoder_embed.weight.grad),
    ):
        torch.testing.assert_close(mine, their, atol=1e-7, rtol=1e-5)


@given(st.integers(2, 50), st.floats(0.01, 0.99), st.integers(0, 1 << 40))
def test_every_patch_is_visible_or_hidden(patches, hidden, key):
    choice = choose_visible(torch.arange(3), patches, key, hidden)
    assert torch.equal(torch.cat(choice, dim=1).sort(dim=1).values, torch.arange(patches).expand(3, -1))
    assert choice.visible.shape[1] >= 1
    assert abs(choice.hidden.shape[1] - hidden * patches) < 1


def test_hidden_patches_do_not_reach_the_encoder():
    trained, given_batch = MaskedAutoencoding(vit(), normalised=False, **SMALL).train(), batch()
    seen = []
    trained.model.encoder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    choice = choose_visible(given_batch.indices, 24, 5, 0.75)
    trained(given_batch, 5)
    assert seen[0].shape == (4, trained.model.prefix + 6, 32)
    changed = given_batch.images.clone()
    for image, places in enumerate(choice.hidden):
        for place in places.tolist():
            row, column = divmod(place, 6)
            changed[image, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] ^= 255
    trained(replace(given_batch, images=changed), 5)
    assert torch.equal(seen[0], seen[1])


def test_visible_patches_are_encoded_in_their_places():
    model = vit().eval()
    images = torch.randn(2, 3, 16, 24)
    everything = torch.stack([torch.randperm(24), torch.randperm(24)])
    whole, picked = model.forward_features(images), model.encode(model.tokens(images), None, everything)
    torch.testing.assert_close(picked[:, 1:], whole[:, 1:].gather(1, everything[:, :, None].expand(-1, -1, 32)))


def test_masks_depend_on_samples_and_not_on_batches():
    trained, whole = MaskedAutoencoding(vit(), **SMALL).train(), batch(8)
    halves = [take_images(whole, part) for part in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(trained(whole, 3).loss, torch.stack([trained(half, 3).loss for half in halves]).mean())
    assert trained(whole, 3).loss != trained(whole, 4).loss


def test_an_evaluation_counts_only_what_is_there():
    evaluated = MaskedAutoencoding(vit(), **SMALL).eval()
    given_batch = batch()
    given_batch = replace(given_batch, mask=torch.tensor([True, True, False, False]))
    first = take_images(given_batch, slice(0, 2))
    torch.testing.assert_close(evaluated(given_batch, 0).loss, evaluated(first, 0).loss)


def test_another_image_size_needs_nothing_new():
    assert MaskedAutoencoding(vit(), **SMALL).train()(batch(2, (32, 16)), 0).loss.isfinite()


def test_normalised_patches():
    pixels = torch.randn(2, 3, 48, dtype=torch.float64) * 7 + 3
    made = normalise_patches(pixels)
    torch.testing.assert_close(made.mean(dim=2), torch.zeros(2, 3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(made.std(dim=2), torch.ones(2, 3, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_seed_decides_the_decoder_and_torchs_generator_is_left_alone():
    model, before = vit(), torch.get_rng_state()
    first, again, other = (MaskedAutoencoding(model, seed=seed, **SMALL).decoder.state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_compiled_is_called():
    trained, calls = MaskedAutoencoding(vit(), **SMALL).train(), []
    for part in trained.parts_to_compile():
        part.register_forward_hook(lambda *call: calls.append(call))
    trained(batch(), 0)
    assert len(calls) == len(trained.parts_to_compile()) == 2


REFUSALS = [
    (lambda: vitrail.create_model("BiT-R50x1", device="meta"), {}, "BitResNet"),
    (lambda: vitrail.create_model("R50+Ti/16", device="meta"), {}, "convolutions"),
    (lambda: vit(position="relative"), {}, "positions of their own"),
    (lambda: vit(rotary={}), {}, "positions of their own"),
    (lambda: vit(block="axial", pool="average"), {}, "axial"),
    (vit, {"hidden": 1.0}, "hidden = 1"),
    (lambda: vit(patch_size=1, image_size=4, in_channels=1), {}, "one value"),
    (vit, {"decoder_heads": 0}, "decoder_heads = 0"),
    (vit, {"decoder_width": 30, "decoder_heads": 4}, "decoder_width = 30"),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSALS)
def test_refusals_say_what_to_do(model, options, message):
    with pytest.raises(vitrail.ConfigError, match=message):
        MaskedAutoencoding(model(), **{**SMALL, **options})


def test_built_from_plain_values():
    options = {"hidden": 0.5, "normalised": False, "seed": 4, **SMALL}
    others = {
        "loss": "softmax",
        "label_smoothing": 0.0,
        "target": "pixels",
        "corrupted": 0.5,
        "masked": 0.8,
        "swapped": 0.1,
    }
    built = build_objective(vit(), kind="masked-autoencoding", mixing=Mixing(), **options, **others).train()
    assert torch.equal(built(batch(), 1).loss, MaskedAutoencoding(vit(), **options).train()(batch(), 1).loss)
    with pytest.raises(vitrail.ConfigError, match="mixup"):
        build_objective(vit(), kind="masked-autoencoding", mixing=Mixing(mixup=0.2), **options, **others)


def test_the_decoder_learns_at_the_full_rate():
    above = count_layers_above(MaskedAutoencoding(vit(depth=3), **SMALL))
    assert {count for name, count in above.items() if name.startswith("decoder.")} == {0}
    assert above["model.encoder.blocks.2.mlp.fc1.weight"] == 1
    assert above["model.patch_embed.projection.weight"] == 4


def test_checkpointing_changes_no_gradient():
    trained, gradients = MaskedAutoencoding(vit(), **SMALL).train(), []
    for enabled in (False, True):
        trained.set_gradient_checkpointing(enabled)
        assert trained.decoder.encoder.gradient_checkpointing is enabled
        gradients.append(torch.autograd.grad(trained(batch(), 0).loss, trained.decoder.embed.weight)[0])
    assert torch.equal(*gradients)


def test_operations_are_those_that_torch_counts():
    trained = MaskedAutoencoding(vit(), **SMALL).eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        trained(batch(1), 0)
    assert trained.count_flops() == counter.get_total_flops()
