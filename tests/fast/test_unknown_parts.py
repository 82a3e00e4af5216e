"""No fast path computes another function in silence: for a part it does not know it falls back, with the reason."""

from __future__ import annotations

import pytest
import torch

import vitrail
from samples import images, small_vit
from vitrail.errors import NotApplicableError
from vitrail.fast.cpu.embedders import create_cpu_embedder
from vitrail.fast.cpu.int8 import create_int8_embedder, quantise_weight
from vitrail.fast.cpu.int8_layers import Int8Layer, Int8LayersEmbedder
from vitrail.fast.cpu.int8_operations import TorchOperations, choose_operations
from vitrail.fast.known_parts import find_unfused_part, find_unknown_part
from vitrail.fast.last_block import shorten_last_block
from vitrail.model.architecture import VitArchitecture

UNKNOWN = {
    "rotary positions": {"rotary": {}},
    "a relative bias": {"position": "relative-bias", "position_at": "every-layer"},
    "SwiGLU": {"mlp": "swiglu"},
    "a norm on queries and keys": {"qk_norm": True},
    "a norm inside attention": {"attention_norm": True},
    "a norm inside the MLP": {"mlp_norm": True},
    "keys without a bias": {"key_bias": False},
    "layers without a bias": {"out_bias": False},
    "norms behind the layers": {"norm_at": "after"},
    "a model without a last norm": {"final_norm": False},
    "a norm on patches": {"patch_norm": True},
}
MORE = {
    "layers without a bias": {"mlp_bias": False},
    "a relative bias": {"position": "relative-bias", "position_at": "shared"},
}
CASES = [*UNKNOWN.items(), *MORE.items()]
OF_OLD = {
    "image_size", "in_channels", "patch_size", "width", "depth", "mlp_dim", "num_heads", "num_classes", "pool",
    "class_token", "registers", "position", "position_at", "position_prefix", "block", "representation_size",
    "conv_stem", "backbone", "dropout", "attention_dropout", "stochastic_depth", "layer_scale", "gelu", "norm",
    "norm_eps", "input_norm", "norm_after_pool", "qkv_bias", "patch_bias",
}  # fmt: skip
OUTSIDE_THE_ENCODER = {"pool_heads", "pool_mlp_dim", "pool_prefix"}
"""Fast paths run the model's own pooling."""


def test_every_new_option_is_known_to_be_unknown():
    """A field that is added to the architecture must be added here too, to one of the lists."""
    covered = OF_OLD | OUTSIDE_THE_ENCODER | {name for _, options in CASES for name in options} | {"position_resize"}
    assert set(VitArchitecture.model_fields) <= covered


@pytest.mark.parametrize(("reason", "options"), CASES)
def test_fast_paths_refuse_with_the_reason(reason, options):
    model = small_vit(**options)
    assert find_unknown_part(model.architecture) == reason
    assert not shorten_last_block(model)
    with pytest.raises(NotApplicableError, match=reason):
        create_int8_embedder(model)


@pytest.mark.parametrize(
    "options", [*(options for _, options in CASES), {"position": "relative"}, {"block": "axial", "pool": "average"}]
)
def test_int8_quantises_their_layers_instead(options):
    model, batch = small_vit(**options), images(3)
    embedder = create_cpu_embedder(model, "int8")
    assert isinstance(embedder, Int8LayersEmbedder)
    layers = [part for part in embedder.model.modules() if isinstance(part, Int8Layer)]
    assert len(layers) == len([part for part in model.encoder.modules() if isinstance(part, torch.nn.Linear)])
    found, exact = embedder(batch), model.embed(batch)
    assert 0 < (found - exact).norm() < 0.03 * exact.norm()
    assert torch.equal(embedder(batch[:1]), found[:1]), "an image does not depend on the rest of its batch"


def test_an_int8_layer_is_exact_for_the_bytes_that_it_makes():
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(48, 32)
    x = torch.randn(2, 3, 48, generator=generator)
    least = x.double().amin(dim=-1, keepdim=True)
    step = (x.double().amax(dim=-1, keepdim=True) - least) / 255
    quantised = quantise_weight(layer.weight, layer.bias)
    weight = quantised.kernel.double() * quantised.scale.double()[:, None]
    expected = (((x.double() - least) / step).round() * step + least) @ weight.T + layer.bias.double()
    for operations in (TorchOperations(), choose_operations(48, 32, 1)):
        torch.testing.assert_close(Int8Layer(layer, operations)(x).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("reason", "options"), CASES)
def test_kernels_for_gpus_refuse_with_the_reason(reason, options):
    """Those for inference know most parts, those for training some; test_fused_encoders.py has what they compute."""
    pytest.importorskip("triton")
    from vitrail.fast.gpu.fused_embedder import check_fusible
    from vitrail.fast.gpu.training import check_trainable

    model = small_vit(**options)
    if reason in ("rotary positions", "a norm on queries and keys", "keys without a bias"):
        check_trainable(model)
    else:
        with pytest.raises(NotApplicableError, match=reason):
            check_trainable(model)
    unfused = find_unfused_part(model.architecture)
    assert unfused in (None, reason)
    if unfused is None:
        check_fusible(model)
    else:
        with pytest.raises(NotApplicableError, match=reason):
            check_fusible(model)


@pytest.mark.parametrize(("reason", "options"), CASES)
def test_packed_layers_compute_the_same(reason, options):
    model = small_vit(**options)
    expected = model.embed(images())
    assert not shorten_last_block(model)
    for size in ((16, 24), (32, 16)):
        batch = images(size=size)
        torch.testing.assert_close(create_cpu_embedder(model, "fp32")(batch), model.embed(batch), rtol=0, atol=2e-5)
    assert torch.equal(model.embed(images()), expected)


@pytest.mark.parametrize("options", [{"pool": "attention", "pool_heads": 8, "class_token": True, "pool_prefix": True}])
def test_pooling_of_its_own_stays_fast(options):
    model = small_vit(**options)
    assert find_unknown_part(model.architecture) is None
    exact, fast = model.embed(images()), create_cpu_embedder(model, "int8")(images())
    assert torch.nn.functional.cosine_similarity(exact, fast).min() > 0.99


def test_optimize_of_a_model_with_rotary_positions():
    model = small_vit(**UNKNOWN["rotary positions"], mlp="swiglu")
    fast = vitrail.optimize(model, precision="fp32")
    torch.testing.assert_close(fast(images()), model(images()), rtol=0, atol=2e-5)
